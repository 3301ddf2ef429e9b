"""What stands in for the clock, the device, the side channel and a peer? All of it moves only when a test says so."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from hybrid_connector.core.blocks import RankLayout
from hybrid_connector.core.errors import PeerError
from hybrid_connector.wire.manifest import EngineManifest, Factors, RankManifest
from hybrid_connector.wire.messages import Reply, Request


class Clock:
    """Seconds, as far as the test has let them pass."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Stream:
    """A device that does its work in order, when told to.

    ``honest`` marks pass once the work queued before them has run; others lie, and pass at once.
    """

    def __init__(self, honest: bool = True) -> None:
        self._honest = honest
        self._work: deque[Callable[[], object]] = deque()
        self._num_queued = 0

    @property
    def num_run(self) -> int:
        return self._num_queued - len(self._work)

    def queue(self, work: Callable[[], object] = lambda: None) -> None:
        self._work.append(work)
        self._num_queued += 1

    def run(self, num: int | None = None) -> None:
        """Do the next ``num`` pieces of work, or all."""
        for _ in range(len(self._work) if num is None else num):
            self._work.popleft()()

    def mark(self) -> "StreamMark":
        return StreamMark(self, self._num_queued if self._honest else 0)


@dataclass(frozen=True, slots=True)
class StreamMark:
    stream: Stream
    position: int

    def has_passed(self) -> bool:
        return self.stream.num_run >= self.position


@dataclass(slots=True, eq=False)
class Call:
    """One question to a peer, and the means to answer it."""

    address: tuple[str, int]
    request: Request
    timeout_s: float
    deadline: float
    future: "Future[Reply]" = field(default_factory=Future)

    def answer(self, reply: Reply | Exception) -> None:
        if isinstance(reply, Exception):
            self.future.set_exception(reply)
        else:
            self.future.set_result(reply)


class ScriptedCaller:
    """A side channel whose calls a test answers, in any order.

    ``respond`` answers before ``call`` returns, so that callbacks run inside the caller; ``None`` leaves a call open.
    """

    def __init__(self, clock: Clock, respond: Callable[[Call], Reply | Exception | None] | None = None) -> None:
        self._clock = clock
        self.respond = respond
        self.calls: list[Call] = []

    def call(self, address: tuple[str, int], request: Request, timeout_s: float) -> "Future[Reply]":
        call = Call(address, request, timeout_s, self._clock() + timeout_s)
        self.calls.append(call)
        reply = self.respond(call) if self.respond is not None else None
        if reply is not None:
            call.answer(reply)
        return call.future

    def open(self, kind: type | None = None) -> list[Call]:
        """Calls that wait for an answer, oldest first."""
        return [c for c in self.calls if not c.future.done() and (kind is None or isinstance(c.request, kind))]

    def only(self, kind: type) -> Call:
        """The one call that waits for an answer, which must be a ``kind``."""
        (call,) = self.open()
        assert isinstance(call.request, kind), call.request
        return call

    def count(self, kind: type) -> int:
        return sum(isinstance(call.request, kind) for call in self.calls)

    def time_out(self) -> None:
        """Fail what nobody answered in time, as the side channel does."""
        for call in self.open():
            if call.deadline <= self._clock():
                host, port = call.address
                call.answer(PeerError(f"no answer from {host}:{port} within {call.timeout_s:g} s"))


def engine_manifest(
    layouts: Sequence[RankLayout],
    engine_id: str = "prefill-0",
    incarnation: str = "first",
    *,
    addresses: Sequence[int] | None = None,
    identities: Sequence[bytes] | None = None,
    **factors: object,
) -> EngineManifest:
    """What an engine with these ranks publishes, one pipeline stage."""
    return EngineManifest(
        protocol_version=1,
        engine_id=engine_id,
        incarnation=incarnation,
        tp_size=len(layouts),
        factors=Factors.of(factors),
        vllm_version="0",
        connector_version="0",
        lease_s=30.0,
        ranks=tuple(
            RankManifest(
                layout.rank,
                layout,
                4096 if addresses is None else addresses[i],
                "DRAM",
                0,
                "memory",
                b"rank %d" % layout.rank if identities is None else identities[i],
            )
            for i, layout in enumerate(layouts)
        ),
    )
