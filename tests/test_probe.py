"""Who listens at an address? Real sockets on loopback."""

import http.server
import socket
import threading
from contextlib import contextmanager

import pytest
import zmq

from hybrid_connector.wire.messages import RefusalReason, Refused
from hybrid_connector.wire.probe import Listener, mechanism, probe
from hybrid_connector.wire.security import Security
from hybrid_connector.wire.side_channel import SideChannelServer
from hybrid_connector.wire.sockets import Address

SECRET, OTHER_SECRET = (Security.from_secret(letter * 16) for letter in "ab")
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


@contextmanager
def server(security):
    def answer(request):
        return Refused("", RefusalReason.OTHER, "", incarnation="first")

    with SideChannelServer("127.0.0.1", 0, answer, incarnation="first", security=security) as serving:
        yield serving


@pytest.mark.parametrize(
    ("theirs", "ours", "listener"),
    [
        (None, None, Listener.OPEN),
        (None, SECRET, Listener.HAS_NO_SECRET),
        (SECRET, None, Listener.WANTS_SECRET),
        (SECRET, SECRET, Listener.OPEN),
        (SECRET, OTHER_SECRET, Listener.OTHER_SECRET),
    ],
)
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_secrets(theirs, ours, listener, host):
    with server(theirs) as serving:
        for _ in range(2):  # the server outlives being looked at
            assert probe(Address(host, serving.port), ours, timeout_s=5).listener is listener
        assert serving.stats["faults"] == serving.stats["requests"] == 0


def test_a_port_where_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    found = probe(Address("127.0.0.1", port), None, timeout_s=5)
    assert found.listener is Listener.NOBODY
    assert found.detail == f"127.0.0.1:{port}: [Errno 111] Connection refused"


def test_a_name_that_is_none():
    found = probe(Address("no-such-host.invalid", 5600), None, timeout_s=5)
    assert found.listener is Listener.NOBODY
    assert found.detail.startswith("no-such-host.invalid cannot be resolved: ")


def test_an_http_server():
    class Quiet(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        found = probe(Address("127.0.0.1", serving.server_port), None, timeout_s=0.5)
        serving.shutdown()
    assert found.listener is Listener.NO_SIDE_CHANNEL
    assert found.detail == f"127.0.0.1:{serving.server_port} is an HTTP server"


def test_a_server_that_never_says_a_word():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        found = probe(Address("127.0.0.1", listening.getsockname()[1]), SECRET, timeout_s=0.2)
    assert found.listener is Listener.NO_SIDE_CHANNEL
    assert found.detail.endswith("accepts a connection and says nothing")


def test_another_mechanism_of_zeromq():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.PLAIN_SERVER, 1)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        found = probe(Address("127.0.0.1", port), SECRET, timeout_s=5)
    assert found.listener is Listener.NO_SIDE_CHANNEL
    assert found.detail.endswith("wants the mechanism PLAIN")


@pytest.mark.parametrize(
    ("greeting", "name"),
    [
        (GREETING, "CURVE"),
        (GREETING.replace(b"CURVE", b"NULL\0"), "NULL"),
        (GREETING[:-1], None),
        (b"", None),
        (b"HTTP/1.1 400 Bad Request\r\n".ljust(64), None),
        (b"\xff" + bytes(8) + b"\x7f\x01" + bytes(53), None),
        (GREETING.replace(b"CURVE", b"\x1b[2J\0"), None),
    ],
)
def test_greetings(greeting, name):
    assert mechanism(greeting) == name
