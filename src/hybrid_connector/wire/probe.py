"""Who listens at an address, and would it talk to us?

1. Connect, and read the greeting that opens every ZeroMQ connection (ZMTP 3, RFC 23): it names the mechanism.
2. Where that is CURVE and there is a secret, watch a handshake: it succeeds only where both sides have the same one.

No request is sent; what a server answers is for ``SideChannelClient`` to find out.
"""

import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

import zmq
from zmq.utils.monitor import recv_monitor_message

from hybrid_connector.wire.security import Security
from hybrid_connector.wire.sockets import Address, Context, Socket, bound, resolve

GREETING_BYTES = 64
_OUR_VERSION = b"\xff" + bytes(8) + b"\x7f\x03\x00"
"""A greeting's first bytes. The rest is kept back: a server of another mechanism closes before it has named its own."""
_MAX_FRAME_BYTES = 64 * 1024
_SUCCEEDED = zmq.EVENT_HANDSHAKE_SUCCEEDED
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Listener(StrEnum):
    """Who listens, as far as it shows before the first request."""

    NOBODY = "nobody"  # no connection
    NO_SIDE_CHANNEL = "no side channel"  # a program that does not speak ZeroMQ
    WANTS_SECRET = "wants a secret"  # and we have none
    HAS_NO_SECRET = "has no secret"  # and we have one
    OTHER_SECRET = "has another secret"
    OPEN = "open"  # the connection is up


@dataclass(frozen=True, slots=True)
class Found:
    """``detail``: what was seen, for people. ``connect_s``: how long a TCP connection took."""

    listener: Listener
    detail: str
    connect_s: float = 0.0


def probe(address: Address, security: Security | None, timeout_s: float) -> Found:
    """Look who listens; takes about ``timeout_s`` at most, twice that where the name has several addresses."""
    try:
        hosts = resolve(address.host)
    except OSError as error:
        return Found(Listener.NOBODY, f"{address.host} cannot be resolved: {error}")
    problem = ""
    for host in hosts:
        began = time.monotonic()
        try:
            with socket.create_connection((host, address.port), timeout_s / len(hosts)) as connection:
                connect_s = time.monotonic() - began
                greeting = _read(connection, _OUR_VERSION, began + timeout_s)
        except OSError as error:
            problem = f"{Address(host, address.port)}: {error}"
            continue
        return _judge(Address(host, address.port), greeting, security, timeout_s, connect_s)
    return Found(Listener.NOBODY, problem)


def mechanism(greeting: bytes) -> str | None:
    """The security mechanism that a ZMTP 3 greeting names; ``None`` for bytes that are no such greeting."""
    if len(greeting) < GREETING_BYTES or greeting[0] != 0xFF or greeting[9] != 0x7F or greeting[10] < 3:
        return None
    name = greeting[12:32].rstrip(b"\0")
    return name.decode("ascii") if name.isalnum() and name.isascii() else None


def _read(connection: socket.socket, question: bytes, deadline: float) -> bytes:
    """The first ``GREETING_BYTES`` that come; less where the other side closes or falls silent."""
    received = b""
    with suppress(OSError):  # silent or gone; what came before says enough
        connection.sendall(question)
        while len(received) < GREETING_BYTES and (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            part = connection.recv(GREETING_BYTES - len(received))
            if not part:
                break
            received += part
    return received


def _speaks_http(address: Address, timeout_s: float) -> bool:
    with suppress(OSError), socket.create_connection(address, timeout_s) as connection:
        return _read(connection, b"HEAD / HTTP/1.0\r\n\r\n", time.monotonic() + timeout_s).startswith(b"HTTP/")
    return False


def _judge(address: Address, greeting: bytes, security: Security | None, timeout_s: float, connect_s: float) -> Found:
    spoken = mechanism(greeting)
    if spoken is None:
        if _speaks_http(address, timeout_s):
            return Found(Listener.NO_SIDE_CHANNEL, f"{address} is an HTTP server", connect_s)
        said = f"answers {greeting[:24]!a}" if greeting else "accepts a connection and says nothing"
        return Found(Listener.NO_SIDE_CHANNEL, f"{address} {said}", connect_s)
    if spoken == "NULL":
        listener = Listener.OPEN if security is None else Listener.HAS_NO_SECRET
        return Found(listener, f"{address} takes connections without a secret", connect_s)
    if spoken != "CURVE":
        return Found(Listener.NO_SIDE_CHANNEL, f"{address} wants the mechanism {spoken}", connect_s)
    if security is None:
        return Found(Listener.WANTS_SECRET, f"{address} takes encrypted connections only", connect_s)
    if _shakes_hands(address, security, timeout_s):
        return Found(Listener.OPEN, f"{address} has the same secret; the connection is encrypted", connect_s)
    return Found(Listener.OTHER_SECRET, f"{address} takes encrypted connections, but not with this secret", connect_s)


def _shakes_hands(address: Address, security: Security, timeout_s: float) -> bool:
    """Whether an encrypted connection comes up within ``timeout_s``."""
    context: Context = zmq.Context()
    try:
        dealer: Socket = context.socket(zmq.DEALER)
        bound(dealer, _MAX_FRAME_BYTES)
        dealer.setsockopt(zmq.IPV6, int(":" in address.host))
        security.protect_client(dealer)
        monitor = dealer.get_monitor_socket(_SUCCEEDED | _FAILED)
        dealer.connect(f"tcp://{address}")
        if not monitor.poll(int(timeout_s * 1000)):
            return False
        return bool(recv_monitor_message(monitor)["event"] == _SUCCEEDED)
    finally:
        context.destroy(linger=0)
