"""What do the two ends of the side channel share?

1. ``Address`` and ``resolve``: from a host name to numeric addresses.
2. ``bound``, ``receive`` and ``receive_from``: sockets that are limited in what they take, messages of at most so
   many frames.
3. ``Wakeup`` and ``FaultLog``: how a thread is interrupted, and how it reports what went wrong in it.
"""

import ipaddress
import logging
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import zmq

CALL_ID_BYTES = 8
BURST = 256  # messages taken from one socket before the others get a turn
_HEARTBEAT_MS, _SILENCE_MS = 5_000, 15_000  # a connection whose other end vanished is given up after this silence

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

logger = logging.getLogger(__name__)


class Address(NamedTuple):
    """Host (name, IPv4 or IPv6) and port of a side channel."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class FaultLog:
    """Logs each kind of fault once: a peer must not be able to fill the log."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._seen: set[tuple[str, type]] = set()

    def report(self, what: str, error: Exception) -> None:
        kind = (what, type(error))
        if kind not in self._seen:
            self._seen.add(kind)
            logger.warning("%s: %s (said once, counted after that)", self._where, what, exc_info=error)


class Wakeup:
    """Two connected sockets, one of them in a poller: any thread may interrupt the poll, without a lock."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def wake(self) -> None:
        with suppress(OSError):  # full, so the poll is interrupted already; or closed, so nobody polls
            self._writer.send(b"\0")

    def clear(self) -> None:
        with suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


def resolve(host: str) -> list[str]:
    """The numeric addresses of ``host``, IPv4 first; may block for seconds. Raises ``OSError``."""
    host = host.removeprefix("[").removesuffix("]")
    if not host:
        raise OSError("the host is empty")
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except ValueError as error:  # a label that is too long, a zero byte
        raise OSError(f"no host name: {error}") from error
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def bound(zmq_socket: Socket, max_bytes: int) -> None:
    """What both ends set: nothing lingers, frames are bounded, a vanished peer is noticed."""
    zmq_socket.setsockopt(zmq.LINGER, 0)
    zmq_socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    zmq_socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    zmq_socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)


@dataclass(frozen=True, slots=True)
class Message:
    """What a ROUTER received: from which client, which address, which connection (a file descriptor, -1: unknown)."""

    client: bytes
    address: str
    fd: int
    frames: list[bytes]


def receive(zmq_socket: Socket, max_frames: int) -> list[bytes] | None:
    """The next message, ``None`` where there is none; frames from the ``max_frames``-th on are thrown away."""
    try:
        first = zmq_socket.recv(zmq.NOBLOCK)
    except zmq.Again:
        return None
    return [first, *_rest(zmq_socket, max_frames - 1)]


def receive_from(router: Socket, max_frames: int) -> Message | None:
    """The next message and where it came from; ``max_frames`` as in ``receive``, the client's frame not counted."""
    try:
        client = router.recv(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
    return Message(client.bytes, _property(client, "Peer-Address"), _connection(client), _rest(router, max_frames))


def _rest(zmq_socket: Socket, max_frames: int) -> list[bytes]:
    frames: list[bytes] = []
    while zmq_socket.getsockopt(zmq.RCVMORE):
        frame = zmq_socket.recv(zmq.NOBLOCK)
        if len(frames) < max_frames:
            frames.append(frame)
    return frames


def _property(frame: zmq.Frame, name: str) -> str:
    try:
        return str(frame.get(name))
    except zmq.ZMQError:  # libzmq did not note it
        return ""


def _connection(frame: zmq.Frame) -> int:
    number = _property(frame, "__fd")
    return int(number) if number.isdecimal() else -1
