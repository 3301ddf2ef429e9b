"""How does an engine answer its peers?

One thread polls a ROUTER socket, its monitor, the ZAP handler's socket where there is a secret, and a wake-up for
``close``. A message is three frames: the client (added by ROUTER), the call id and a request.
1. Who asks too often, by client and by address, is refused as OVERLOADED; who goes on is not answered.
2. What is no request is refused as malformed where it has a call id, ignored where not.
3. Connections are bounded in number and in what they may leave unread.
The thread outlives all of it and waits for no client.
"""

import errno
import ipaddress
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import msgspec
import zmq

from hybrid_connector.core.errors import ConfigError, WireError
from hybrid_connector.core.pace import Pace, Rate, Verdict
from hybrid_connector.wire.connections import Connections
from hybrid_connector.wire.messages import (
    MAX_DETAIL_CHARS,
    MAX_REQUEST_BYTES,
    Hello,
    RefusalReason,
    Refused,
    Release,
    Reply,
    Request,
    Welcome,
    decode_request,
    encode,
)
from hybrid_connector.wire.security import Security
from hybrid_connector.wire.sockets import (
    BURST,
    CALL_ID_BYTES,
    Address,
    Context,
    FaultLog,
    Message,
    Socket,
    Wakeup,
    bound,
    receive_from,
    resolve,
)

_RECEIVE_QUEUE = 32  # requests of at most 64 KiB kept per client; more wait in the client, nothing is lost
_HANDSHAKE_MS = 5_000  # for a stranger to show that it is none
_SWEEP_MS, _TRUSTED_SWEEP_MS = 100, 1_000
"""Between two looks for messages that do not end: 64 connections take 1 ms. Where there is a secret only engines that
have it can send any, so a fault is looked for, not an attack."""

logger = logging.getLogger(__name__)


CLIENT_RATE, ADDRESS_RATE = Rate(5_000, 10_000), Rate(20_000, 100_000)
"""About what one thread can answer. 64 engines behind one address, each with 512 requests whose leases of 30 s are
renewed every 10 s, ask 3,300 times per second, 51 times each; when all ask at once, for grants or after a stall, 512
times each."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a server takes. A question costs a credit and its answer one more for every ``bytes_per_credit``."""

    client: Rate = CLIENT_RATE
    address: Rate = ADDRESS_RATE
    bytes_per_credit: int = 16 * 1024
    max_connections: int = 512
    max_unread_bytes: int = _RECEIVE_QUEUE * MAX_REQUEST_BYTES + 2**20


DEFAULT_LIMITS = Limits()


class SideChannelServer:
    """Answers requests in one daemon thread; ``answer`` runs there and must not block.

    An exception in ``answer`` becomes a refusal. Without ``security`` only a loopback ``host`` is bound, unless
    ``allow_insecure``. ``send_queue``: replies kept for a client that does not read, later ones are dropped. A
    ``Welcome`` is encoded once and held in memory once for all who get it, as long as ``answer`` gives the same one.
    """

    def __init__(
        self,
        host: str,
        port: int,
        answer: Callable[[Request], Reply],
        *,
        incarnation: str,
        security: Security | None,
        allow_insecure: bool = False,
        send_queue: int = 1000,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self._address = Address(host, port)
        self._answer = answer
        self._incarnation = incarnation
        self._security = security
        self._allow_insecure = allow_insecure
        self._send_queue = send_queue
        self._limits = limits
        self._clients = Pace(limits.client)
        self._addresses = Pace(limits.address)
        self._welcome: tuple[Welcome, zmq.Frame] | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._faults = FaultLog("side channel server")
        self._stats = dict.fromkeys(
            (
                "requests",
                "malformed",
                "ignored",
                "overloaded",
                "flood_dropped",
                "answer_failed",
                "reply_dropped",
                "strangers",
                "connections_cut",
                "faults",
            ),
            0,
        )

    @property
    def port(self) -> int:
        """The bound port; the one asked for before ``start``."""
        return self._address.port

    @property
    def stats(self) -> dict[str, int]:
        """Counts since the start.

        ``requests``: those that ``answer`` saw. ``malformed``: refused as such. ``ignored``: messages without a
        readable call id. ``overloaded``: refused as such. ``flood_dropped``: not even refused. ``answer_failed``:
        exceptions in ``answer``. ``reply_dropped``: the client was gone or did not read. ``strangers``: connections
        that ended before a message of theirs was read: wrong key, no key, no ZeroMQ. ``connections_cut``: sent away,
        because there were too many or they sent too much at once. ``faults``: exceptions in the loop itself.
        """
        return dict(self._stats)

    def start(self) -> None:
        """Bind and begin to answer; raises ``ConfigError`` where the address cannot be bound. Only once."""
        if self._thread is not None:
            raise RuntimeError("a side channel server starts once")
        host = self._choose_host()
        context = zmq.Context()
        zap: Socket | None = None
        try:
            if self._security is not None:
                zap = context.socket(zmq.REP)
                zap.bind("inproc://zeromq.zap.01")
            router = context.socket(zmq.ROUTER)
            bound(router, MAX_REQUEST_BYTES)
            router.setsockopt(zmq.RCVHWM, _RECEIVE_QUEUE)
            router.setsockopt(zmq.SNDHWM, self._send_queue)
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to a full or vanished client raises, so it is counted
            router.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
            if self._security is not None:
                self._security.protect_server(router)
            connections = Connections(context, router, self._limits.max_connections, self._limits.max_unread_bytes)
            router.setsockopt(zmq.IPV6, int(":" in host))
            router.bind(f"tcp://{Address(host, self._address.port)}")
        except (zmq.ZMQError, OverflowError) as error:
            context.destroy(linger=0)
            raise ConfigError(f"side channel: {self._explain(error)}") from error
        endpoint = router.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self._address = Address(self._address.host, int(endpoint.rstrip(b"\0").rpartition(b":")[2]))
        connections.listen(self._address.port)
        self._wakeup = Wakeup()
        self._thread = threading.Thread(
            target=self._run,
            args=(context, router, connections, zap),
            name="hybrid-connector-side-channel-server",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Stop answering and free the port; returns when both are done."""
        if self._thread is None:
            return
        self._stopping.set()
        self._wakeup.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _choose_host(self) -> str:
        """The numeric address to bind; refuses what a stranger could reach while there is no secret."""
        if not 0 <= self._address.port < 2**16:
            raise ConfigError(f"side channel: expected a port from 0 to 65535, got {self._address.port}")
        try:
            hosts = ["0.0.0.0"] if self._address.host == "*" else resolve(self._address.host)
        except OSError as error:
            raise ConfigError(f"side channel: expected a host to bind, got {self._address.host!r}: {error}") from error
        if self._security is None:
            if not all(ipaddress.ip_address(host).is_loopback for host in hosts) and not self._allow_insecure:
                raise ConfigError(
                    f"side channel: {self._address} is open to other hosts and there is no secret; set "
                    "HYBRID_CONNECTOR_SECRET, bind to loopback, or allow an insecure side channel"
                )
            logger.warning("The side channel on %s has no secret: whoever reaches it is answered.", self._address)
        return hosts[0]

    def _explain(self, error: Exception) -> str:
        match error:
            case zmq.ZMQError(errno=errno.EADDRINUSE):
                return f"{self._address} is in use by another process"
            case zmq.ZMQError(errno=errno.EADDRNOTAVAIL | errno.ENODEV):
                return f"{self._address.host} is not an address of this host"
            case zmq.ZMQError(errno=errno.EACCES):
                return f"this process may not bind port {self._address.port}"
        return f"cannot bind {self._address}: {error}"

    def _run(self, context: Context, router: Socket, connections: Connections, zap: Socket | None) -> None:
        poller = zmq.Poller()
        for source in (self._wakeup.fileno(), router, connections.monitor, *([zap] if zap is not None else [])):
            poller.register(source, zmq.POLLIN)
        sweep_ms = _SWEEP_MS if self._security is None else _TRUSTED_SWEEP_MS
        sweep_at = 0.0
        try:
            while not self._stopping.is_set():
                try:
                    ready = dict(poller.poll(sweep_ms if len(connections) else None))
                    if zap in ready and zap is not None:
                        self._admit(zap)
                    connections.update()
                    if router in ready:
                        self._serve(router, connections)
                    if time.monotonic() >= sweep_at:
                        connections.sweep()
                        sweep_at = time.monotonic() + sweep_ms / 1000
                    self._stats["strangers"] = connections.num_strangers
                    self._stats["connections_cut"] = connections.num_cut
                except Exception as error:
                    self._stats["faults"] += 1
                    self._faults.report("loop", error)
                    self._stopping.wait(0.05)  # a fault that stays must not take a whole core
        finally:
            context.destroy(linger=0)
            self._wakeup.close()

    def _admit(self, zap: Socket) -> None:
        assert self._security is not None
        answer, _ = self._security.judge(zap.recv_multipart())
        zap.send_multipart(answer)

    def _serve(self, router: Socket, connections: Connections) -> None:
        for _ in range(BURST):
            message = receive_from(router, 3)
            if message is None:
                return
            connections.hear(message.fd)
            self._handle(router, message)

    def _handle(self, router: Socket, message: Message) -> None:
        now = time.monotonic()
        verdict = max(self._clients.judge(message.client, now), self._addresses.judge(message.address, now))
        if verdict is Verdict.DROP:
            self._stats["flood_dropped"] += 1
            return
        if not message.frames or len(message.frames[0]) != CALL_ID_BYTES:
            self._stats["ignored"] += 1
            return
        call_id, *payload = message.frames
        wait_s = 0.0
        if verdict is Verdict.REFUSE:
            wait_s = max(self._clients.wait_s(message.client, now), self._addresses.wait_s(message.address, now))
        reply = self._reply_to(payload, wait_s)
        try:
            router.send_multipart([message.client, call_id, reply], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._stats["reply_dropped"] += 1
            self._faults.report("a reply was dropped, its client is gone or does not read", error)
        weight = len(reply) // self._limits.bytes_per_credit
        if weight:
            self._clients.charge(message.client, weight, now)
            self._addresses.charge(message.address, weight, now)

    def _reply_to(self, payload: list[bytes], wait_s: float) -> bytes | zmq.Frame:
        """``wait_s``: how long the asker has to wait before it asks again; 0 where it is answered."""
        if len(payload) != 1:
            return encode(
                self._refuse_malformed(f"expected two frames, a call id and a request, got {len(payload) + 1}")
            )
        try:
            request = decode_request(payload[0])
        except WireError as error:
            return encode(self._refuse_malformed(str(error)))
        request_id = "" if isinstance(request, Hello) else request.request_id
        if wait_s and not isinstance(request, Release):  # which takes load away
            self._stats["overloaded"] += 1
            detail = f"too many questions, or too large answers: ask again after {wait_s:.2f} s"
            return encode(Refused(request_id, RefusalReason.OVERLOADED, detail, wait_s, incarnation=self._incarnation))
        self._stats["requests"] += 1
        try:
            reply = self._answer(request)
            if isinstance(reply, Refused) and len(reply.detail) > MAX_DETAIL_CHARS:
                reply = msgspec.structs.replace(reply, detail=reply.detail[:MAX_DETAIL_CHARS])
            return self._encode_once(reply) if isinstance(reply, Welcome) else encode(reply)
        except Exception as error:
            self._stats["answer_failed"] += 1
            self._faults.report(f"{type(request).__name__} could not be answered", error)
            detail = f"{type(error).__name__} while answering {type(request).__name__}; P's log has the details"
            return encode(Refused(request_id, RefusalReason.OTHER, detail, incarnation=self._incarnation))

    def _encode_once(self, welcome: Welcome) -> zmq.Frame:
        """Megabytes, and wanted by everyone: libzmq counts references to a frame's content."""
        if self._welcome is None or self._welcome[0] is not welcome:
            self._welcome = welcome, zmq.Frame(encode(welcome))
        return self._welcome[1]

    def _refuse_malformed(self, detail: str) -> Refused:
        self._stats["malformed"] += 1
        return Refused("", RefusalReason.MALFORMED, detail, incarnation=self._incarnation)
