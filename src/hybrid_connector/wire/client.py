"""How does an engine ask its peers without waiting for the dead ones?

1. ``call`` encodes the request, hands it to the client's one thread and returns a future.
2. The thread resolves names elsewhere, keeps one DEALER socket per address and sends a call once the connection is
   up, so no request arrives after its caller gave up.
3. A reply is matched by call id and socket; the schedule fails what is overdue and closes what is idle.
"""

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import zmq

from hybrid_connector.core.errors import HybridConnectorError, PeerError, WireError
from hybrid_connector.wire.messages import (
    MAX_REPLY_BYTES,
    Acquire,
    Granted,
    Hello,
    Refused,
    Release,
    Released,
    Renew,
    Renewed,
    Reply,
    Request,
    Verified,
    Verify,
    Welcome,
    decode_reply,
    encode,
)
from hybrid_connector.wire.security import Security
from hybrid_connector.wire.sockets import (
    BURST,
    CALL_ID_BYTES,
    Address,
    Context,
    FaultLog,
    Socket,
    Wakeup,
    bound,
    is_numeric,
    receive,
    resolve,
)

_CONNECT_MS = 5_000
_RECONNECT_MS, _RECONNECT_MAX_MS = 100, 2_000
_RECEIVE_QUEUE = 64  # replies kept per peer; more wait in the peer
_MAX_WAIT_S = 60.0
_ANSWERS: dict[type, type] = {Hello: Welcome, Acquire: Granted, Renew: Renewed, Verify: Verified, Release: Released}


@dataclass(slots=True, eq=False)
class _Call:
    """A request on its way, and the future that its caller waits for."""

    address: Address
    request: Request
    payload: bytes
    timeout_s: float
    deadline: float
    future: "Future[Reply]"
    call_id: bytes
    sent: bool = False


@dataclass(slots=True, eq=False)
class _Peer:
    """One address. ``calls``: not answered yet; ``unsent``: those of them that wait for a connection."""

    address: Address
    used_at: float
    calls: dict[bytes, _Call] = field(default_factory=dict)
    unsent: dict[bytes, _Call] = field(default_factory=dict)
    socket: Socket | None = None
    resolving: bool = False
    attempt: int = 0
    watched: bool = False  # whether an entry of the schedule will look for idleness


@dataclass(frozen=True, slots=True)
class _Resolved:
    """What a resolver thread found: numeric hosts, or why not."""

    peer: _Peer
    hosts: tuple[str, ...]
    problem: str = ""


class SideChannelClient:
    """Calls servers from one daemon thread; a peer that does not answer fails its own calls only.

    Callbacks of the returned futures run in that thread and must not block. A socket that was not used for ``idle_s``
    is closed; at most ``max_peers`` addresses are held at once. ``resolve`` turns a name into numeric addresses, may
    block, and raises ``OSError``.
    """

    def __init__(
        self,
        *,
        security: Security | None,
        idle_s: float = 300.0,
        max_peers: int = 512,
        resolve: Callable[[str], Sequence[str]] = resolve,
    ) -> None:
        self._security = security
        self._idle_s = idle_s
        self._max_peers = max_peers
        self._resolve = resolve
        self._call_ids = itertools.count(1)
        self._order = itertools.count()
        self._lock = threading.Lock()
        self._closed = False
        self._inbox: deque[_Call | _Resolved] = deque()
        self._peers: dict[Address, _Peer] = {}
        self._sockets: dict[Socket, _Peer] = {}
        self._schedule: list[tuple[float, int, _Call | _Peer]] = []
        self._poller = zmq.Poller()
        self._wakeup = Wakeup()
        self._poller.register(self._wakeup.fileno(), zmq.POLLIN)
        self._faults = FaultLog("side channel client")
        self._stats = dict.fromkeys(("sent", "answered", "timed_out", "late", "malformed", "idle_closed", "faults"), 0)
        self._context: Context = zmq.Context()
        self._thread = threading.Thread(target=self._run, name="hybrid-connector-side-channel-client", daemon=True)
        self._thread.start()

    @property
    def stats(self) -> dict[str, int]:
        """Counts since the start.

        ``late``: replies without a waiting call. ``malformed``: replies that cannot be decoded or answer something
        else. ``idle_closed``: addresses let go. ``faults``: exceptions in the loop itself.
        """
        return dict(self._stats)

    def call(self, address: tuple[str, int], request: Request, timeout_s: float) -> "Future[Reply]":
        """Ask ``address``; never raises and never blocks.

        The future holds the reply, which may be a ``Refused``; or ``PeerError`` where none came within ``timeout_s`` or
        it answers something else; or ``WireError`` where the request cannot be encoded or the reply not decoded.
        """
        future: Future[Reply] = Future()
        try:
            if type(request) not in _ANSWERS:
                raise PeerError(f"expected a request, got {type(request).__name__}")
            address = _check_address(*address)
            call_id = next(self._call_ids).to_bytes(CALL_ID_BYTES, "big")
            deadline = time.monotonic() + timeout_s
            self._post(_Call(address, request, encode(request), timeout_s, deadline, future, call_id))
        except (HybridConnectorError, TypeError) as error:
            future.set_exception(error if isinstance(error, HybridConnectorError) else PeerError(str(error)))
        return future

    def close(self) -> None:
        """Fail all outstanding calls and close all sockets; returns when that is done."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._wakeup.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _post(self, item: _Call | _Resolved) -> None:
        with self._lock:
            if self._closed:
                raise PeerError("the side channel is closed")
            self._inbox.append(item)
            self._wakeup.wake()

    def _run(self) -> None:
        try:
            while not self._closed:
                try:
                    self._turn()
                except Exception as error:
                    self._stats["faults"] += 1
                    self._faults.report("loop", error)
                    time.sleep(0.05)  # a fault that stays must not take a whole core
        finally:
            with self._lock:
                self._closed = True  # nothing enters the inbox from here on, whatever ended the loop
            waiting = [item for item in self._inbox if isinstance(item, _Call)]
            for call in (*waiting, *(call for peer in self._peers.values() for call in peer.calls.values())):
                _fail(call, PeerError(f"{call.address}: the side channel is closed"))
            self._context.destroy(linger=0)
            self._wakeup.close()

    def _turn(self) -> None:
        wait_ms = None
        if self._schedule:  # rounded up, else the last millisecond is spent in a busy loop
            wait_s = min(self._schedule[0][0] - time.monotonic(), _MAX_WAIT_S)
            wait_ms = max(0, int(wait_s * 1000) + 1)
        for ready, event in self._poller.poll(wait_ms):
            peer = self._sockets.get(ready) if isinstance(ready, zmq.Socket) else None
            if peer is None:
                self._wakeup.clear()
                continue
            if event & zmq.POLLIN:
                self._receive(peer)
            if event & zmq.POLLOUT:
                self._send(peer)
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, _Call):
                self._accept(item)
            else:
                item.peer.resolving = False
                self._connect(item.peer, item.hosts, item.problem)
        now = time.monotonic()
        while self._schedule and self._schedule[0][0] <= now:
            _, _, due = heapq.heappop(self._schedule)
            if isinstance(due, _Call):
                self._expire(due)
            else:
                self._let_go_if_idle(due, now)

    def _at(self, when: float, what: _Call | _Peer) -> None:
        heapq.heappush(self._schedule, (when, next(self._order), what))

    def _accept(self, call: _Call) -> None:
        """Queue a call with its peer, and see that the peer is connected."""
        peer = self._peers.get(call.address)
        if peer is None:
            if len(self._peers) >= self._max_peers and not self._make_room():
                _fail(call, PeerError(f"{call.address}: expected at most {self._max_peers} peers at once"))
                return
            peer = self._peers[call.address] = _Peer(call.address, time.monotonic())
        peer.calls[call.call_id] = peer.unsent[call.call_id] = call
        self._at(call.deadline, call)
        if peer.socket is not None:
            if len(peer.unsent) == 1:  # else the poller says when there is room, and trying before costs n**2
                self._send(peer)
        elif not peer.resolving:
            self._open(peer)

    def _open(self, peer: _Peer) -> None:
        """Connect at once where the host is numeric; a name is resolved in a thread, which may take many seconds."""
        if is_numeric(peer.address.host):
            self._connect(peer, (peer.address.host,))
            return
        peer.resolving = True
        name = "hybrid-connector-side-channel-resolver"
        try:
            threading.Thread(target=self._look_up, args=(peer,), name=name, daemon=True).start()
        except RuntimeError as error:
            peer.resolving = False
            self._fail_unsent(peer, f"cannot be resolved: {error}")

    def _look_up(self, peer: _Peer) -> None:
        try:
            found = _Resolved(peer, tuple(self._resolve(peer.address.host)))
        except OSError as error:
            found = _Resolved(peer, (), str(error))
        with suppress(PeerError):  # closed meanwhile
            self._post(found)

    def _connect(self, peer: _Peer, hosts: tuple[str, ...], problem: str = "") -> None:
        if not peer.unsent:
            return
        if not hosts:
            self._fail_unsent(peer, f"cannot be resolved: {problem}")
            return
        host = hosts[peer.attempt % len(hosts)]  # the next one where the last attempt came to nothing
        try:
            dealer: Socket = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            self._fail_unsent(peer, f"no socket is left: {error}")
            return
        try:
            bound(dealer, MAX_REPLY_BYTES)
            dealer.setsockopt(zmq.RCVHWM, _RECEIVE_QUEUE)
            dealer.setsockopt(zmq.IMMEDIATE, 1)  # queue nothing without a connection, forget what a broken one held
            dealer.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
            dealer.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
            dealer.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
            dealer.setsockopt(zmq.IPV6, int(":" in host))
            if self._security is not None:
                self._security.protect_client(dealer)
            dealer.connect(f"tcp://{Address(host, peer.address.port)}")
        except zmq.ZMQError as error:
            dealer.close(linger=0)
            self._fail_unsent(peer, f"cannot be connected to: {error}")
            return
        peer.socket = dealer
        self._sockets[dealer] = peer
        self._send(peer)

    def _disconnect(self, peer: _Peer) -> None:
        if peer.socket is not None:
            self._poller.unregister(peer.socket)
            del self._sockets[peer.socket]
            peer.socket.close(linger=0)
            peer.socket = None

    def _send(self, peer: _Peer) -> None:
        """Send what waits, and ask the poller for a chance to send the rest."""
        assert peer.socket is not None
        try:
            for call in tuple(peer.unsent.values()):
                peer.socket.send_multipart([call.call_id, call.payload], zmq.NOBLOCK)
                call.sent = True
                del peer.unsent[call.call_id]
                self._stats["sent"] += 1
        except zmq.Again:
            pass
        self._poller.register(peer.socket, zmq.POLLIN | (zmq.POLLOUT if peer.unsent else 0))

    def _receive(self, peer: _Peer) -> None:
        assert peer.socket is not None
        for _ in range(BURST):
            frames = receive(peer.socket, 3)
            if frames is None:
                return
            call = peer.calls.get(frames[0])
            if call is None:
                self._stats["late"] += 1
                continue
            self._finish(peer, call)
            try:
                reply = _check(call, frames[1:])
            except HybridConnectorError as error:
                self._stats["malformed"] += 1
                _fail(call, error)
                continue
            self._stats["answered"] += 1
            with suppress(InvalidStateError):  # its caller cancelled
                call.future.set_result(reply)

    def _finish(self, peer: _Peer, call: _Call) -> None:
        del peer.calls[call.call_id]
        peer.unsent.pop(call.call_id, None)
        peer.used_at = time.monotonic()
        if not peer.calls and not peer.watched:
            peer.watched = True
            self._at(peer.used_at + self._idle_s, peer)

    def _expire(self, call: _Call) -> None:
        peer = self._peers.get(call.address)
        if peer is None or peer.calls.get(call.call_id) is not call:
            return
        self._finish(peer, call)
        self._stats["timed_out"] += 1
        why = "" if call.sent else "; the name was not resolved" if peer.resolving else "; there was no connection"
        _fail(call, PeerError(f"no answer from {call.address} within {call.timeout_s:g} s{why}"))
        if not call.sent and peer.socket is not None:  # start afresh: the name may mean another host by now
            peer.attempt += 1
            self._disconnect(peer)
            if peer.unsent:
                self._open(peer)

    def _fail_unsent(self, peer: _Peer, why: str) -> None:
        for call in tuple(peer.unsent.values()):
            self._finish(peer, call)
            _fail(call, PeerError(f"{peer.address} {why}"))

    def _let_go_if_idle(self, peer: _Peer, now: float) -> None:
        peer.watched = False
        if peer.calls or self._peers.get(peer.address) is not peer:
            return
        if peer.used_at + self._idle_s > now:
            peer.watched = True
            self._at(peer.used_at + self._idle_s, peer)
            return
        self._let_go(peer)

    def _let_go(self, peer: _Peer) -> None:
        self._disconnect(peer)
        del self._peers[peer.address]
        self._stats["idle_closed"] += 1

    def _make_room(self) -> bool:
        """Let go of the peer that was idle longest; whether there was one."""
        idle = min((peer for peer in self._peers.values() if not peer.calls), key=lambda p: p.used_at, default=None)
        if idle is not None:
            self._let_go(idle)
        return idle is not None


def _check_address(host: str, port: int) -> Address:
    """Both may come from a client of the engine, so neither is trusted to be what it is declared."""
    if not (isinstance(host, str) and 0 < len(host) <= 255 and host.isprintable()):
        raise PeerError(f"expected a host of at most 255 printable characters, got {ascii(host)[:255]}")
    if not (isinstance(port, int) and 0 < port < 2**16):
        raise PeerError(f"{host}: expected a port from 1 to 65535, got {ascii(port)[:255]}")
    return Address(host, port)


def _check(call: _Call, payload: list[bytes]) -> Reply:
    """The reply to ``call``; raises ``WireError`` where it is none, ``PeerError`` where it answers something else."""
    if len(payload) != 1:
        raise WireError(f"{call.address}: expected two frames, a call id and a reply, got {len(payload) + 1}")
    try:
        reply = decode_reply(payload[0])
    except WireError as error:
        raise WireError(f"{call.address}: {error}") from error
    if not isinstance(reply, _ANSWERS[type(call.request)] | Refused):
        raise PeerError(f"{call.address}: answered {type(call.request).__name__} with {type(reply).__name__}")
    asked = None if isinstance(call.request, Hello) else call.request.request_id
    if not isinstance(reply, Welcome | Refused) and reply.request_id != asked:
        raise PeerError(f"{call.address}: answered for another request than it was asked")
    return reply


def _fail(call: _Call, error: Exception) -> None:
    with suppress(InvalidStateError):  # its caller cancelled
        call.future.set_exception(error)
