"""How does an engine answer its peers?

One thread polls a ROUTER socket, the ZAP handler's socket where there is a secret, and a wake-up for ``close``.
A message is three frames: the client (added by ROUTER), the call id and a request. Whatever else comes is refused
as malformed where it has a call id, ignored where not; the thread outlives all of it and waits for no client.
"""

import errno
import ipaddress
import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec
import zmq

from hybrid_connector.core.errors import ConfigError, WireError
from hybrid_connector.wire.messages import (
    MAX_DETAIL_CHARS,
    MAX_REQUEST_BYTES,
    Hello,
    RefusalReason,
    Refused,
    Reply,
    Request,
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
    Socket,
    Wakeup,
    bound,
    receive,
    resolve,
)

_RECEIVE_QUEUE = 100  # requests of at most 64 KiB kept per client; more wait in the client, nothing is lost

logger = logging.getLogger(__name__)


class SideChannelServer:
    """Answers requests in one daemon thread; ``answer`` runs there and must not block.

    An exception in ``answer`` becomes a refusal. Without ``security`` only a loopback ``host`` is bound, unless
    ``allow_insecure``. ``send_queue``: replies kept for a client that does not read, later ones are dropped.
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
    ) -> None:
        self._address = Address(host, port)
        self._answer = answer
        self._incarnation = incarnation
        self._security = security
        self._allow_insecure = allow_insecure
        self._send_queue = send_queue
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._faults = FaultLog("side channel server")
        self._stats = dict.fromkeys(
            ("requests", "malformed", "ignored", "answer_failed", "reply_dropped", "strangers", "faults"), 0
        )

    @property
    def port(self) -> int:
        """The bound port; the one asked for before ``start``."""
        return self._address.port

    @property
    def stats(self) -> dict[str, int]:
        """Counts since the start.

        ``requests``: those that ``answer`` saw. ``malformed``: refused as such. ``ignored``: messages without a
        readable call id. ``answer_failed``: exceptions in ``answer``. ``reply_dropped``: the client was gone or did
        not read. ``strangers``: clients with a wrong key. ``faults``: exceptions in the loop itself.
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
            if self._security is not None:
                self._security.protect_server(router)
            router.setsockopt(zmq.IPV6, int(":" in host))
            router.bind(f"tcp://{Address(host, self._address.port)}")
        except (zmq.ZMQError, OverflowError) as error:
            context.destroy(linger=0)
            raise ConfigError(f"side channel: {self._explain(error)}") from error
        endpoint = router.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self._address = Address(self._address.host, int(endpoint.rstrip(b"\0").rpartition(b":")[2]))
        self._wakeup = Wakeup()
        self._thread = threading.Thread(
            target=self._run, args=(context, router, zap), name="hybrid-connector-side-channel-server", daemon=True
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

    def _run(self, context: Context, router: Socket, zap: Socket | None) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup.fileno(), zmq.POLLIN)
        poller.register(router, zmq.POLLIN)
        if zap is not None:
            poller.register(zap, zmq.POLLIN)
        try:
            while not self._stopping.is_set():
                try:
                    ready = dict(poller.poll())
                    if zap in ready and zap is not None:
                        self._admit(zap)
                    if router in ready:
                        self._serve(router)
                except Exception as error:
                    self._stats["faults"] += 1
                    self._faults.report("loop", error)
                    self._stopping.wait(0.05)  # a fault that stays must not take a whole core
        finally:
            context.destroy(linger=0)
            self._wakeup.close()

    def _admit(self, zap: Socket) -> None:
        assert self._security is not None
        answer, accepted = self._security.judge(zap.recv_multipart())
        self._stats["strangers"] += not accepted
        zap.send_multipart(answer)

    def _serve(self, router: Socket) -> None:
        for _ in range(BURST):
            frames = receive(router, 4)
            if frames is None:
                return
            if len(frames) < 2 or len(frames[1]) != CALL_ID_BYTES:
                self._stats["ignored"] += 1
                continue
            client, call_id, *payload = frames
            try:
                router.send_multipart([client, call_id, self._reply_to(payload)], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                self._stats["reply_dropped"] += 1
                self._faults.report("a reply was dropped, its client is gone or does not read", error)

    def _reply_to(self, payload: list[bytes]) -> bytes:
        if len(payload) != 1:
            return encode(
                self._refuse_malformed(f"expected two frames, a call id and a request, got {len(payload) + 1}")
            )
        try:
            request = decode_request(payload[0])
        except WireError as error:
            return encode(self._refuse_malformed(str(error)))
        request_id = "" if isinstance(request, Hello) else request.request_id
        self._stats["requests"] += 1
        try:
            reply = self._answer(request)
            if isinstance(reply, Refused) and len(reply.detail) > MAX_DETAIL_CHARS:
                reply = msgspec.structs.replace(reply, detail=reply.detail[:MAX_DETAIL_CHARS])
            return encode(reply)
        except Exception as error:
            self._stats["answer_failed"] += 1
            self._faults.report(f"{type(request).__name__} could not be answered", error)
            detail = f"{type(error).__name__} while answering {type(request).__name__}; P's log has the details"
            return encode(Refused(request_id, RefusalReason.OTHER, detail, incarnation=self._incarnation))

    def _refuse_malformed(self, detail: str) -> Refused:
        self._stats["malformed"] += 1
        return Refused("", RefusalReason.MALFORMED, detail, incarnation=self._incarnation)
