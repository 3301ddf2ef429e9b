"""Which connections does a server keep, and which must go?

libzmq takes everyone who connects, and keeps a message of which the last frame does not come. Here
1. its monitor tells who came and went, and the server who sent a message;
2. of those that sent one, which takes the secret where there is one, the ``max_connections`` heard last stay; of those
   that did not, half as many that came last, so that who floods a server with connections keeps no one else out;
3. who has sent more than ``max_unread_bytes`` that the server did not get to read goes too (Linux counts them).

Who is sent away is disconnected by the operating system; an honest client connects anew by itself.
"""

import fcntl
import os
import socket
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from hybrid_connector.wire.sockets import BURST, Context, Socket

_TCP_INFO, _BYTES_RECEIVED = getattr(socket, "TCP_INFO", None), 128  # offset of tcpi_bytes_received, Linux 4.1


class Connections:
    """Who is connected to ``router``. Used by the server's thread only.

    ``num_strangers``: connections that ended before a message of theirs was read. ``num_cut``: those sent away.
    """

    def __init__(self, context: Context, router: Socket, max_connections: int, max_unread_bytes: int) -> None:
        self._max_connections = max_connections
        self._max_unread_bytes = max_unread_bytes
        self._port = 0
        self._silent: dict[int, int] = {}  # file descriptor -> bytes received when it last had nothing unread
        self._heard: dict[int, int] = {}
        self._spoke: set[int] = set()  # since the last sweep
        self.num_strangers = 0
        self.num_cut = 0
        router.monitor("inproc://hybrid-connector.connections", zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.monitor: Socket = context.socket(zmq.PAIR)
        self.monitor.setsockopt(zmq.RCVHWM, 0)  # a full one would stop libzmq's only thread
        self.monitor.connect("inproc://hybrid-connector.connections")

    def __len__(self) -> int:
        return len(self._silent) + len(self._heard)

    def listen(self, port: int) -> None:
        """The port that ``router`` is bound to: only its connections are ever touched."""
        self._port = port

    def update(self) -> None:
        """Note who came and went, at most so many at once."""
        for _ in range(BURST):
            try:
                event, fd = struct.unpack("=Hi", self.monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return
            if event == zmq.EVENT_ACCEPTED:
                self._forget(fd)
                self._silent[fd] = 0
                if len(self._silent) > self._max_connections // 2:
                    self._cut(next(iter(self._silent)))
            elif event == zmq.EVENT_DISCONNECTED:
                self.num_strangers += fd in self._silent
                self._forget(fd)

    def hear(self, fd: int) -> None:
        """A message came from ``fd``."""
        if fd not in self._heard and fd not in self._silent:
            self.update()
        held = self._heard if fd in self._heard else self._silent
        if fd not in held:
            return  # gone already
        self._heard[fd] = held.pop(fd)
        self._spoke.add(fd)
        if len(self._heard) > self._max_connections:
            self._cut(next(iter(self._heard)))

    def sweep(self) -> None:
        """Send away who fills the memory with a message that does not end."""
        for held in (self._silent, self._heard):
            for fd in tuple(held):
                received = self._num_received(fd)
                if received is None:
                    continue
                if fd in self._spoke:
                    held[fd] = received
                elif received - held[fd] > self._max_unread_bytes:
                    self._cut(fd)
        self._spoke.clear()

    def _forget(self, fd: int) -> None:
        self._silent.pop(fd, None)
        self._heard.pop(fd, None)
        self._spoke.discard(fd)

    def _cut(self, fd: int) -> None:
        with self._borrow(fd) as connection:
            if connection is not None:
                connection.shutdown(socket.SHUT_RDWR)
        self.num_cut += 1
        self.num_strangers += fd in self._silent
        self._forget(fd)

    def _num_received(self, fd: int) -> int | None:
        """Bytes that libzmq took from the connection so far, those in the kernel's buffer left out."""
        if _TCP_INFO is None:
            return None
        with self._borrow(fd) as connection:
            if connection is None:
                return None
            facts = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _BYTES_RECEIVED + 8)
            if len(facts) < _BYTES_RECEIVED + 8:
                return None
            (received,) = struct.unpack_from("=Q", facts, _BYTES_RECEIVED)
            (waiting,) = struct.unpack("=i", fcntl.ioctl(connection.fileno(), termios.FIONREAD, bytes(4)))
            return int(received - waiting)
        return None

    @contextmanager
    def _borrow(self, fd: int) -> Iterator[socket.socket | None]:
        """The connection behind libzmq's ``fd``; ``None`` where that means something else by now.

        A duplicate is what is looked at: nothing else in this process can take its number meanwhile.
        """
        connection = self._duplicate(fd)
        try:
            yield connection
        except OSError:
            pass  # it ended meanwhile
        finally:
            if connection is not None:
                connection.close()

    def _duplicate(self, fd: int) -> socket.socket | None:
        try:
            duplicate = os.dup(fd)
        except OSError:
            return None
        try:
            connection = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)
            return None
        try:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getsockname()[1] == self._port:
                return connection
        except OSError:
            pass
        connection.close()
        return None
