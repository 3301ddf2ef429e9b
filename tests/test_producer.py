"""P's answers about the blocks of finished requests: every request, every refusal, from two threads."""

import sys
import threading
from collections import Counter

import pytest

from hybrid_connector.engine.producer import SEAL_RETRY_S, Producer
from hybrid_connector.wire.manifest import EngineManifest
from hybrid_connector.wire.messages import (
    PROTOCOL_VERSION,
    Acquire,
    Granted,
    Hello,
    RefusalReason,
    Refused,
    Release,
    Released,
    Renew,
    Renewed,
    Request,
    Welcome,
    decode_reply,
    encode,
)
from threads import read_while

from fakes import Clock, engine_manifest
from layouts import Model, Storage, build_engine

LEASE_S = 30.0
BLOCKS = ((3, 4), (7,))
VERBS = {"acquire": Acquire, "renew": Renew, "release": Release}


class World:
    def __init__(self, *, sealed: bool = True) -> None:
        self.clock = Clock()
        self.producer = Producer(LEASE_S, "first", self.clock)
        self.producer.open("r", "t", BLOCKS, 17, 5)
        if sealed:
            self.producer.seal(5)

    def ask(self, request: Request) -> object:
        """The answer as D gets it."""
        reply = self.producer.answer(request)
        assert decode_reply(encode(reply)) == reply
        return reply


@pytest.fixture(scope="module")
def manifest() -> EngineManifest:
    return engine_manifest(build_engine(Model(num_attention=1), Storage()))


def refusal(reason: RefusalReason, detail: str, request_id: str = "r", retry_after_s: float | None = None) -> Refused:
    return Refused(request_id, reason, detail, retry_after_s, incarnation="first")


def test_hello_is_answered_with_the_manifest(manifest: EngineManifest) -> None:
    world = World()
    world.producer.publish(manifest)
    assert world.ask(Hello(PROTOCOL_VERSION)) == Welcome(manifest, incarnation="first")
    assert world.producer.counts == {}


def test_before_the_start_is_complete_hello_may_be_asked_again() -> None:
    world = World()
    assert world.ask(Hello(PROTOCOL_VERSION)) == refusal(
        RefusalReason.OVERLOADED, "P is still starting", "", retry_after_s=0.5
    )
    assert world.producer.counts == {"refused_overloaded": 1}


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1, 2**31 - 1])
def test_another_protocol_version_is_refused_with_both(manifest: EngineManifest, version: int) -> None:
    world = World()
    world.producer.publish(manifest)
    assert world.ask(Hello(version)) == refusal(
        RefusalReason.UNSUPPORTED_PROTOCOL,
        f"P speaks version {PROTOCOL_VERSION}, D speaks {version}: install the same release on both",
        "",
    )
    assert world.producer.counts == {"refused_unsupported_protocol": 1}


def test_counts_may_be_read_while_peers_are_answered() -> None:
    """The engine's thread reads them each step; one that is counted for the first time meanwhile must not end it."""
    for _ in range(50):
        world = World(sealed=False)

        def answer(world: World = world) -> None:
            world.ask(Hello(PROTOCOL_VERSION))
            world.ask(Hello(PROTOCOL_VERSION + 1))
            world.ask(Acquire("r", "t", "A"))
            world.ask(Acquire("r", "other", "A"))
            world.ask(Acquire("nobody's", "t", "A"))

        def read(world: World = world) -> None:
            assert sum(count for _, count in world.producer.counts.items()) <= 5

        read_while(answer, read)
        assert sum(world.producer.counts.values()) == 5


def test_a_lease_from_grant_to_release() -> None:
    world = World()
    assert world.producer.num_leases == 1
    granted = Granted("r", BLOCKS, 17, LEASE_S, incarnation="first")
    assert world.ask(Acquire("r", "t", "A")) == granted
    assert world.ask(Acquire("r", "t", "A")) == granted
    world.clock.advance(29.0)
    assert world.ask(Renew("r", "t", "A")) == Renewed("r", LEASE_S, incarnation="first")
    world.clock.advance(29.0)
    assert world.producer.take_ended() == []
    assert world.ask(Release("r", "t", "A")) == Released("r", incarnation="first")
    assert world.producer.num_leases == 0
    assert world.producer.take_ended() == ["r"]
    assert world.producer.take_ended() == []
    assert world.producer.counts == {"leases_consumed": 1}


def test_nothing_is_read_before_it_is_sealed() -> None:
    """I6: D asks again until the steps that were in flight have completed."""
    world = World(sealed=False)
    detail = "an engine step that may still write the state is running"
    for step in (-1, 4):
        world.producer.seal(step)
        answer = world.ask(Acquire("r", "t", "A"))
        assert answer == refusal(RefusalReason.NOT_SEALED, detail, retry_after_s=SEAL_RETRY_S)
    world.producer.seal(5)
    assert isinstance(world.ask(Acquire("r", "t", "A")), Granted)
    assert world.producer.counts == {"refused_not_sealed": 2}


def test_steps_seal_the_leases_that_waited_for_them() -> None:
    world = World(sealed=False)
    for step in (6, 7):
        world.producer.open(f"r{step}", "t", BLOCKS, 17, step)
    world.producer.seal(6)
    answers = [world.ask(Acquire(request_id, "t", "A")) for request_id in ("r", "r6", "r7")]
    assert [type(answer) for answer in answers] == [Granted, Granted, Refused]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("reason", "detail"),
    [
        (RefusalReason.UNKNOWN, "no request of this id finished here with do_remote_decode, or long ago"),
        (RefusalReason.EXPIRED, "its reader did not renew in time and the blocks were given back"),
        (RefusalReason.CONSUMED, "it was read, or given up, before"),
        (RefusalReason.HELD, "another reader holds it, or the one that renews never acquired it"),
        (RefusalReason.WRONG_TOKEN, "the token is not the one that was given out with the answer"),
    ],
)
def test_refusals(verb: str, reason: RefusalReason, detail: str) -> None:
    world = World()
    request = VERBS[verb]("r", "t", "A")
    match reason:
        case RefusalReason.UNKNOWN:
            request = VERBS[verb]("other", "t", "A")
        case RefusalReason.EXPIRED:
            world.clock.advance(LEASE_S)
        case RefusalReason.CONSUMED:
            world.ask(Release("r", "t", "B"))
        case RefusalReason.HELD:
            world.ask(Acquire("r", "t", "B"))
        case RefusalReason.WRONG_TOKEN:
            request = VERBS[verb]("r", "x", "A")
    assert world.ask(request) == refusal(reason, detail, request.request_id)
    assert world.producer.counts == {f"refused_{reason}": 1}


def test_leases_end_with_time_and_with_the_engine() -> None:
    world = World()
    world.clock.advance(10.0)
    world.producer.open("later", "t", BLOCKS, 17, 6)
    world.clock.advance(20.0)
    assert world.producer.take_ended() == ["r"]
    world.producer.expire_all()
    assert world.producer.take_ended() == ["later"]
    assert world.producer.num_leases == 0
    assert world.producer.counts == {"leases_expired": 2}
    assert isinstance(world.ask(Release("later", "t", "A")), Refused)


def test_two_threads_ask_while_the_scheduler_leases() -> None:
    """Every lease is granted to one reader, and handed back once; nothing is counted twice or lost."""
    num_requests, num_threads = 2000, 2
    producer = Producer(LEASE_S, "first")
    granted: list[Counter[str]] = [Counter() for _ in range(num_threads)]
    barrier = threading.Barrier(num_threads + 1)
    failures: list[BaseException] = []

    def read(thread: int) -> None:
        try:
            barrier.wait()
            for i in range(num_requests):
                holder, request_id = f"D{thread}", f"r{i}"
                while True:
                    reply = producer.answer(Acquire(request_id, "t", holder))
                    if isinstance(reply, Granted) or reply.reason not in (
                        RefusalReason.UNKNOWN,
                        RefusalReason.NOT_SEALED,
                    ):
                        break
                if isinstance(reply, Granted):
                    granted[thread][request_id] += 1
                    assert isinstance(producer.answer(Renew(request_id, "t", holder)), Renewed)
                    assert isinstance(producer.answer(Release(request_id, "t", holder)), Released)
        except BaseException as error:
            failures.append(error)

    ended: Counter[str] = Counter()
    threads = [threading.Thread(target=read, args=(i,)) for i in range(num_threads)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        barrier.wait()
        for i in range(num_requests):
            producer.open(f"r{i}", "t", BLOCKS, 17, i)
            producer.seal(i - 1)
            ended.update(producer.take_ended())
        producer.seal(num_requests)
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    ended.update(producer.take_ended())
    assert failures == []
    assert ended == Counter({f"r{i}": 1 for i in range(num_requests)}) == granted[0] + granted[1]
    assert producer.num_leases == 0
    refused = {reason: times for reason, times in producer.counts.items() if reason.startswith("refused")}
    assert producer.counts == {"leases_consumed": num_requests, **refused}
    assert producer.counts["refused_consumed"] + producer.counts["refused_held"] == num_requests


def test_a_cache_reset_is_told_to_who_comes_later_and_kept_from_who_reads() -> None:
    world = World()
    world.producer.open("held", "t", BLOCKS, 17, -1)
    assert isinstance(world.ask(Acquire("held", "t", "A")), Granted)
    world.producer.withdraw_all()
    assert world.producer.take_ended() == ["r"]
    for request in (Acquire("r", "t", "A"), Renew("held", "t", "A")):
        assert world.ask(request) == refusal(RefusalReason.WITHDRAWN, "P's cache was reset", request.request_id)
    assert isinstance(world.ask(Release("held", "t", "A")), Released)
    assert world.producer.take_ended() == ["held"]
    assert world.producer.counts["leases_withdrawn"] == 1
