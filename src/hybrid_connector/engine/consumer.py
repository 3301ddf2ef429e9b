"""How does D's scheduler get, keep and give back the right to read a peer's blocks?

1. ``acquire`` starts in the background when a request arrives: handshake once per peer, then Acquire.
2. ``status`` tells the scheduler where it stands; by the time blocks are allocated the grant is normally there.
3. ``tick`` renews grants that are held, repeats what was not answered, or with "not yet", and gives up at a deadline.
4. ``release`` gives the lease back: read, failed or no longer wanted.
5. A peer that was silent for as long as a request may wait fails new requests at once (``core.breaker``).

Every promise counts on this process's clock from before the question was sent. One lock guards the state;
answers arrive on the side channel's thread, ticks on this module's own.
"""

import logging
import random
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from hybrid_connector.core.blocks import BlockIds
from hybrid_connector.core.breaker import Breaker
from hybrid_connector.core.errors import HybridConnectorError, IncompatibleError, PeerError
from hybrid_connector.core.leases import Hold
from hybrid_connector.engine.config import ConnectorConfig
from hybrid_connector.engine.published import Failure
from hybrid_connector.wire.manifest import EngineManifest, refuse_incompatible
from hybrid_connector.wire.messages import (
    PROTOCOL_VERSION,
    Acquire,
    Granted,
    Hello,
    Refused,
    Release,
    Renew,
    Renewed,
    Reply,
    Request,
    Welcome,
)

logger = logging.getLogger(__name__)

Address = tuple[str, int]

TICK_S = 0.05
"""Between two looks at retries and renewals: an upper bound on how late one is noticed."""

REFUSED_PEER_S = 5.0
"""How long a refused handshake answers for later requests to the same peer. One that nobody answered does not."""

RETRY_S = 0.1
"""From one renewal, or answer that is none, to the next question. It does not grow: a promise is running out."""

REMEMBER_SILENCE_S = 60.0
"""How long after it may be asked again a peer that nobody needs is still known not to answer."""

CLOSE_WAIT_S = 1.0
"""How long ``close`` waits for answers to its releases: one that is not sent costs P the lease's whole time."""

MAX_TIMES = 4096
"""Latencies kept until somebody takes them: where nobody does, the oldest go."""

PROMPT_S = 0.05
"""A peer that usually grants within this time, and left nothing unanswered for longer, is counted on."""

_ANSWER_WEIGHT = 0.25
"""Of the latest answer in a peer's usual time to answer."""

_MAX_CHARS = {"remote_engine_id": 512, "remote_request_id": 512, "remote_lease_token": 128, "remote_host": 255}
"""What the messages, and the side channel, can hold."""


class Caller(Protocol):
    """The side channel, as far as this module needs it."""

    def call(self, address: Address, request: Request, timeout_s: float) -> "Future[Reply]": ...


@dataclass(frozen=True, slots=True)
class RemoteRequest:
    """Which lease of which peer a request names in its ``kv_transfer_params``."""

    engine_id: str
    request_id: str
    token: str
    address: Address

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> "RemoteRequest":
        """Read the keys. Raises ``HybridConnectorError`` naming the first that is missing or cannot be used."""
        port = params.get("remote_port")
        if not isinstance(port, int) or isinstance(port, bool):
            raise _unusable("remote_port", "int", port)
        if not 0 < port < 65536:
            raise _unusable("remote_port", "1 to 65535", port)
        engine_id, request_id, token, host = (_text(params, key) for key in _MAX_CHARS)
        if not host.isprintable():
            raise _unusable("remote_host", "printable characters", host)
        return cls(engine_id, request_id, token, (host, port))


def _text(params: Mapping[str, Any], key: str) -> str:
    value = params.get(key)
    if not isinstance(value, str):
        raise _unusable(key, "str", value)
    if not 0 < len(value) <= _MAX_CHARS[key]:
        raise _unusable(key, f"1 to {_MAX_CHARS[key]} characters", value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _unusable(key, "Unicode", value) from error
    return value


def _unusable(key: str, expected: str, value: object) -> HybridConnectorError:
    return HybridConnectorError(f"kv_transfer_params.{key}: expected {expected}, got {value!a:.100}")


@dataclass(frozen=True, slots=True)
class Pending:
    """No answer yet."""


@dataclass(frozen=True, slots=True)
class Held:
    """The blocks may be read as long as the grant is kept."""

    manifest: EngineManifest
    block_ids: BlockIds
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The blocks may not be read, and why; ``kind`` is the reason as metrics count it."""

    reason: str
    kind: Failure = field(default=Failure.NO_GRANT, compare=False)


Status = Pending | Held | Lost


@dataclass(slots=True)
class _Peer:
    """What handshakes with an address gave: a manifest, or a refusal that answers for a while, or nothing yet.

    ``asking``: the last of ``num_hellos`` has not ended. ``problem``: why the last one came to nothing.
    ``engine_id``: the engine that the last request expected there. ``answer_s``: how long it usually takes to grant;
    ``None`` before the first. ``unanswered_since``: when it was first asked for a grant after the last it gave.
    """

    manifest: EngineManifest | None = None
    refused_until: float = float("-inf")
    asking: bool = False
    num_hellos: int = 0
    problem: str = ""
    engine_id: str = ""
    answer_s: float | None = None
    unanswered_since: float | None = None
    breaker: Breaker = field(default_factory=Breaker)


@dataclass(slots=True)
class _Wanted:
    """One request's way to a grant.

    ``hellos_before``: its peer's ``num_hellos`` when it came. ``retry_at``: when to ask again what was asked in vain.
    ``problem``: why it was in vain.
    """

    remote: RemoteRequest
    wanted_at: float
    deadline: float
    hellos_before: int
    holder: str = field(default_factory=lambda: secrets.token_hex(8))
    status: Status = Pending()
    hold: Hold | None = None
    asking: bool = False
    retry_at: float | None = None
    problem: str = ""


class Consumer:
    """D's side of the control plane."""

    def __init__(
        self,
        caller: Caller,
        config: ConnectorConfig,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._caller = caller
        self._config = config
        self._clock = clock
        self._chance = chance
        self._lock = threading.RLock()
        self._local: EngineManifest | None = None
        self._peers: dict[Address, _Peer] = {}
        self._wanted: dict[str, _Wanted] = {}
        self._releasing: set[Future[Reply]] = set()
        self._stop = threading.Event()
        self._answered = threading.Event()
        self._due = threading.Event()
        self._ticker: threading.Thread | None = None
        self._times: deque[tuple[str, float]] = deque(maxlen=MAX_TIMES)
        self._counts: Counter[str] = Counter()

    def publish(self, manifest: EngineManifest) -> None:
        """This engine's own manifest, which peers are compared with."""
        self._local = manifest

    def start(self) -> None:
        """Tick in a thread of its own until ``close``."""
        self._ticker = threading.Thread(target=self._run, name="hybrid-connector-leases", daemon=True)
        self._ticker.start()

    def close(self, wait_s: float = CLOSE_WAIT_S) -> None:
        """Stop ticking and give back every lease; waits ``wait_s`` at most for peers to answer."""
        self._stop.set()
        self._due.set()
        if self._ticker is not None:
            self._ticker.join()
        with self._lock:
            for request_id in list(self._wanted):
                self.release(request_id)
            releasing = list(self._releasing)
        wait(releasing, wait_s)  # without the lock: the answers need it

    def acquire(self, request_id: str, remote: RemoteRequest) -> None:
        """Start to acquire what ``remote`` names for the local request."""
        with self._lock:
            peer = self._peers.setdefault(remote.address, _Peer())
            now = self._clock()
            wanted = _Wanted(remote, now, now + self._config.acquire_timeout_s, peer.num_hellos)
            self._wanted[request_id] = wanted
            if remote.engine_id != peer.engine_id and peer.breaker.is_open:
                peer.breaker = Breaker()  # whoever wrote the request has heard from an engine that started since
            peer.engine_id = remote.engine_id
            if peer.breaker.is_open and (peer.asking or not peer.breaker.may_ask(now)):
                self._counts["breaker_refused"] += 1
                self._lose(wanted, self._describe_silence(remote.address, peer, now))
            else:
                self._advance(request_id, wanted)

    def status(self, request_id: str) -> Status:
        """Where the request stands; ``Lost`` for one that was never asked for."""
        with self._lock:
            wanted = self._wanted.get(request_id)
            if wanted is None:
                return Lost("no lease was acquired for this request")
            self._check_hold(wanted)
            return wanted.status

    def holder(self, request_id: str) -> str:
        """As whom P knows this engine for a request that was not released yet."""
        with self._lock:
            return self._wanted[request_id].holder

    def margin_s(self, request_id: str) -> float | None:
        """Seconds for which the request's grant still holds; ``None`` without one."""
        with self._lock:
            wanted = self._wanted.get(request_id)
            return None if wanted is None or wanted.hold is None else wanted.hold.expires_at - self._clock()

    @property
    def counts(self) -> Counter[str]:
        """How often what happened so far, by name: a copy, for the threads that answer and tick go on counting."""
        with self._lock:
            return Counter(self._counts)

    def take_times(self) -> list[tuple[str, float]]:
        """Latencies since the last call, in seconds: ``acquire_s`` and ``handshake_s``."""
        with self._lock:
            times = list(self._times)
            self._times.clear()
        return times

    def is_prompt(self, request_id: str) -> bool:
        """Whether the answer to the request's Acquire is about to come, by how its peer answered before."""
        with self._lock:
            if self._usual_answer_s(request_id) > PROMPT_S:
                return False
            peer = self._peers[self._wanted[request_id].remote.address]
            is_silent = peer.unanswered_since is None or self._clock() - peer.unanswered_since > PROMPT_S
            return peer.manifest is not None and not is_silent

    def wait_grants(self, request_ids: Iterable[str], at_most_s: float) -> None:
        """Wait until these requests are answered; not for peers that usually take longer than ``at_most_s``."""
        deadline = time.monotonic() + at_most_s
        with self._lock:
            waiting = [request_id for request_id in request_ids if self._usual_answer_s(request_id) <= at_most_s]
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            self.wait_answer(left_s)
            waiting = [request_id for request_id in waiting if isinstance(self.status(request_id), Pending)]

    def _usual_answer_s(self, request_id: str) -> float:
        """How long an answer to what was just asked for the request usually takes; endless where nothing was asked."""
        wanted = self._wanted.get(request_id)
        peer = None if wanted is None or not wanted.asking else self._peers[wanted.remote.address]
        return float("inf") if peer is None or peer.answer_s is None else peer.answer_s

    def wait_answer(self, timeout_s: float) -> None:
        """Let the threads that answer run, until one has or the time is over.

        An engine loop that only asks ``status`` again and again keeps the interpreter lock from them: a grant that P
        gave in 0.4 ms was seen to reach its request after 258 ms.
        """
        self._answered.wait(timeout_s)
        self._answered.clear()

    def release(self, request_id: str) -> None:
        """Give the lease back and forget the request; nothing happens for an unknown one."""
        with self._lock:
            wanted = self._wanted.pop(request_id, None)
            if wanted is None:
                return
            remote = wanted.remote
            # Sent after a pending Acquire on the same socket, so P sees them in this order.
            asked_at = self._clock()
            future = self._call(remote.address, Release(remote.request_id, remote.token, wanted.holder))
            self._releasing.add(future)
            future.add_done_callback(lambda done: self._on_released(remote.address, asked_at, done))

    def tick(self) -> None:
        """Renew, repeat and give up what is due."""
        with self._lock:
            now = self._clock()
            for request_id, wanted in list(self._wanted.items()):
                self._check_hold(wanted)
                may_ask = not wanted.asking and (wanted.retry_at is None or now >= wanted.retry_at)
                if isinstance(wanted.status, Held):
                    if may_ask and wanted.hold is not None and wanted.hold.should_renew(now):
                        self._renew(request_id, wanted, wanted.hold.promise_s)
                elif isinstance(wanted.status, Pending):
                    if now >= wanted.deadline:
                        self._give_up(wanted)
                    elif may_ask and wanted.retry_at is not None:
                        self._advance(request_id, wanted)
            self._forget_peers(now)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._due.wait(self._pause_s())
            self._due.clear()
            try:
                self.tick()
            except Exception:
                logger.exception("renewing leases failed; trying again")

    def _pause_s(self) -> float:
        """Until the next retry is due, or the next look at renewals."""
        with self._lock:
            retries = [wanted.retry_at for wanted in self._wanted.values() if wanted.retry_at is not None]
            return min(TICK_S, max(0.0, min(retries, default=float("inf")) - self._clock()))

    def _call(self, address: Address, request: Request, timeout_s: float | None = None) -> "Future[Reply]":
        return self._caller.call(address, request, timeout_s or self._config.handshake_timeout_s)

    def _give_up(self, wanted: _Wanted) -> None:
        host, port = wanted.remote.address
        why = f": {wanted.problem}" if wanted.problem else ""
        self._lose(wanted, f"no grant from {host}:{port} within {self._config.acquire_timeout_s:g} s{why}")

    def _forget_peers(self, now: float) -> None:
        """Clients name addresses, so those where nobody answered as a peer must not pile up."""
        needed = {wanted.remote.address for wanted in self._wanted.values()}
        for address, peer in list(self._peers.items()):
            remembered_until = peer.refused_until
            if peer.breaker.is_open:
                remembered_until = max(remembered_until, peer.breaker.ask_at + REMEMBER_SILENCE_S)
            if peer.manifest is None and not peer.asking and now >= remembered_until and address not in needed:
                del self._peers[address]

    def _advance(self, request_id: str, wanted: _Wanted) -> None:
        """Ask the next question on the way to a grant; waits for a handshake that is under way."""
        wanted.retry_at = None
        peer = self._peers[wanted.remote.address]
        if peer.manifest is not None:
            self._ask_grant(request_id, wanted, peer, peer.manifest)
        elif self._clock() < peer.refused_until:
            self._lose(wanted, peer.problem, Failure.INCOMPATIBLE)
        elif peer.asking or peer.breaker.may_ask(self._clock()):
            self._handshake(wanted.remote.address, peer)
        else:
            wanted.retry_at, wanted.problem = peer.breaker.ask_at, peer.problem or wanted.problem

    def _note_answer(self, address: Address, asked_at: float, error: BaseException | None) -> None:
        """Any answer is a sign of life; a peer that gives none for too long is not relied on any more."""
        peer = self._peers.get(address)
        if peer is None:
            return
        before, now = peer.breaker, self._clock()
        if not isinstance(error, PeerError):
            peer.breaker = Breaker()
            if before.is_open:
                logger.info("%s:%d answers again", *address)
            return
        peer.breaker = before.after_silence(asked_at, now, self._config.acquire_timeout_s, self._chance())
        if peer.breaker.num_openings > before.num_openings:
            self._counts["breaker_opened"] += 1
            peer.manifest = None  # the next question is one Hello, instead of one per request
            level = logging.DEBUG if before.is_open else logging.WARNING
            logger.log(level, "%s: requests fail at once", self._describe_silence(address, peer, now))

    def _describe_silence(self, address: Address, peer: _Peer, now: float) -> str:
        wait_s = peer.breaker.ask_at - now
        again = f"it is asked again in {wait_s:.1f} s" if wait_s > 0 else "it is being asked again"
        silent_s = now - peer.breaker.silent_since
        return f"{address[0]}:{address[1]} did not answer for {silent_s:.0f} s; {again}"

    def _shake_again_or_lose(self, wanted: _Wanted, peer: _Peer, reason: str) -> None:
        """What P said does not fit the manifest: P may have restarted, so ask for a new one, once per request."""
        if peer.num_hellos > wanted.hellos_before:
            self._lose(wanted, reason, Failure.RESTARTED)
        else:
            self._handshake(wanted.remote.address, peer)

    def _handshake(self, address: Address, peer: _Peer) -> None:
        if peer.asking:
            return
        peer.asking, peer.manifest = True, None
        peer.num_hellos += 1
        self._counts["handshakes"] += 1
        asked_at = self._clock()
        future = self._call(address, Hello(PROTOCOL_VERSION))
        future.add_done_callback(self._then_notify(lambda done: self._on_welcome(address, asked_at, done)))

    def _then_notify(self, handle: Callable[["Future[Reply]"], None]) -> Callable[["Future[Reply]"], None]:
        """After an answer the engine may look again, and the ticker may have a new retry to wait for."""

        def handle_and_notify(done: "Future[Reply]") -> None:
            try:
                handle(done)
            finally:
                self._answered.set()
                self._due.set()

        return handle_and_notify

    def _on_welcome(self, address: Address, asked_at: float, done: "Future[Reply]") -> None:
        """Ends in a manifest, in a refusal, or where P may answer better later, in a time to ask again."""
        at = f"{address[0]}:{address[1]}"
        manifest, problem, retry_at, silence = None, "", None, None
        try:
            reply = done.result()
            if isinstance(reply, Welcome):
                self._refuse_incompatible(reply.manifest)
                manifest = reply.manifest
            elif isinstance(reply, Refused):
                problem = f"handshake refused by {at}: {reply.reason}: {reply.detail}"
                retry_at = None if reply.retry_after_s is None else self._clock() + reply.retry_after_s
            else:
                problem = f"{at} answered a handshake with {type(reply).__name__}"
        except PeerError as error:
            problem, silence = f"handshake with {at} failed: {error}", error
        except IncompatibleError as error:
            problem = f"engine at {at} cannot exchange state with this one: {error}"
        except Exception as error:  # the thread that answers must survive whatever a peer sent
            problem = f"handshake with {at} failed: {error}"
        with self._lock:
            peer = self._peers[address]
            if problem:
                self._counts["handshakes_failed"] += 1
                # A dead peer is asked all the time.
                logger.log(logging.DEBUG if problem == peer.problem else logging.WARNING, "%s", problem)
            if manifest is not None:
                self._times.append(("handshake_s", self._clock() - asked_at))
            peer.asking, peer.manifest, peer.problem = False, manifest, problem
            self._note_answer(address, asked_at, silence)
            if silence is not None:
                retry_at = peer.breaker.ask_at
            if manifest is None and retry_at is None:
                peer.refused_until = self._clock() + REFUSED_PEER_S
            for request_id, wanted in list(self._wanted.items()):
                if wanted.remote.address != address or not isinstance(wanted.status, Pending) or wanted.asking:
                    continue
                if retry_at is None:
                    self._advance(request_id, wanted)
                else:
                    wanted.retry_at, wanted.problem = retry_at, problem

    def _refuse_incompatible(self, theirs: EngineManifest) -> None:
        if self._local is None:
            raise HybridConnectorError("this engine has not registered its caches yet")
        refuse_incompatible(ours=self._local, theirs=theirs)

    def _ask_grant(self, request_id: str, wanted: _Wanted, peer: _Peer, manifest: EngineManifest) -> None:
        remote = wanted.remote
        if manifest.engine_id != remote.engine_id:
            self._shake_again_or_lose(
                wanted,
                peer,
                f"{remote.address[0]}:{remote.address[1]} is engine {manifest.engine_id}, "
                f"the request names engine {remote.engine_id}",
            )
            return
        asked_at = self._clock()
        wanted.asking = True
        if peer.unanswered_since is None:
            peer.unanswered_since = asked_at
        future = self._call(remote.address, Acquire(remote.request_id, remote.token, wanted.holder))
        future.add_done_callback(self._then_notify(lambda done: self._on_grant(request_id, wanted, asked_at, done)))

    def _on_grant(self, request_id: str, wanted: _Wanted, asked_at: float, done: "Future[Reply]") -> None:
        with self._lock:
            self._note_answer(wanted.remote.address, asked_at, done.exception())
            wanted.asking = False
            if self._wanted.get(request_id) is not wanted or not isinstance(wanted.status, Pending):
                return
            now = self._clock()
            error = done.exception()
            peer = self._peers[wanted.remote.address]
            if error is not None:
                wanted.retry_at, wanted.problem = max(asked_at + RETRY_S, peer.breaker.ask_at), str(error)
                return
            reply = done.result()
            peer.unanswered_since = None
            before_s = now - asked_at if peer.answer_s is None else peer.answer_s
            peer.answer_s = before_s + _ANSWER_WEIGHT * (now - asked_at - before_s)
            # Not the manifest of when Acquire was sent: another request may have noticed the restart meanwhile.
            manifest = peer.manifest
            if manifest is None:
                self._advance(request_id, wanted)
            elif reply.incarnation != manifest.incarnation:
                self._shake_again_or_lose(wanted, peer, f"engine {manifest.engine_id} restarted; what it held is gone")
            elif isinstance(reply, Granted):
                hold = Hold.since(asked_at, reply.promise_s)
                if not hold.is_valid(now):  # nothing was read yet, so asking again is as good as the first time
                    wanted.retry_at, wanted.problem = now, f"it took {now - asked_at:g} s to answer"
                    return
                wanted.hold = hold
                wanted.status = Held(manifest, reply.block_ids, reply.num_tokens)
                self._counts["grants"] += 1
                self._times.append(("acquire_s", now - wanted.wanted_at))
            elif isinstance(reply, Refused) and reply.retry_after_s is not None:
                wanted.retry_at, wanted.problem = now + reply.retry_after_s, f"{reply.reason}: {reply.detail}"
            elif isinstance(reply, Refused):
                self._counts[f"refused_{reply.reason}"] += 1
                reason = f"lease refused by engine {manifest.engine_id}: {reply.reason}: {reply.detail}"
                self._lose(wanted, reason, Failure.REFUSED)
            else:
                reason = f"engine {manifest.engine_id} answered Acquire with {type(reply).__name__}"
                self._lose(wanted, reason, Failure.REFUSED)

    def _renew(self, request_id: str, wanted: _Wanted, promise_s: float) -> None:
        asked_at = self._clock()
        wanted.asking, wanted.retry_at = True, None
        remote = wanted.remote
        # A third of the promise is used; an answer that is lost must leave time for two more tries.
        timeout_s = min(self._config.handshake_timeout_s, promise_s / 4)
        future = self._call(remote.address, Renew(remote.request_id, remote.token, wanted.holder), timeout_s)
        future.add_done_callback(lambda done: self._on_renewed(request_id, wanted, asked_at, done))

    def _on_renewed(self, request_id: str, wanted: _Wanted, asked_at: float, done: "Future[Reply]") -> None:
        with self._lock:
            self._note_answer(wanted.remote.address, asked_at, done.exception())
            wanted.asking = False
            # A promise that has run out stays broken: P may have reused the blocks before it answered.
            self._check_hold(wanted)
            if self._wanted.get(request_id) is not wanted or not isinstance(wanted.status, Held):
                return
            engine_id = wanted.status.manifest.engine_id
            if done.exception() is not None:
                wanted.retry_at = asked_at + RETRY_S
                return
            reply = done.result()
            if reply.incarnation != wanted.status.manifest.incarnation:
                self._lose(wanted, f"engine {engine_id} restarted while its lease was held", Failure.RESTARTED)
            elif isinstance(reply, Renewed):
                wanted.hold = Hold.since(asked_at, reply.promise_s)
                self._counts["renewals"] += 1
            elif isinstance(reply, Refused) and reply.retry_after_s is not None:
                wanted.retry_at = self._clock() + reply.retry_after_s
            elif isinstance(reply, Refused):
                reason = f"lease not renewed by engine {engine_id}: {reply.reason}: {reply.detail}"
                self._lose(wanted, reason, Failure.LEASE_LOST)
            else:
                self._lose(wanted, f"engine {engine_id} answered Renew with {type(reply).__name__}", Failure.LEASE_LOST)

    def _check_hold(self, wanted: _Wanted) -> None:
        if isinstance(wanted.status, Held) and wanted.hold is not None and not wanted.hold.is_valid(self._clock()):
            reason = f"the lease ran out: P promised {wanted.hold.promise_s:g} s and was not reached since"
            self._lose(wanted, reason, Failure.LEASE_LOST)

    def _lose(self, wanted: _Wanted, reason: str, kind: Failure = Failure.NO_GRANT) -> None:
        self._counts["grants_lost" if isinstance(wanted.status, Held) else "acquires_failed"] += 1
        wanted.status = Lost(reason, kind)
        wanted.hold = None

    def _on_released(self, address: Address, asked_at: float, done: "Future[Reply]") -> None:
        failed = done.exception() is not None or isinstance(done.result(), Refused)
        with self._lock:
            self._note_answer(address, asked_at, done.exception())
            self._releasing.discard(done)
            self._counts["releases_failed" if failed else "releases"] += 1
