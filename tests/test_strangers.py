"""What does a stranger learn from a side channel whose secret it does not know? Every byte it gets is looked at."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest
import zmq

from hybrid_connector.core.errors import PeerError
from hybrid_connector.wire.messages import Acquire, Granted, Reply, Request, encode
from hybrid_connector.wire.side_channel import Address, Security, SideChannelClient, SideChannelServer

PATIENCE_S = 20.0
BRIEF_S = 0.3
ASK = Acquire("cmpl-of-a-friend", "token", "decode-0")
INCARNATION = "incarnation-of-p"

GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\1" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""ZMTP 3.1: its version and the mechanism. Nothing that depends on the engine or the secret."""


@pytest.fixture(scope="module")
def security() -> Security:
    return Security.from_secret("correct horse battery staple")


@pytest.fixture
def server(security: Security) -> Iterator[SideChannelServer]:
    def answer(request: Request) -> Reply:
        assert isinstance(request, Acquire)
        return Granted(request.request_id, ((1, 2),), 17, 30.0, incarnation=INCARNATION)

    with SideChannelServer("127.0.0.1", 0, answer, incarnation=INCARNATION, security=security) as running:
        yield running


class Wiretap:
    """A port that passes everything on to a server, and keeps what either side said, per connection."""

    def __init__(self, port: int) -> None:
        self.asked: list[bytearray] = []
        self.answered: list[bytearray] = []
        self._server = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])
        self._stack = ExitStack()
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._server)
            self._stack.callback(client.close)
            self._stack.callback(server.close)
            self.asked.append(bytearray())
            self.answered.append(bytearray())
            self._start(self._pass_on, client, server, self.asked[-1])
            self._start(self._pass_on, server, client, self.answered[-1])

    def _pass_on(self, src: socket.socket, dst: socket.socket, heard: bytearray) -> None:
        try:
            while data := src.recv(65536):
                heard += data
                dst.sendall(data)
        except OSError:
            pass
        finally:
            for end in (src, dst):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> "Wiretap":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for thread in self._threads[1:]:
            thread.join(PATIENCE_S)
        self._stack.close()


def wait_until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def answer_to(said: bytes, port: int) -> bytes:
    """All that comes back, until the server ends the connection or a while has passed."""
    heard = b""
    with socket.create_connection(("127.0.0.1", port), timeout=BRIEF_S) as raw, suppress(OSError):
        raw.sendall(said)
        while data := raw.recv(1000):
            heard += data
    return heard


@pytest.mark.parametrize("secret", [None, "another secret of enough bytes"], ids=["no secret", "another secret"])
def test_a_client_without_the_secret(server: SideChannelServer, secret: str | None) -> None:
    wrong = None if secret is None else Security.from_secret(secret)
    with Wiretap(server.port) as tap:
        with SideChannelClient(security=wrong) as stranger, pytest.raises(PeerError, match="no answer"):
            stranger.call(tap.address, ASK, BRIEF_S).result(PATIENCE_S)
        wait_until(lambda: server.stats["strangers"])
    assert tap.answered
    assert all(GREETING.startswith(answered) for answered in tap.answered)
    assert server.stats["requests"] == 0


@pytest.mark.parametrize("frames", [[b"call-id.", encode(ASK)], [b"", b"", b""]])
def test_a_plain_zeromq_client(server: SideChannelServer, frames: list[bytes]) -> None:
    context = zmq.Context()
    try:
        with Wiretap(server.port) as tap:
            dealer = context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(f"tcp://{tap.address}")
            dealer.send_multipart(frames)
            assert not dealer.poll(int(BRIEF_S * 1000))
            wait_until(lambda: server.stats["strangers"])
            dealer.close()
    finally:
        context.destroy(linger=0)
    assert tap.answered
    assert all(GREETING.startswith(answered) for answered in tap.answered)
    assert server.stats["requests"] == 0


@pytest.mark.parametrize(
    "said",
    [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(300), GREETING, GREETING + b"\x04\xc8\x05HELLO" + bytes(194)],
    ids=len,
)
def test_a_raw_connection(server: SideChannelServer, said: bytes) -> None:
    heard = answer_to(said, server.port)
    assert GREETING.startswith(heard)
    wait_until(lambda: server.stats["strangers"] == 1)
    assert server.stats["requests"] == 0


def test_who_listens_to_a_friend_learns_nothing_and_cannot_repeat_it(
    server: SideChannelServer, security: Security
) -> None:
    with Wiretap(server.port) as tap, SideChannelClient(security=security) as friend:
        assert friend.call(tap.address, ASK, PATIENCE_S).result(PATIENCE_S).incarnation == INCARNATION
    (asked,), (answered,) = tap.asked, tap.answered
    for secret in (ASK.request_id.encode(), b"token", INCARNATION.encode(), security.server_public, b"acquire"):
        assert secret not in asked + answered
    heard = answer_to(asked, server.port)
    # The greeting, and a WELCOME that only who made the first HELLO can open: its cookie is new.
    assert GREETING.startswith(heard[: len(GREETING)])
    assert len(heard) <= len(GREETING) + 2 + 168
    assert server.stats["requests"] == 1
    wait_until(lambda: server.stats["strangers"] == 1)
