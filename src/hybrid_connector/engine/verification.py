"""Does P hold the bytes that D has read? (verification mode, D's scheduler)

1. ``start`` takes the digests that D's ranks computed, each with where its bytes lie on P.
2. ``poll``, each engine step, asks P for its digest of the same bytes, again where it is not ready, and compares.
3. A request has passed when all agree; it has failed with the first that does not, with P's refusal or restart, or
   when P has not answered in time.

Only the scheduler's thread comes here; answers are looked at with the next ``poll``.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from hybrid_connector.core.errors import HybridConnectorError
from hybrid_connector.engine.consumer import Caller, RemoteRequest
from hybrid_connector.engine.exchange import ReadDigest
from hybrid_connector.wire.messages import Refused, Reply, Verified, Verify

VERIFY_TIMEOUT_S = 20.0
"""From a load's end until all of P's digests must have come: a few of its steps, each a long prefill at worst."""
RETRY_S = 0.1
"""From one question to the next where the first was not answered."""
MAX_ASKED = 16
"""Questions under way per request: P computes a step's together, and remembers a bounded number."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A lease as its holder names it, granted by one start of its engine."""

    remote: RemoteRequest
    holder: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """``reason``: why the request failed; ``None`` where it passed."""

    request_id: str
    reason: str | None = None


@dataclass(slots=True)
class _Question:
    """``answer``: under way, or ``None``; then it may be asked from ``ask_at`` on. ``problem``: why again."""

    number: int
    read: ReadDigest
    ask_at: float
    answer: "Future[Reply] | None" = None
    problem: str = ""


@dataclass(slots=True)
class _Verification:
    reference: Reference
    deadline: float
    questions: list[_Question]


class _FailedError(HybridConnectorError):
    """The request does not pass; says why."""


class Verifications:
    """The requests of one D engine whose bytes are being compared. ``call_timeout_s``: for one answer of P."""

    def __init__(self, caller: Caller, call_timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._caller = caller
        self._call_timeout_s = call_timeout_s
        self._clock = clock
        self._running: dict[str, _Verification] = {}

    def start(self, request_id: str, reference: Reference, reads: Sequence[ReadDigest]) -> None:
        """Compare what the local request has read with what ``reference`` names."""
        now = self._clock()
        questions = [_Question(number, read, now) for number, read in enumerate(reads)]
        self._running[request_id] = _Verification(reference, now + VERIFY_TIMEOUT_S, questions)

    def wait_answer(self, at_most_s: float) -> None:
        """Wait until P has answered something that it was asked, where anything was."""
        questions = (question for verification in self._running.values() for question in verification.questions)
        if answers := [question.answer for question in questions if question.answer is not None]:
            wait(answers, at_most_s, return_when=FIRST_COMPLETED)

    def poll(self) -> list[Verdict]:
        """Ask and compare what is due; returns the requests that are decided, each once."""
        verdicts = []
        for request_id, verification in list(self._running.items()):
            try:
                self._advance(verification)
            except _FailedError as error:
                verdicts.append(Verdict(request_id, f"verification failed: {error}"))
                del self._running[request_id]
            else:
                if not verification.questions:
                    verdicts.append(Verdict(request_id))
                    del self._running[request_id]
        return verdicts

    def _advance(self, verification: _Verification) -> None:
        now = self._clock()
        left, num_asked = [], 0
        for question in verification.questions:
            if question.answer is not None and question.answer.done():
                if self._agrees(verification.reference, question, question.answer):
                    continue
                question.answer = None
            left.append(question)
            num_asked += question.answer is not None
        verification.questions = left
        if left and now >= verification.deadline:
            why = next((f": {question.problem}" for question in left if question.problem), "")
            raise _FailedError(f"P did not confirm {len(left)} digests within {VERIFY_TIMEOUT_S:g} s{why}")
        for question in left:
            if num_asked >= MAX_ASKED:
                break
            if question.answer is None and now >= question.ask_at:
                question.answer = self._ask(verification.reference, question)
                num_asked += 1

    def _ask(self, reference: Reference, question: _Question) -> "Future[Reply]":
        remote, read = reference.remote, question.read
        request = Verify(remote.request_id, remote.token, reference.holder, question.number, read.src_rank, read.src)
        return self._caller.call(remote.address, request, self._call_timeout_s)

    def _agrees(self, reference: Reference, question: _Question, answer: "Future[Reply]") -> bool:
        """Whether P's digest came and is ours; ``False`` where to ask again. Raises ``_FailedError``."""
        engine_id, now = reference.remote.engine_id, self._clock()
        error = answer.exception()
        if error is not None:
            question.ask_at, question.problem = now + RETRY_S, str(error)
            return False
        reply = answer.result()
        if reply.incarnation != reference.incarnation:
            raise _FailedError(f"engine {engine_id} restarted")
        if isinstance(reply, Refused) and reply.retry_after_s is not None:
            question.ask_at, question.problem = now + reply.retry_after_s, f"{reply.reason}: {reply.detail}"
            return False
        if isinstance(reply, Refused):
            raise _FailedError(f"refused by engine {engine_id}: {reply.reason}: {reply.detail}")
        if not isinstance(reply, Verified) or reply.number != question.number:
            raise _FailedError(f"engine {engine_id} answered Verify {question.number} with {reply!a:.100}")
        read = question.read
        if reply.digest != read.digest:
            raise _FailedError(
                f"P rank {read.src_rank}, D rank {read.dst_rank}: the digest of {read.src.total_bytes} bytes in "
                f"{len(read.src)} runs is {reply.digest:#018x} on P, {read.digest:#018x} on D"
            )
        return True
