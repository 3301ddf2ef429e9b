"""What does a dead peer cost the healthy ones? D's whole way to a grant, over real sockets (case 8)."""

import itertools
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest

from hybrid_connector.engine.config import ConnectorConfig
from hybrid_connector.engine.consumer import Consumer, Held, Lost, Pending, RemoteRequest
from hybrid_connector.engine.producer import Producer
from hybrid_connector.wire.side_channel import Address, SideChannelClient, SideChannelServer

from fakes import engine_manifest
from layouts import Model, Storage, build_engine

PATIENCE_S = 20.0
LAYOUTS = build_engine(Model(num_attention=1, num_recurrent=1), Storage())
NUM_LIVE, NUM_DEAD_REQUESTS, NUM_ROUNDS = 3, 50, 15


@pytest.fixture
def live() -> Iterator[list[Address]]:
    with ExitStack() as stack:
        addresses = []
        for i in range(NUM_LIVE):
            producer = Producer(30.0, "first")
            producer.publish(engine_manifest(LAYOUTS, f"prefill-{i}", model="m"))
            for number in range(2 * NUM_ROUNDS):
                producer.open(f"cmpl-{number}", "token", ((3, 4), (7,)), 17, -1)
            server = SideChannelServer("127.0.0.1", 0, producer.answer, incarnation="first", security=None)
            stack.enter_context(server)
            addresses.append(Address("127.0.0.1", server.port))
        yield addresses


@pytest.fixture
def dead() -> Iterator[Address]:
    """The kernel accepts its connections, and nobody ever reads."""
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as listener:
        yield Address("127.0.0.1", listener.getsockname()[1])


@contextmanager
def decode_engine(**config: float) -> Iterator[Consumer]:
    with SideChannelClient(security=None) as client:
        consumer = Consumer(client, ConnectorConfig(**config))
        consumer.publish(engine_manifest(LAYOUTS, "decode-0", "d", model="m"))
        consumer.start()
        try:
            yield consumer
        finally:
            consumer.close(wait_s=0)


def wait_for(consumer: Consumer, request_ids: Sequence[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while any(consumer.status(request_id) == Pending() for request_id in request_ids):
        assert time.monotonic() < deadline
        consumer.wait_answer(0.01)


def seconds_to_grants(number: int, live: list[Address], dead: Address | None) -> float:
    """From the arrival of one request for each live peer, with no handshake made yet, to the last of their grants."""
    with decode_engine() as consumer:
        for i in range(NUM_DEAD_REQUESTS if dead is not None else 0):
            assert dead is not None
            consumer.acquire(f"dead-{i}", RemoteRequest("prefill-9", f"cmpl-{i}", "token", dead))
        names = [f"live-{i}" for i in range(len(live))]
        began = time.perf_counter()
        for i, (name, address) in enumerate(zip(names, live, strict=True)):
            consumer.acquire(name, RemoteRequest(f"prefill-{i}", f"cmpl-{number}", "token", address))
        wait_for(consumer, names)
        took = time.perf_counter() - began
        assert all(isinstance(consumer.status(name), Held) for name in names)
        return took


def test_a_dead_peer_adds_nothing_to_three_live_ones(live: list[Address], dead: Address) -> None:
    """Both are measured in turns, so that a busy machine is busy for both; waiting for the dead one would cost 5 s."""
    without, beside = [], []
    for i in range(NUM_ROUNDS):
        without.append(seconds_to_grants(2 * i, live, None))
        beside.append(seconds_to_grants(2 * i + 1, live, dead))
    alone_s, beside_s = statistics.median(without), statistics.median(beside)
    print(f"grants of {NUM_LIVE} peers: {alone_s * 1e3:.1f} ms, beside a dead one {beside_s * 1e3:.1f} ms")
    assert beside_s < 2 * alone_s + 0.05


def test_after_one_request_has_waited_its_time_the_next_fails_at_once_and_live_peers_do_not_notice(
    live: list[Address], dead: Address
) -> None:
    with decode_engine(acquire_timeout_s=0.5, handshake_timeout_s=0.1) as consumer:
        to_dead = RemoteRequest("prefill-9", "cmpl-1", "token", dead)
        consumer.acquire("first", to_dead)
        wait_for(consumer, ["first"])
        deadline = time.monotonic() + PATIENCE_S
        numbers = itertools.count()
        while True:
            name = f"next-{next(numbers)}"
            consumer.acquire(name, to_dead)
            told = consumer.status(name)
            if isinstance(told, Lost):
                break
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert told.reason.startswith(f"127.0.0.1:{dead.port} did not answer for ")
        assert "asked again" in told.reason
        consumer.acquire("live", RemoteRequest("prefill-0", "cmpl-0", "token", live[0]))
        wait_for(consumer, ["live"])
        assert isinstance(consumer.status("live"), Held)
