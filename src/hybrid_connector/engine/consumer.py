"""How does D's scheduler get, keep and give back the right to read a peer's blocks?

1. ``acquire`` starts in the background when a request arrives: handshake once per peer, then Acquire.
2. ``status`` tells the scheduler where it stands; by the time blocks are allocated the grant is normally there.
3. ``tick`` renews grants that are held, repeats what was answered with "not yet" and gives up after a deadline.
4. ``release`` gives the lease back: read, failed or no longer wanted.

Every promise counts on this process's clock from before the question was sent. One lock guards the state;
answers arrive on the side channel's thread, ticks on this module's own.
"""

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from hybrid_connector.core.errors import HybridConnectorError, IncompatibleError
from hybrid_connector.core.leases import Hold
from hybrid_connector.core.planning import plan_engine
from hybrid_connector.engine.config import ConnectorConfig
from hybrid_connector.wire.manifest import EngineManifest, refuse_difference
from hybrid_connector.wire.messages import (
    PROTOCOL_VERSION,
    Acquire,
    Granted,
    Hello,
    RefusalReason,
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
"""How long the outcome of a failed handshake answers for later requests to the same peer."""


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
        """Read the keys. Raises ``HybridConnectorError`` naming the first that is missing or of another type."""

        def field_of(key: str, kind: type) -> Any:
            value = params.get(key)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise HybridConnectorError(f"kv_transfer_params.{key}: expected {kind.__name__}, got {value!r:.100}")
            return value

        port = field_of("remote_port", int)
        if not 0 < port < 65536:
            raise HybridConnectorError(f"kv_transfer_params.remote_port: expected 1 to 65535, got {port}")
        return cls(
            field_of("remote_engine_id", str),
            field_of("remote_request_id", str),
            field_of("remote_lease_token", str),
            (field_of("remote_host", str), port),
        )


@dataclass(frozen=True, slots=True)
class Pending:
    """No answer yet."""


@dataclass(frozen=True, slots=True)
class Held:
    """The blocks may be read as long as the grant is kept."""

    manifest: EngineManifest
    block_ids: tuple[tuple[int, ...], ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The blocks may not be read, and why."""

    reason: str


Status = Pending | Held | Lost


@dataclass(slots=True)
class _Peer:
    """What a handshake with an address gave: a manifest, or a refusal that answers for a while."""

    manifest: EngineManifest | None = None
    refusal: str | None = None
    answered_at: float = float("-inf")
    asking: bool = False


@dataclass(slots=True)
class _Wanted:
    """One request's way to a grant."""

    remote: RemoteRequest
    asked_at: float
    deadline: float
    holder: str = field(default_factory=lambda: secrets.token_hex(8))
    status: Status = Pending()
    hold: Hold | None = None
    asking: bool = False
    retry_at: float | None = None


class Consumer:
    """D's side of the control plane."""

    def __init__(self, caller: Caller, config: ConnectorConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._caller = caller
        self._config = config
        self._clock = clock
        self._lock = threading.RLock()
        self._local: EngineManifest | None = None
        self._peers: dict[Address, _Peer] = {}
        self._wanted: dict[str, _Wanted] = {}
        self._stop = threading.Event()
        self._ticker: threading.Thread | None = None
        self.counts: Counter[str] = Counter()

    def publish(self, manifest: EngineManifest) -> None:
        """This engine's own manifest, which peers are compared with."""
        self._local = manifest

    def start(self) -> None:
        """Tick in a thread of its own until ``close``."""
        self._ticker = threading.Thread(target=self._run, name="hybrid-connector-leases", daemon=True)
        self._ticker.start()

    def close(self) -> None:
        """Give back every lease and stop ticking."""
        self._stop.set()
        if self._ticker is not None:
            self._ticker.join()
        for request_id in list(self._wanted):
            self.release(request_id)

    def acquire(self, request_id: str, remote: RemoteRequest) -> None:
        """Start to acquire what ``remote`` names for the local request."""
        with self._lock:
            now = self._clock()
            wanted = _Wanted(remote, now, now + self._config.acquire_timeout_s)
            self._wanted[request_id] = wanted
            self._advance(request_id, wanted)

    def status(self, request_id: str) -> Status:
        """Where the request stands; ``Lost`` for one that was never asked for."""
        with self._lock:
            wanted = self._wanted.get(request_id)
            if wanted is None:
                return Lost("no lease was acquired for this request")
            self._check_hold(wanted)
            return wanted.status

    def release(self, request_id: str) -> None:
        """Give the lease back and forget the request; nothing happens for an unknown one."""
        with self._lock:
            wanted = self._wanted.pop(request_id, None)
            if wanted is None:
                return
            remote = wanted.remote
            # Sent after a pending Acquire on the same socket, so P sees them in this order.
            future = self._call(remote.address, Release(remote.request_id, remote.token, wanted.holder))
            future.add_done_callback(self._on_released)

    def tick(self) -> None:
        """Renew, repeat and give up what is due."""
        with self._lock:
            now = self._clock()
            for request_id, wanted in list(self._wanted.items()):
                self._check_hold(wanted)
                if isinstance(wanted.status, Held):
                    if wanted.hold is not None and wanted.hold.should_renew(now) and not wanted.asking:
                        self._renew(request_id, wanted)
                elif isinstance(wanted.status, Pending):
                    if now >= wanted.deadline:
                        host, port = wanted.remote.address
                        self._lose(wanted, f"no grant from {host}:{port} within {self._config.acquire_timeout_s:g} s")
                    elif wanted.retry_at is not None and now >= wanted.retry_at:
                        self._advance(request_id, wanted)

    def _run(self) -> None:
        while not self._stop.wait(TICK_S):
            try:
                self.tick()
            except Exception:
                logger.exception("renewing leases failed; trying again")

    def _call(self, address: Address, request: Request) -> "Future[Reply]":
        return self._caller.call(address, request, self._config.handshake_timeout_s)

    def _advance(self, request_id: str, wanted: _Wanted) -> None:
        """Ask the next question on the way to a grant."""
        wanted.retry_at = None
        peer = self._peers.setdefault(wanted.remote.address, _Peer())
        if peer.refusal is not None and self._clock() - peer.answered_at < REFUSED_PEER_S:
            self._lose(wanted, peer.refusal)
        elif peer.manifest is None:
            self._handshake(wanted.remote.address, peer)
        elif not peer.asking:
            self._ask_grant(request_id, wanted, peer.manifest)

    def _shake_again_or_lose(self, wanted: _Wanted, reason: str) -> None:
        """What P said does not fit the manifest: P may have restarted, so ask for a new one, once per request."""
        peer = self._peers[wanted.remote.address]
        if peer.answered_at >= wanted.asked_at:
            self._lose(wanted, reason)
        else:
            self._handshake(wanted.remote.address, peer)

    def _handshake(self, address: Address, peer: _Peer) -> None:
        if peer.asking:
            return
        peer.asking, peer.manifest, peer.refusal = True, None, None
        self.counts["handshakes"] += 1
        future = self._call(address, Hello(PROTOCOL_VERSION))
        future.add_done_callback(lambda done: self._on_welcome(address, done))

    def _on_welcome(self, address: Address, done: "Future[Reply]") -> None:
        manifest, refusal = None, None
        try:
            reply = done.result()
            if isinstance(reply, Welcome):
                self._refuse_incompatible(reply.manifest)
                manifest = reply.manifest
            elif isinstance(reply, Refused):
                refusal = f"handshake refused by {address[0]}:{address[1]}: {reply.reason}: {reply.detail}"
            else:
                refusal = f"{address[0]}:{address[1]} answered a handshake with {type(reply).__name__}"
        except IncompatibleError as error:
            refusal = f"engine at {address[0]}:{address[1]} cannot exchange state with this one: {error}"
        except Exception as error:  # the thread that answers must survive whatever a peer sent
            refusal = f"handshake with {address[0]}:{address[1]} failed: {error}"
        with self._lock:
            peer = self._peers.setdefault(address, _Peer())
            peer.asking, peer.manifest, peer.refusal, peer.answered_at = False, manifest, refusal, self._clock()
            if refusal is not None:
                self.counts["handshakes_failed"] += 1
                logger.warning("%s", refusal)
            for request_id, wanted in list(self._wanted.items()):
                if wanted.remote.address == address and isinstance(wanted.status, Pending) and not wanted.asking:
                    self._advance(request_id, wanted)

    def _refuse_incompatible(self, theirs: EngineManifest) -> None:
        if self._local is None:
            raise HybridConnectorError("this engine has not registered its caches yet")
        refuse_difference(ours=self._local.factors, theirs=theirs.factors)
        plan_engine([rank.layout for rank in self._local.ranks], [rank.layout for rank in theirs.ranks])

    def _ask_grant(self, request_id: str, wanted: _Wanted, manifest: EngineManifest) -> None:
        remote = wanted.remote
        if manifest.engine_id != remote.engine_id:
            self._shake_again_or_lose(
                wanted,
                f"{remote.address[0]}:{remote.address[1]} is engine {manifest.engine_id}, "
                f"the request names engine {remote.engine_id}",
            )
            return
        asked_at = self._clock()
        wanted.asking = True
        future = self._call(remote.address, Acquire(remote.request_id, remote.token, wanted.holder))
        future.add_done_callback(lambda done: self._on_grant(request_id, wanted, manifest, asked_at, done))

    def _on_grant(
        self, request_id: str, wanted: _Wanted, manifest: EngineManifest, asked_at: float, done: "Future[Reply]"
    ) -> None:
        with self._lock:
            wanted.asking = False
            if self._wanted.get(request_id) is not wanted or not isinstance(wanted.status, Pending):
                return
            error = done.exception()
            if error is not None:
                wanted.retry_at = self._clock()
                return
            reply = done.result()
            if reply.incarnation != manifest.incarnation:
                self._shake_again_or_lose(wanted, f"engine {manifest.engine_id} restarted; what it held is gone")
            elif isinstance(reply, Granted):
                wanted.hold = Hold.since(asked_at, reply.promise_s)
                wanted.status = Held(manifest, reply.block_ids, reply.num_tokens)
                self.counts["grants"] += 1
            elif isinstance(reply, Refused) and reply.retry_after_s is not None:
                wanted.retry_at = self._clock() + reply.retry_after_s
            elif isinstance(reply, Refused):
                self.counts[f"refused_{reply.reason}"] += 1
                self._lose(wanted, f"lease refused by engine {manifest.engine_id}: {reply.reason}: {reply.detail}")
            else:
                self._lose(wanted, f"engine {manifest.engine_id} answered Acquire with {type(reply).__name__}")

    def _renew(self, request_id: str, wanted: _Wanted) -> None:
        asked_at = self._clock()
        wanted.asking = True
        remote = wanted.remote
        future = self._call(remote.address, Renew(remote.request_id, remote.token, wanted.holder))
        future.add_done_callback(lambda done: self._on_renewed(request_id, wanted, asked_at, done))

    def _on_renewed(self, request_id: str, wanted: _Wanted, asked_at: float, done: "Future[Reply]") -> None:
        with self._lock:
            wanted.asking = False
            if self._wanted.get(request_id) is not wanted or not isinstance(wanted.status, Held):
                return
            if done.exception() is not None:
                return  # the next tick asks again until the promise is over
            reply = done.result()
            if reply.incarnation != wanted.status.manifest.incarnation:
                self._lose(wanted, f"engine {wanted.status.manifest.engine_id} restarted while its lease was held")
            elif isinstance(reply, Renewed):
                # A promise that had run out meanwhile stays broken: P may have reused the blocks in between.
                self._check_hold(wanted)
                if isinstance(wanted.status, Held):
                    wanted.hold = Hold.since(asked_at, reply.promise_s)
                    self.counts["renewals"] += 1
            else:
                reason = reply.reason if isinstance(reply, Refused) else RefusalReason.MALFORMED
                self._lose(wanted, f"lease not renewed: {reason}")

    def _check_hold(self, wanted: _Wanted) -> None:
        if isinstance(wanted.status, Held) and wanted.hold is not None and not wanted.hold.is_valid(self._clock()):
            self.counts["grants_lost"] += 1
            self._lose(wanted, f"the lease ran out: P promised {wanted.hold.promise_s:g} s and was not reached since")

    def _lose(self, wanted: _Wanted, reason: str) -> None:
        wanted.status = Lost(reason)
        wanted.hold = None

    def _on_released(self, done: "Future[Reply]") -> None:
        error = done.exception()
        self.counts["releases" if error is None and not isinstance(done.result(), Refused) else "releases_failed"] += 1
