"""The side channel over real sockets on loopback: what rubbish, dead peers, restarts and strangers cost (cases 7-9)."""

import logging
import random
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from hybrid_connector.core.errors import ConfigError, PeerError, WireError
from hybrid_connector.core.pace import Rate
from hybrid_connector.wire.messages import (
    MAX_REQUEST_BYTES,
    Acquire,
    Granted,
    Hello,
    RefusalReason,
    Refused,
    Release,
    Released,
    Renew,
    Renewed,
    Reply,
    Request,
    Welcome,
    decode_reply,
    encode,
)
from hybrid_connector.wire.side_channel import (
    Address,
    Limits,
    Security,
    SideChannelClient,
    SideChannelServer,
    load_secret,
)

from fakes import engine_manifest
from layouts import Model, Storage, build_engine

PATIENCE_S = 20.0  # of a test that waits for something that must happen; never waited in full
BRIEF_S = 0.25  # for what must not happen
ASK = Acquire("cmpl-1", "token", "decode-0")
SECRET = "correct horse battery staple"
NO_LIMITS = Limits(client=Rate(1e9, 1e9), address=Rate(1e9, 1e9))


def answer_as(incarnation: str) -> Callable[[Request], Reply]:
    def answer(request: Request) -> Reply:
        match request:
            case Acquire(request_id=request_id):
                return Granted(request_id, ((1, 2), (3,)), 17, 30.0, incarnation=incarnation)
            case Renew(request_id=request_id):
                return Renewed(request_id, 30.0, incarnation=incarnation)
            case Release(request_id=request_id):
                return Released(request_id, incarnation=incarnation)
            case _:
                return Refused("", RefusalReason.OTHER, "this server has no manifest", incarnation=incarnation)

    return answer


def serve(
    incarnation: str = "first",
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    answer: Callable[[Request], Reply] | None = None,
    security: Security | None = None,
    send_queue: int = 1000,
    limits: Limits = NO_LIMITS,
) -> SideChannelServer:
    answer = answer or answer_as(incarnation)
    return SideChannelServer(
        host, port, answer, incarnation=incarnation, security=security, send_queue=send_queue, limits=limits
    )


def address_of(server: SideChannelServer) -> Address:
    return Address("127.0.0.1", server.port)


@pytest.fixture
def server() -> Iterator[SideChannelServer]:
    with serve() as running:
        yield running


@pytest.fixture
def client() -> Iterator[SideChannelClient]:
    with SideChannelClient(security=None) as running:
        yield running


@pytest.fixture(scope="module")
def security() -> Security:
    return Security.from_secret(SECRET)


class RawPeer:
    """A DEALER that sends whatever frames it is told to."""

    def __init__(self, port: int, source: str = "127.0.0.1", **options: int | bytes) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        defaults: dict[str, int | bytes] = {"LINGER": 0, "SNDHWM": 0, "RCVTIMEO": int(PATIENCE_S * 1000)}
        for name, value in (defaults | options).items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.socket.connect(f"tcp://{source}:0;127.0.0.1:{port}")

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def receive(self) -> tuple[bytes, Reply]:
        call_id, payload = self.socket.recv_multipart()
        return call_id, decode_reply(payload)

    def was_disconnected(self) -> bool:
        return bool(self.monitor.poll(int(PATIENCE_S * 1000)))

    def __enter__(self) -> "RawPeer":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.context.destroy(linger=0)


def still_answers(server: SideChannelServer, client: SideChannelClient) -> bool:
    reply = client.call(address_of(server), ASK, PATIENCE_S).result(PATIENCE_S)
    return reply == answer_as("first")(ASK)


@contextmanager
def dead_address() -> Iterator[Address]:
    """A port that the kernel connects, and nobody ever reads."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Address("127.0.0.1", listener.getsockname()[1])


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


# Requests and replies


@pytest.mark.parametrize("request_", [ASK, Renew("r", "t", "h"), Release("r", "t", "h"), Hello(1)], ids=repr)
def test_every_request_is_answered(server: SideChannelServer, client: SideChannelClient, request_: Request) -> None:
    assert client.call(address_of(server), request_, PATIENCE_S).result(PATIENCE_S) == answer_as("first")(request_)
    assert server.stats["requests"] == client.stats["answered"] == 1


def test_many_calls_from_many_threads(server: SideChannelServer, client: SideChannelClient) -> None:
    futures: dict[str, Future[Reply]] = {}

    def ask(thread: int) -> None:
        for i in range(250):
            request_id = f"{thread}-{i}"
            futures[request_id] = client.call(address_of(server), Acquire(request_id, "t", "h"), PATIENCE_S)

    threads = [threading.Thread(target=ask, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(futures) == 2000
    for request_id, future in futures.items():
        reply = future.result(PATIENCE_S)
        assert isinstance(reply, Granted)
        assert reply.request_id == request_id


def test_names_and_ipv6_hosts(client: SideChannelClient) -> None:
    with serve(host="localhost") as named:
        assert client.call(("localhost", named.port), ASK, PATIENCE_S).result(PATIENCE_S)
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no IPv6 loopback")
    for host in ("::1", "[::1]"):
        with serve(host=host) as six:
            assert client.call((host, six.port), ASK, PATIENCE_S).result(PATIENCE_S)


def test_a_cancelled_call_harms_nobody(server: SideChannelServer, client: SideChannelClient) -> None:
    while not client.call(address_of(server), ASK, PATIENCE_S).cancel():  # sometimes the answer is quicker
        pass
    assert still_answers(server, client)
    assert client.stats["faults"] == 0


# Case 7: rubbish


def test_rubbish_is_refused_or_ignored_and_the_server_lives_on(
    server: SideChannelServer, client: SideChannelClient
) -> None:
    call_id = b"call-id."
    unknown_rank = msgspec.msgpack.encode({"type": "hello", "protocol_version": 1, "rank": 99})
    with RawPeer(server.port) as peer:
        for ignored in (
            [b"x"],
            [b""],
            [b"", encode(ASK)],
            [b"short", encode(ASK)],
            [b"x" * 9, encode(ASK)],
            [b""] * 50,
        ):
            peer.send(*ignored)
        malformed: list[list[bytes]] = [
            [],
            [b""],
            [random.Random(1).randbytes(500)],
            [encode(ASK)[:-1]],
            [msgspec.msgpack.encode({"type": "get_rank", "rank": 99})],
            [b"x" * MAX_REQUEST_BYTES],
            [encode(ASK), encode(ASK)],
            [b""] * 1000,
        ]
        for payload in malformed:
            peer.send(call_id, *payload)
            answered_id, reply = peer.receive()
            assert answered_id == call_id
            assert isinstance(reply, Refused)
            assert (reply.reason, reply.request_id, reply.incarnation) == (RefusalReason.MALFORMED, "", "first")
        peer.send(call_id, unknown_rank)  # fields nobody knows are no fault
        assert peer.receive()[1] == answer_as("first")(Hello(1))
    assert still_answers(server, client)
    assert (server.stats["ignored"], server.stats["malformed"], server.stats["faults"]) == (6, len(malformed), 0)


def test_a_frame_of_100_megabytes_ends_its_own_connection_only(
    server: SideChannelServer, client: SideChannelClient
) -> None:
    with RawPeer(server.port) as peer:
        peer.send(b"call-id.", bytes(100_000_000))
        assert peer.was_disconnected()
    with RawPeer(server.port) as peer:
        peer.send(bytes(MAX_REQUEST_BYTES + 1))
        assert peer.was_disconnected()
    assert still_answers(server, client)
    assert server.stats["requests"] == 1


def test_what_is_not_zeromq_at_all(server: SideChannelServer, client: SideChannelClient) -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    huge_frame = b"\x02" + struct.pack(">Q", 2**63)
    for rubbish in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(200), b"\xff" * 200, greeting + huge_frame):
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as raw:
            raw.sendall(rubbish)
            assert still_answers(server, client)


def test_ten_thousand_fuzzed_frames(server: SideChannelServer, client: SideChannelClient) -> None:
    dice = random.Random(20)
    valid = [encode(message) for message in (ASK, Renew("r", "t", "h"), Release("r", "t", "h"), Hello(1))]
    with RawPeer(server.port, RCVHWM=0) as peer:
        for _ in range(10_000):
            payload = bytearray(dice.choice(valid) if dice.random() < 0.7 else dice.randbytes(dice.randrange(200)))
            for _ in range(dice.randrange(4)):
                if payload:
                    payload[dice.randrange(len(payload))] = dice.randrange(256)
            call_id = dice.randbytes(8 if dice.random() < 0.9 else dice.randrange(20))
            peer.send(*[call_id, bytes(payload), b"more", b"and more"][: dice.choice((2, 2, 2, 2, 2, 2, 1, 3, 4))])
        peer.send(b"the-last", encode(ASK))
        last = b""
        while last != b"the-last":
            last, reply = peer.receive()
        assert reply == answer_as("first")(ASK)
    assert still_answers(server, client)
    stats = server.stats
    assert stats["requests"] > 1000
    assert stats["malformed"] > 1000
    assert stats["ignored"] > 100
    assert stats["requests"] + stats["malformed"] + stats["ignored"] == 10_002
    assert stats["faults"] == stats["answer_failed"] == 0


def test_an_exception_in_answer_is_a_refusal_without_its_text(
    client: SideChannelClient, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(request: Request) -> Reply:
        raise KeyError("the secret of request 7")

    with serve(answer=answer) as server:
        for _ in range(3):
            reply = client.call(address_of(server), ASK, PATIENCE_S).result(PATIENCE_S)
            assert isinstance(reply, Refused)
            assert (reply.reason, reply.request_id) == (RefusalReason.OTHER, "cmpl-1")
            assert reply.detail == "KeyError while answering Acquire; P's log has the details"
        assert server.stats["answer_failed"] == 3
    assert len([record for record in caplog.records if "could not be answered" in record.message]) == 1


def test_a_reply_that_cannot_be_sent_is_a_refusal(client: SideChannelClient) -> None:
    replies: list[Reply] = [
        Granted("cmpl-1", ((2**64,),), 1, 1.0, incarnation="first"),
        Refused("cmpl-1", RefusalReason.EXPIRED, "x" * 100_000, incarnation="first"),
    ]
    with serve(answer=lambda _: replies.pop(0)) as server:
        first, second = (client.call(address_of(server), ASK, PATIENCE_S).result(PATIENCE_S) for _ in range(2))
    assert isinstance(first, Refused)
    assert first.reason is RefusalReason.OTHER
    assert isinstance(second, Refused)
    assert (second.reason, len(second.detail)) == (RefusalReason.EXPIRED, 2048)


def test_a_client_that_does_not_read_costs_its_own_replies_only(client: SideChannelClient) -> None:
    big = Granted("cmpl-1", (tuple(range(2**20, 2**20 + 20_000)),), 1, 1.0, incarnation="first")
    num_requests = 500
    all_answered = threading.Event()
    greedy = []

    def answer(request: Request) -> Reply:
        if request != Hello(7):
            return answer_as("first")(request)
        greedy.append(request)
        if len(greedy) == num_requests:
            all_answered.set()
        return big

    with serve(answer=answer, send_queue=4) as server, RawPeer(server.port, RCVHWM=1) as peer:
        for _ in range(num_requests):
            peer.send(b"call-id.", encode(Hello(7)))
        assert all_answered.wait(PATIENCE_S)
        assert still_answers(server, client)
        assert server.stats["reply_dropped"] > 0


# Limits


def wait_until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_who_asks_too_often_is_told_when_to_come_back_and_then_nothing(client: SideChannelClient) -> None:
    limits = Limits(client=Rate(1.0, 10.0), address=Rate(1e6, 1e6))
    with serve(limits=limits) as server, RawPeer(server.port) as flooder:
        for _ in range(100):
            flooder.send(b"call-id.", encode(ASK))
        replies = [flooder.receive()[1] for _ in range(20)]
        assert replies[:10] == [answer_as("first")(ASK)] * 10
        for reply in replies[10:]:
            assert isinstance(reply, Refused)
            assert (reply.reason, reply.request_id) == (RefusalReason.OVERLOADED, "cmpl-1")
            assert 0 < (reply.retry_after_s or 0) <= 12
        assert still_answers(server, client)
        wait_until(lambda: server.stats["flood_dropped"] == 80)
        assert (server.stats["requests"], server.stats["overloaded"]) == (11, 10)


def test_a_release_is_served_though_its_sender_asked_too_often() -> None:
    """It takes load away, and refusing it would keep blocks for the whole lease."""
    with serve(limits=Limits(client=Rate(1e-3, 2.0))) as server, RawPeer(server.port) as peer:
        for request in (ASK, ASK, ASK, Release("r", "t", "h")):
            peer.send(b"call-id.", encode(request))
        kinds = [type(peer.receive()[1]) for _ in range(4)]
        assert kinds == [Granted, Granted, Refused, Released]


def test_many_clients_of_one_address_share_its_limit() -> None:
    limits = Limits(client=Rate(1e-3, 4.0), address=Rate(1e-3, 6.0))
    with serve(limits=limits) as server:
        kinds = []
        for _ in range(3):
            with RawPeer(server.port) as peer:
                for _ in range(3):
                    peer.send(b"call-id.", encode(ASK))
                    kinds.append(type(peer.receive()[1]))
        assert kinds == [Granted] * 6 + [Refused] * 3
        with RawPeer(server.port, source="127.0.0.9") as elsewhere:
            elsewhere.send(b"call-id.", encode(ASK))
            assert isinstance(elsewhere.receive()[1], Granted)


def test_large_answers_count_for_more() -> None:
    big = Granted("cmpl-1", (tuple(range(2**20, 2**20 + 20_000)),), 1, 1.0, incarnation="first")
    with (
        serve(answer=lambda _: big, limits=Limits(client=Rate(1e-3, 5.0))) as server,
        RawPeer(server.port) as peer,
    ):
        kinds = []
        for _ in range(2):
            peer.send(b"call-id.", encode(ASK))
            kinds.append(type(peer.receive()[1]))
        assert kinds == [Granted, Refused]  # 100 kB are six credits


def memory_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_manifest_is_held_once_for_all_who_do_not_read_it(client: SideChannelClient) -> None:
    (layout,) = build_engine(Model(num_attention=1), Storage())
    manifest = engine_manifest([layout], incarnation="first", identities=[bytes(2**20)])
    welcome = Welcome(manifest, incarnation="first")
    all_answered = threading.Event()
    asked = []

    def answer(request: Request) -> Reply:
        if request != Hello(1):
            return answer_as("first")(request)
        asked.append(request)
        if len(asked) == 500:
            all_answered.set()
        return welcome

    with serve(answer=answer) as server, RawPeer(server.port, RCVHWM=1) as peer:
        before = memory_mib()
        for _ in range(500):
            peer.send(b"call-id.", encode(Hello(1)))
        assert all_answered.wait(PATIENCE_S)
        assert still_answers(server, client)
        assert memory_mib() - before < 100  # of the 500 that copies would take
        assert peer.receive()[1] == welcome


def greet(port: int) -> socket.socket:
    """A connection of a DEALER that has shaken hands, without security."""
    raw = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    raw.sendall(greeting + b"\x04" + bytes([len(ready)]) + ready)
    received = b""
    while b"ROUTER" not in received:
        received += raw.recv(1000)
    return raw


def is_cut(raw: socket.socket) -> bool:
    try:
        while raw.recv(1000):
            pass
    except ConnectionError:
        pass
    return True  # else the time is over


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts what a connection received")
def test_a_message_that_does_not_end_ends_its_connection(server: SideChannelServer, client: SideChannelClient) -> None:
    """libzmq keeps its frames, of legal size each, until the last one comes."""
    frame = b"\x03" + struct.pack(">Q", 60_000) + bytes(60_000)
    before = memory_mib()
    with greet(server.port) as raw:

        def send_on() -> bool:
            try:
                raw.sendall(frame * 10)
            except ConnectionError:
                return True
            return False

        wait_until(send_on)
    assert memory_mib() - before < 200
    wait_until(lambda: server.stats["connections_cut"] == 1)
    assert still_answers(server, client)


def test_long_messages_that_do_end_cost_nobody_a_connection(server: SideChannelServer) -> None:
    with RawPeer(server.port) as peer:
        for _ in range(20):
            peer.send(b"call-id.", *[bytes(MAX_REQUEST_BYTES)] * 20)
            assert isinstance(peer.receive()[1], Refused)
        assert server.stats["connections_cut"] == 0


def test_connections_that_say_nothing_make_room(client: SideChannelClient) -> None:
    limits = Limits(max_connections=8)
    with serve(limits=limits) as server, ExitStack() as stack:
        assert still_answers(server, client)
        silent = [stack.enter_context(greet(server.port)) for _ in range(2)]
        for _ in range(10):
            raw = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
            silent.append(stack.enter_context(raw))
        assert all(is_cut(raw) for raw in silent[:8])
        wait_until(lambda: server.stats["connections_cut"] == 8)
        with SideChannelClient(security=None) as another:
            assert still_answers(server, another)
        assert still_answers(server, client)
        assert client.stats["sent"] == 2
        stack.close()
        wait_until(lambda: server.stats["strangers"] == 12)


def test_of_those_that_ask_the_ones_heard_last_stay() -> None:
    with serve(limits=Limits(max_connections=4)) as server, ExitStack() as stack:
        peers = []
        for _ in range(6):
            peer = stack.enter_context(RawPeer(server.port))
            peers.append(peer)
            peer.send(b"call-id.", encode(ASK))
            assert peer.receive()[1]
        assert peers[0].was_disconnected()
        assert peers[1].was_disconnected()
        wait_until(lambda: server.stats["connections_cut"] >= 2)


# Case 8: dead peers


def test_dead_peers_delay_nobody_else(client: SideChannelClient) -> None:
    with serve() as a, serve() as b, serve() as c, dead_address() as silent:
        refusing = Address("127.0.0.1", unused_port())
        dead = [client.call(address, ASK, 3600.0) for address in (silent, refusing) for _ in range(100)]
        live = [client.call(address_of(server), ASK, PATIENCE_S) for server in (a, b, c) for _ in range(100)]
        assert not wait(live, PATIENCE_S).not_done
        assert all(future.result() == answer_as("first")(ASK) for future in live)
        assert not any(future.done() for future in dead)
    client.close()
    for future in dead:
        with pytest.raises(PeerError, match="closed"):
            future.result(0)


def test_a_dead_peer_fails_its_own_calls_and_says_so(server: SideChannelServer, client: SideChannelClient) -> None:
    with dead_address() as silent:
        dead = client.call(silent, ASK, BRIEF_S)
        assert still_answers(server, client)
        with pytest.raises(PeerError, match=f"no answer from 127.0.0.1:{silent.port} within 0.25 s; there was no conn"):
            dead.result(PATIENCE_S)


def test_a_peer_that_is_connected_but_silent(client: SideChannelClient) -> None:
    entered, leave = threading.Event(), threading.Event()

    def answer(request: Request) -> Reply:
        if request == ASK:
            entered.set()
            leave.wait(PATIENCE_S)
        return answer_as("first")(request)

    with serve(answer=answer) as server:
        slow = client.call(address_of(server), ASK, BRIEF_S)
        assert entered.wait(PATIENCE_S)
        with pytest.raises(PeerError, match=r"within 0.25 s$"):
            slow.result(PATIENCE_S)
        leave.set()  # the late reply comes first, and belongs to nobody
        assert client.call(address_of(server), Renew("r", "t", "h"), PATIENCE_S).result(PATIENCE_S)
        assert client.stats["late"] == client.stats["timed_out"] == 1


@pytest.mark.parametrize("host", ["x" * 80, "a..b"])
def test_a_name_that_means_nothing(server: SideChannelServer, client: SideChannelClient, host: str) -> None:
    lost = client.call((host, 1), ASK, PATIENCE_S)
    assert still_answers(server, client)
    with pytest.raises(PeerError, match="cannot be resolved"):
        lost.result(PATIENCE_S)


def test_a_name_that_takes_long_to_resolve_delays_nobody_else(server: SideChannelServer) -> None:
    entered, leave = threading.Event(), threading.Event()

    def resolve(host: str) -> list[str]:
        entered.set()
        leave.wait(PATIENCE_S)
        return ["127.0.0.1"]

    with SideChannelClient(security=None, resolve=resolve) as client:
        slow = client.call(("slow.example", server.port), ASK, PATIENCE_S)
        hasty = client.call(("slow.example", server.port), ASK, BRIEF_S)
        assert entered.wait(PATIENCE_S)
        assert still_answers(server, client)
        with pytest.raises(PeerError, match="the name was not resolved"):
            hasty.result(PATIENCE_S)
        assert not slow.done()
        leave.set()
        assert slow.result(PATIENCE_S) == answer_as("first")(ASK)


def test_the_next_address_of_a_name_is_tried_after_a_failure(server: SideChannelServer) -> None:
    with SideChannelClient(security=None, resolve=lambda _: ["127.0.0.2", "127.0.0.1"]) as client:
        address = ("two-addresses.example", server.port)
        with pytest.raises(PeerError, match="there was no connection"):
            client.call(address, ASK, BRIEF_S).result(PATIENCE_S)
        assert client.call(address, ASK, PATIENCE_S).result(PATIENCE_S) == answer_as("first")(ASK)


@pytest.mark.parametrize("address", [("", 1), ("h", 0), ("h", 65536), ("h", "1"), (None, 1), ("h\n", 1), ("h",), 7])
def test_an_address_that_is_none(client: SideChannelClient, address: object) -> None:
    with pytest.raises(PeerError):
        client.call(address, ASK, PATIENCE_S).result(0)  # type: ignore[arg-type]


def test_a_request_that_cannot_be_sent_fails_alone(server: SideChannelServer, client: SideChannelClient) -> None:
    with pytest.raises(WireError):
        client.call(address_of(server), Acquire("\ud800", "t", "h"), PATIENCE_S).result(0)
    with pytest.raises(PeerError, match="expected a request, got int"):
        client.call(address_of(server), 7, PATIENCE_S).result(0)  # type: ignore[arg-type]
    refused = client.call(address_of(server), Acquire("x" * 600, "t", "h"), PATIENCE_S).result(PATIENCE_S)
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.MALFORMED


class Impostor:
    """A ROUTER that answers each request with frames of its own choice; ``b"ID"`` stands for the call id."""

    def __init__(self, *replies: list[bytes]) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        self.address = Address("127.0.0.1", self.socket.bind_to_random_port("tcp://127.0.0.1"))
        self.replies = replies
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        for reply in self.replies:
            peer, call_id, _ = self.socket.recv_multipart()
            self.socket.send_multipart([peer, *(call_id if frame == b"ID" else frame for frame in reply)])

    def close(self) -> None:
        self.thread.join()
        self.context.destroy(linger=0)


def test_replies_that_are_none(client: SideChannelClient) -> None:
    cases: list[tuple[list[bytes], type[Exception], str]] = [
        ([b"ID", b"rubbish"], WireError, "127.0.0.1:.*expected a reply"),
        ([b"ID"], WireError, "expected two frames"),
        ([b"ID", b"", b"", b""], WireError, "expected two frames"),
        ([b"ID", encode(Renewed("cmpl-1", 1.0, incarnation="i"))], PeerError, "answered Acquire with Renewed"),
        ([b"ID", encode(Granted("cmpl-2", (), 1, 1.0, incarnation="i"))], PeerError, "another request"),
    ]
    impostor = Impostor(*(reply for reply, _, _ in cases), [b"ID", encode(answer_as("i")(ASK))])
    for _, error, text in cases:
        with pytest.raises(error, match=text):
            client.call(impostor.address, ASK, PATIENCE_S).result(PATIENCE_S)
    assert client.call(impostor.address, ASK, PATIENCE_S).result(PATIENCE_S) == answer_as("i")(ASK)
    assert client.stats["malformed"] == len(cases)
    impostor.close()


def test_one_peer_cannot_answer_for_another(client: SideChannelClient) -> None:
    with dead_address() as silent:
        meant_for_other = client.call(silent, ASK, 3600.0)
        forged = encode(answer_as("forged")(ASK))
        impostor = Impostor([(1).to_bytes(8, "big"), forged], [b"ID", encode(answer_as("i")(ASK))])
        first = client.call(impostor.address, ASK, 3600.0)
        assert client.call(impostor.address, ASK, PATIENCE_S).result(PATIENCE_S)
        assert not first.done()
        assert not meant_for_other.done()
        assert client.stats["late"] == 1
        impostor.close()


# Case 9: restarts


def test_a_restart_on_the_same_port(client: SideChannelClient) -> None:
    with serve("first") as server:
        address = address_of(server)
        assert client.call(address, ASK, PATIENCE_S).result(PATIENCE_S).incarnation == "first"
    with pytest.raises(PeerError):
        client.call(address, ASK, BRIEF_S).result(PATIENCE_S)
    waiting = client.call(address, ASK, PATIENCE_S)  # asked while nobody is there, answered by who comes
    with serve("second", port=address.port) as server:
        assert waiting.result(PATIENCE_S).incarnation == "second"
        assert client.call(address, ASK, PATIENCE_S).result(PATIENCE_S).incarnation == "second"
        assert server.stats["requests"] == 2  # the call that was given up never arrived


def test_idle_peers_are_let_go_and_found_again(server: SideChannelServer) -> None:
    with SideChannelClient(security=None, idle_s=0.0) as client, serve("first") as other:
        for _ in range(3):
            assert still_answers(server, client)
            assert still_answers(other, client)
        assert client.stats["idle_closed"] > 0
    with SideChannelClient(security=None, max_peers=1) as client, serve("first") as other, dead_address() as silent:
        assert still_answers(server, client)
        assert still_answers(other, client)
        assert client.stats["idle_closed"] == 1
        busy = client.call(silent, ASK, 3600.0)
        with pytest.raises(PeerError, match="at most 1 peers at once"):
            client.call(address_of(server), ASK, PATIENCE_S).result(PATIENCE_S)
        assert not busy.done()


def test_close_fails_what_is_outstanding_and_what_comes_later(client: SideChannelClient) -> None:
    with dead_address() as silent:
        outstanding = [client.call(silent, ASK, 3600.0) for _ in range(10)]
        client.close()
        client.close()
        for future in (*outstanding, client.call(silent, ASK, 3600.0)):
            with pytest.raises(PeerError, match="closed"):
                future.result(0)


def test_close_from_a_callback(server: SideChannelServer, client: SideChannelClient) -> None:
    done = threading.Event()

    def finish(_: "Future[Reply]") -> None:
        client.close()
        done.set()

    client.call(address_of(server), ASK, PATIENCE_S).add_done_callback(finish)
    assert done.wait(PATIENCE_S)


# Binding


def test_addresses_that_cannot_be_bound(server: SideChannelServer, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(host: str, port: int, text: str, *, allow_insecure: bool = True) -> None:
        other = SideChannelServer(
            host, port, answer_as("x"), incarnation="x", security=None, allow_insecure=allow_insecure
        )
        with pytest.raises(ConfigError, match=text):
            other.start()
        other.close()

    refuse("127.0.0.1", server.port, f"127.0.0.1:{server.port} is in use")
    refuse("192.0.2.1", 0, "192.0.2.1 is not an address of this host")
    refuse("a..b", 0, "expected a host to bind")
    refuse("", 0, "expected a host to bind")
    refuse("127.0.0.1", 65536, "expected a port")
    for host in ("0.0.0.0", "*", "::", "192.0.2.1"):
        refuse(host, 0, "there is no secret", allow_insecure=False)


def test_an_insecure_server_is_announced_once(
    client: SideChannelClient, caplog: pytest.LogCaptureFixture, security: Security
) -> None:
    with SideChannelServer(
        "*", 0, answer_as("first"), incarnation="first", security=None, allow_insecure=True
    ) as open_:
        assert still_answers(open_, client)
    assert [record.levelno for record in caplog.records if "no secret" in record.message] == [logging.WARNING]
    caplog.clear()
    with SideChannelServer("0.0.0.0", 0, answer_as("first"), incarnation="first", security=security):
        pass
    assert not caplog.records


# Secrets


def test_only_who_has_the_secret_is_answered(security: Security) -> None:
    other = Security.from_secret(SECRET + "!")
    with serve(security=security) as server:
        with SideChannelClient(security=security) as friend:
            assert still_answers(server, friend)
        for wrong in (other, None):
            with SideChannelClient(security=wrong) as stranger, pytest.raises(PeerError, match="no answer"):
                stranger.call(address_of(server), ASK, BRIEF_S).result(PATIENCE_S)
        assert server.stats["requests"] == 1
        with SideChannelClient(security=security) as friend:
            assert still_answers(server, friend)
    with serve() as careless, SideChannelClient(security=security) as careful, pytest.raises(PeerError):
        careful.call(address_of(careless), ASK, BRIEF_S).result(PATIENCE_S)


def test_a_client_key_of_one_s_own_does_not_help(security: Security) -> None:
    public, secret = zmq.curve_keypair()
    keys = {"CURVE_SERVERKEY": security.server_public, "CURVE_PUBLICKEY": public, "CURVE_SECRETKEY": secret}
    with serve(security=security) as server:
        with RawPeer(server.port, **keys) as stranger:
            stranger.send(b"call-id.", encode(ASK))
            assert stranger.was_disconnected()
        wait_until(lambda: server.stats["strangers"])
        assert server.stats["requests"] == 0
        with SideChannelClient(security=security) as friend:
            assert still_answers(server, friend)


def test_keys_depend_on_the_secret_alone_and_are_not_shown(security: Security) -> None:
    assert Security.from_secret(SECRET.encode()) == security != Security.from_secret(SECRET + "!")
    assert security.server_public == b"jden-m=TZxO^t$A^l69W4ig?NGvXj>/4)+NvObGh"  # all versions derive the same keys
    assert repr(security) == "Security()"
    with pytest.raises(ConfigError, match="at least 16 bytes, got 5"):
        Security.from_secret("short")


def test_load_secret(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b" from a file \n")
    empty = tmp_path / "empty"
    empty.write_bytes(b"\n")
    assert load_secret({}) is None
    assert load_secret({"HYBRID_CONNECTOR_SECRET": SECRET}) == SECRET.encode()
    assert load_secret({"HYBRID_CONNECTOR_SECRET_FILE": str(file)}) == b"from a file"
    for environ, text in (
        ({"HYBRID_CONNECTOR_SECRET": SECRET, "HYBRID_CONNECTOR_SECRET_FILE": str(file)}, "both are set"),
        ({"HYBRID_CONNECTOR_SECRET": ""}, "empty text"),
        ({"HYBRID_CONNECTOR_SECRET_FILE": str(empty)}, "file is empty"),
        ({"HYBRID_CONNECTOR_SECRET_FILE": str(tmp_path / "none")}, "readable file"),
        ({"HYBRID_CONNECTOR_SECRET_FILE": "a\0b"}, "readable file"),
    ):
        with pytest.raises(ConfigError, match=text):
            load_secret(environ)
