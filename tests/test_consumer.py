"""D's way to a grant, and how it keeps it: cases 3, 8, 9, 10, 13, and every answer a peer may give (invariant I2)."""

import itertools
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hybrid_connector.core.breaker import BACKOFF_S, OPEN_MAX_S, OPEN_S
from hybrid_connector.core.errors import HybridConnectorError, PeerError, WireError
from hybrid_connector.core.leases import MAX_CLOCK_DRIFT
from hybrid_connector.engine.config import ConnectorConfig
from hybrid_connector.engine.consumer import (
    PROMPT_S,
    REFUSED_PEER_S,
    REMEMBER_SILENCE_S,
    RETRY_S,
    TICK_S,
    Consumer,
    Held,
    Lost,
    Pending,
    RemoteRequest,
    Status,
)
from hybrid_connector.engine.producer import SEAL_RETRY_S, Producer
from hybrid_connector.wire.manifest import EngineManifest
from hybrid_connector.wire.messages import (
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
    Welcome,
    decode_reply,
    decode_request,
    encode,
)
from threads import read_while

from fakes import Call, Clock, ScriptedCaller, engine_manifest
from layouts import Model, Storage, build_engine, edited
from refusals import refused

P = ("10.0.0.1", 5600)
LAYOUTS = build_engine(Model(num_attention=1, num_recurrent=1), Storage())
LOCAL = engine_manifest(LAYOUTS, "decode-0", "d", model="m")
MANIFEST = engine_manifest(LAYOUTS, "prefill-0", "first", model="m")
BLOCKS = ((3, 4), (7,))
LEASE_S = 30.0
KEPT_S = LEASE_S * (1 - MAX_CLOCK_DRIFT)
"""How long D believes in a promise."""


@pytest.fixture(autouse=True)
def _no_callback_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A future logs what its callbacks raise, and goes on."""
    yield
    assert [record.message for record in caplog.get_records("call") if record.name == "concurrent.futures"] == []


def remote(request_id: str = "cmpl-1", engine_id: str = "prefill-0", address: tuple[str, int] = P) -> RemoteRequest:
    return RemoteRequest(engine_id, request_id, "token", address)


class Scene:
    """A consumer whose peers are played by the test."""

    def __init__(self, respond: Callable[[Call], Reply | Exception | None] | None = None, **config: float) -> None:
        self.clock = Clock()
        self.caller = ScriptedCaller(self.clock, respond)
        self.consumer = Consumer(self.caller, ConnectorConfig(**config), self.clock, chance=lambda: 1.0)
        self.consumer.publish(LOCAL)

    def pass_time(self, seconds: float, ticks: int = 1) -> None:
        for _ in range(ticks):
            self.clock.advance(seconds / ticks)
            self.consumer.tick()

    def welcome(self, manifest: EngineManifest = MANIFEST) -> None:
        self.caller.open(Hello)[0].answer(Welcome(manifest, incarnation=manifest.incarnation))

    def grant(self, incarnation: str = "first", promise_s: float = LEASE_S) -> None:
        call = self.caller.open(Acquire)[0]
        call.answer(Granted(call.request.request_id, BLOCKS, 17, promise_s, incarnation=incarnation))

    def refuse(
        self, kind: type, reason: RefusalReason, detail: str = "why", retry_after_s: float | None = None
    ) -> None:
        self.caller.open(kind)[0].answer(Refused("", reason, detail, retry_after_s, incarnation="first"))

    def hold(self, request_id: str = "r", promise_s: float = LEASE_S) -> None:
        """Acquire, up to the grant."""
        self.consumer.acquire(request_id, remote())
        if self.caller.open(Hello):
            self.welcome()
        self.grant(promise_s=promise_s)
        assert self.status(request_id) == HELD

    def status(self, request_id: str = "r") -> Status:
        return self.consumer.status(request_id)

    def counts(self, *names: str) -> tuple[int, ...]:
        return tuple(self.consumer.counts[name] for name in names)


HELD = Held(MANIFEST, BLOCKS, 17)


# The way to a grant.


def test_from_the_first_request_to_the_release() -> None:
    scene = Scene()
    scene.consumer.acquire("r", remote())
    assert scene.status() == Pending()
    hello = scene.caller.only(Hello)
    assert (hello.address, hello.request, hello.timeout_s) == (P, Hello(1), 5.0)
    scene.welcome()
    acquire = scene.caller.only(Acquire)
    assert (acquire.address, acquire.request.request_id, acquire.request.token) == (P, "cmpl-1", "token")
    assert scene.status() == Pending()
    scene.grant()
    assert scene.status() == HELD
    assert scene.caller.open() == []
    scene.consumer.release("r")
    release = scene.caller.only(Release)
    assert release.request == Release("cmpl-1", "token", acquire.request.holder)
    release.answer(Released("cmpl-1", incarnation="first"))
    assert scene.status() == Lost("no lease was acquired for this request")
    assert scene.consumer.counts == {"handshakes": 1, "grants": 1, "releases": 1}
    assert scene.consumer._wanted == {}
    assert scene.consumer._releasing == set()


def test_a_grant_that_is_there_before_acquire_returns() -> None:
    scene = Scene(Network({P: start_prefill()}).respond)
    scene.consumer.acquire("r", remote())
    assert isinstance(scene.status(), Held)
    scene.consumer.release("r")
    assert scene.consumer.counts == {"handshakes": 1, "grants": 1, "releases": 1}


def test_nobody_asked_for_an_unknown_request() -> None:
    assert Scene().status() == Lost("no lease was acquired for this request")


def test_requests_share_a_handshake() -> None:
    scene = Scene()
    for i in range(5):
        scene.consumer.acquire(f"r{i}", remote(f"cmpl-{i}"))
    scene.welcome()
    assert scene.caller.count(Hello) == 1
    assert [call.request.request_id for call in scene.caller.open(Acquire)] == [f"cmpl-{i}" for i in range(5)]
    for _ in range(5):
        scene.grant()
    assert all(scene.status(f"r{i}") == HELD for i in range(5))
    scene.consumer.acquire("later", remote("cmpl-later"))
    assert scene.caller.only(Acquire).request.request_id == "cmpl-later"


def test_each_request_is_a_holder_of_its_own() -> None:
    """Two local requests may name one lease (n > 1 samples); only one of them may get it."""
    scene = Scene()
    for i in range(2):
        scene.consumer.acquire(f"r{i}", remote())
    scene.welcome()
    first, second = scene.caller.open(Acquire)
    assert first.request.holder != second.request.holder


def test_a_promise_counts_from_before_the_question() -> None:
    scene = Scene()
    scene.consumer.acquire("r", remote())
    scene.welcome()
    scene.clock.advance(4.0)
    scene.grant()
    scene.clock.advance(KEPT_S - 4.0 - 1e-6)
    assert scene.status() == HELD
    scene.clock.advance(2e-6)
    assert scene.status() == Lost("the lease ran out: P promised 30 s and was not reached since")
    assert scene.counts("grants", "grants_lost") == (1, 1)


def test_a_grant_that_took_longer_than_its_promise_is_asked_for_again() -> None:
    scene = Scene(lease_s=2.0)
    scene.consumer.acquire("r", remote())
    scene.welcome()
    scene.clock.advance(3.0)
    scene.grant(promise_s=2.0)
    assert scene.status() == Pending()
    scene.consumer.tick()
    scene.grant(promise_s=2.0)
    assert scene.status() == HELD


def test_not_sealed_is_asked_again_when_p_says() -> None:
    scene = Scene()
    scene.consumer.acquire("r", remote())
    scene.welcome()
    for _ in range(3):
        scene.refuse(Acquire, RefusalReason.NOT_SEALED, retry_after_s=SEAL_RETRY_S)
        scene.pass_time(SEAL_RETRY_S / 2)
        assert scene.caller.open() == []
        scene.pass_time(SEAL_RETRY_S)
    scene.grant()
    assert scene.status() == HELD
    holders = {call.request.holder for call in scene.caller.calls if isinstance(call.request, Acquire)}
    assert len(holders) == 1


def test_never_sealed_ends_with_the_deadline_and_says_so() -> None:
    scene = Scene(acquire_timeout_s=2.0)
    scene.consumer.acquire("r", remote())
    scene.welcome()
    for _ in range(100):
        if scene.caller.open(Acquire):
            scene.refuse(Acquire, RefusalReason.NOT_SEALED, retry_after_s=SEAL_RETRY_S)
        scene.pass_time(TICK_S)
    assert scene.status() == Lost("no grant from 10.0.0.1:5600 within 2 s: not_sealed: why")
    assert scene.counts("acquires_failed", "grants_lost") == (1, 0)


@pytest.mark.parametrize(
    "reason", [r for r in RefusalReason if r not in (RefusalReason.NOT_SEALED, RefusalReason.OVERLOADED)]
)
def test_other_refusals_are_final(reason: RefusalReason) -> None:
    """Case 3: a reference that P does not know, or knows to have ended, is never answered with blocks."""
    scene = Scene()
    scene.consumer.acquire("r", remote())
    scene.welcome()
    scene.refuse(Acquire, reason)
    assert scene.status() == Lost(f"lease refused by engine prefill-0: {reason}: why")
    scene.pass_time(60.0, ticks=60)
    assert scene.caller.open() == []
    assert scene.counts(f"refused_{reason}", "acquires_failed", "grants") == (1, 1, 0)


@pytest.mark.parametrize("error", [PeerError("no answer"), WireError("expected a reply, got 3 bytes")])
def test_an_acquire_that_is_not_answered_is_repeated_until_the_deadline(error: Exception) -> None:
    scene = Scene()
    scene.consumer.acquire("r", remote())
    scene.welcome()
    for pause_s in (0.1, 0.2, 0.4) if isinstance(error, PeerError) else (RETRY_S,) * 3:
        scene.caller.only(Acquire).answer(error)
        scene.pass_time(pause_s * 0.9)
        assert scene.caller.open() == []
        scene.pass_time(pause_s * 0.2)
    scene.caller.only(Acquire).answer(error)
    scene.clock.advance(20.0)
    scene.consumer.tick()
    assert scene.status() == Lost(f"no grant from 10.0.0.1:5600 within 20 s: {error}")
    assert scene.caller.open() == []


def test_a_late_answer_to_an_acquire_does_not_revive_its_request() -> None:
    scene = Scene()
    scene.consumer.acquire("r", remote())
    scene.welcome()
    scene.pass_time(20.0)
    lost = scene.status()
    assert lost == Lost("no grant from 10.0.0.1:5600 within 20 s")
    scene.grant()
    assert scene.status() == lost
    scene.consumer.release("r")
    assert scene.caller.only(Release).request.request_id == "cmpl-1"


@pytest.mark.parametrize("kind", [Released, Welcome])
def test_an_answer_to_something_else_loses_the_request(kind: type) -> None:
    """The side channel lets none through; this module does not rely on it."""
    scene = Scene()
    scene.consumer.acquire("r", remote())
    scene.welcome()
    reply = Welcome(MANIFEST, incarnation="first") if kind is Welcome else Released("cmpl-1", incarnation="first")
    scene.caller.only(Acquire).answer(reply)
    assert scene.status() == Lost(f"engine prefill-0 answered Acquire with {kind.__name__}")


# Handshakes that come to nothing.


def incompatible_shape() -> EngineManifest:
    layouts = [edited(layout, "layers.0.gdn.temporal", dtype="bfloat16", item_bytes=4) for layout in LAYOUTS]
    return engine_manifest(layouts, "prefill-0", "first", model="m")


@pytest.mark.parametrize(
    ("manifest", "problem"),
    [
        (engine_manifest(LAYOUTS, model="other"), "model: other on P, m on D"),
        (engine_manifest(LAYOUTS), "model: not stated on P, m on D"),
        (
            engine_manifest(LAYOUTS, model="m", speculative_tokens=2),
            "speculative_tokens: 2 on P, not stated on D",
        ),
        (incompatible_shape(), "layers.0.gdn.temporal: element type is bfloat16 on P, float32 on D"),
        (
            engine_manifest(build_engine(Model(num_attention=1), Storage()), model="m"),
            "layers.0.gdn.conv.q: D needs it, no rank of P holds it",
        ),
        (
            engine_manifest(build_engine(Model(num_attention=2, num_recurrent=1), Storage()), model="m"),
            "layers.1.attn.kv: P rank 0 holds it, no rank of D does",
        ),
        (
            engine_manifest(build_engine(Model(num_attention=1, num_recurrent=1, head_dim=4), Storage()), model="m"),
            "layers.0.gdn.conv.v: shape is (4, 3) on P, (2, 3) on D",
        ),
    ],
)
def test_an_incompatible_peer_is_refused_with_both_values_and_asked_again_later(
    manifest: EngineManifest, problem: str
) -> None:
    scene = Scene()
    scene.consumer.acquire("r", remote())
    scene.welcome(manifest)
    lost = Lost(f"engine at 10.0.0.1:5600 cannot exchange state with this one: {problem}")
    assert scene.status() == lost
    scene.consumer.acquire("soon", remote())
    scene.pass_time(REFUSED_PEER_S - 0.1)
    scene.consumer.acquire("still", remote())
    assert (scene.status("soon"), scene.status("still")) == (lost, lost)
    assert scene.caller.open() == []
    scene.pass_time(0.1)
    scene.consumer.acquire("later", remote())
    assert scene.status("later") == Pending()
    scene.welcome()
    scene.grant()
    assert scene.status("later") == HELD
    assert scene.counts("handshakes", "handshakes_failed", "acquires_failed") == (2, 1, 3)


def test_all_who_wait_hear_of_a_refused_handshake() -> None:
    scene = Scene()
    scene.consumer.acquire("a", remote())
    scene.consumer.acquire("b", remote())
    scene.consumer.acquire("elsewhere", remote(address=("10.0.0.2", 5600)))
    scene.refuse(Hello, RefusalReason.UNSUPPORTED_PROTOCOL, "P speaks version 2, D speaks 1")
    lost = Lost("handshake refused by 10.0.0.1:5600: unsupported_protocol: P speaks version 2, D speaks 1")
    assert (scene.status("a"), scene.status("b"), scene.status("elsewhere")) == (lost, lost, Pending())


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (
            WireError("expected a reply, got 3 bytes"),
            "handshake with 10.0.0.1:5600 failed: expected a reply, got 3 bytes",
        ),
        (RuntimeError("a bug"), "handshake with 10.0.0.1:5600 failed: a bug"),
        (Released("x", incarnation="first"), "10.0.0.1:5600 answered a handshake with Released"),
    ],
)
def test_a_peer_that_speaks_something_else_is_refused(reply: Reply | Exception, problem: str) -> None:
    scene = Scene()
    scene.consumer.acquire("r", remote())
    scene.caller.only(Hello).answer(reply)
    assert scene.status() == Lost(problem)


def test_before_its_own_start_is_complete_an_engine_is_compatible_with_none() -> None:
    clock = Clock()
    caller = ScriptedCaller(clock, lambda call: Welcome(MANIFEST, incarnation="first"))
    consumer = Consumer(caller, ConnectorConfig(), clock)
    consumer.acquire("r", remote())
    assert consumer.status("r") == Lost(
        "handshake with 10.0.0.1:5600 failed: this engine has not registered its caches yet"
    )


def test_a_peer_that_is_still_starting_is_asked_again() -> None:
    scene = Scene()
    scene.consumer.acquire("r", remote())
    scene.refuse(Hello, RefusalReason.OVERLOADED, "P is still starting", retry_after_s=0.5)
    assert scene.status() == Pending()
    scene.pass_time(0.4)
    assert scene.caller.open() == []
    scene.pass_time(0.2)
    scene.welcome()
    scene.grant()
    assert scene.status() == HELD


def test_a_peer_is_asked_again_while_it_is_not_there() -> None:
    """Case 9: P is down while D asks; the request waits for it, and those that come meanwhile do too."""
    scene = Scene()
    scene.consumer.acquire("early", remote("cmpl-1"))
    for pause_s in (0.1, 0.2, 0.4):
        scene.caller.only(Hello).answer(PeerError("no answer; there was no connection"))
        scene.pass_time(pause_s * 0.9)
        assert scene.caller.open() == []
        scene.pass_time(pause_s * 0.2)
    scene.consumer.acquire("late", remote("cmpl-2"))
    scene.welcome()
    scene.grant()
    scene.grant()
    assert (scene.status("early"), scene.status("late")) == (HELD, HELD)
    assert scene.counts("handshakes", "handshakes_failed") == (4, 3)


def test_after_a_handshake_that_nobody_answered_a_new_request_waits_for_the_next() -> None:
    scene = Scene()
    scene.consumer.acquire("a", remote("cmpl-1"))
    scene.caller.only(Hello).answer(PeerError("no answer"))
    scene.consumer.acquire("b", remote("cmpl-2"))
    assert (scene.caller.open(), scene.status("b")) == ([], Pending())
    scene.pass_time(BACKOFF_S)
    scene.welcome()
    assert [call.request.request_id for call in scene.caller.open(Acquire)] == ["cmpl-1", "cmpl-2"]


def test_a_dead_peer_costs_only_those_who_need_it() -> None:
    """Case 8: three peers answer, one never does."""
    dead = ("10.0.0.9", 5600)
    alive = [(f"10.0.0.{i}", 5600) for i in range(1, 4)]
    network = Network({address: start_prefill(num_leases=20) for address in alive})
    scene = Scene(network.respond)
    for i in range(20):
        scene.consumer.acquire(f"dead-{i}", remote(f"cmpl-{i}", address=dead))
        for address in alive:
            scene.consumer.acquire(f"{address}-{i}", remote(f"cmpl-{i}", address=address))
            assert isinstance(scene.status(f"{address}-{i}"), Held)  # with no time passed
    for _ in range(401):
        scene.clock.advance(TICK_S)
        scene.caller.time_out()
        scene.consumer.tick()
        for address, i in itertools.product(alive, range(20)):
            assert isinstance(scene.status(f"{address}-{i}"), Held)
    lost = Lost(
        "no grant from 10.0.0.9:5600 within 20 s: "
        "handshake with 10.0.0.9:5600 failed: no answer from 10.0.0.9:5600 within 5 s"
    )
    assert all(scene.status(f"dead-{i}") == lost for i in range(20))
    assert scene.caller.count(Hello) == 3 + 4
    assert scene.counts("acquires_failed", "grants_lost") == (20, 0)


def test_addresses_that_clients_make_up_are_forgotten() -> None:
    scene = Scene()
    for port in range(1, 101):
        scene.consumer.acquire(f"r{port}", remote(address=("10.9.9.9", port)))
    for i, call in enumerate(scene.caller.open(Hello)):
        call.answer(PeerError("no answer") if i % 2 else WireError("rubbish"))
    for port in range(1, 101):
        scene.consumer.release(f"r{port}")
    assert len(scene.consumer._peers) == 100
    scene.pass_time(REFUSED_PEER_S)
    assert len(scene.consumer._peers) == 0


# The circuit breaker.


class Silence(Scene):
    """A peer that nobody answers for, and a first request that waits for it in vain."""

    def __init__(self, **config: float) -> None:
        super().__init__(**config)
        self.consumer.acquire("first", remote("cmpl-first"))
        self.numbers = itertools.count()

    def pass_silence(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.clock.advance(TICK_S)
            self.caller.time_out()
            self.consumer.tick()

    def pass_until(self, happened: Callable[[], object]) -> float:
        """How long it took; a minute is too long."""
        began = self.clock()
        while not happened():
            assert self.clock() < began + 60.0
            self.pass_silence(TICK_S)
        return self.clock() - began

    def pass_until_open(self, times: int = 1) -> None:
        self.pass_until(lambda: self.consumer.counts["breaker_opened"] == times)

    def pass_until_asked(self) -> float:
        return self.pass_until(lambda: self.caller.open(Hello))

    def try_one(self, engine_id: str = "prefill-0") -> Status:
        name = f"try-{next(self.numbers)}"
        self.consumer.acquire(name, remote(name, engine_id))
        return self.status(name)


def test_a_peer_that_was_silent_for_as_long_as_a_request_may_wait_fails_the_next_at_once() -> None:
    scene = Silence()
    scene.pass_silence(20.1)
    assert isinstance(scene.status("first"), Lost)
    assert scene.try_one() == Pending()
    scene.pass_until_open()
    assert scene.try_one() == Lost("10.0.0.1:5600 did not answer for 21 s; it is asked again in 1.0 s")
    assert scene.try_one() == Lost("10.0.0.1:5600 did not answer for 21 s; it is asked again in 1.0 s")
    assert scene.status("try-0") == Pending()  # it came before
    scene.pass_until_asked()
    assert scene.try_one() == Lost("10.0.0.1:5600 did not answer for 22 s; it is being asked again")
    assert scene.counts("breaker_opened", "breaker_refused", "acquires_failed") == (1, 3, 4)
    scene.welcome()
    assert [call.request.request_id for call in scene.caller.open(Acquire)] == ["try-0"]
    assert scene.try_one() == Pending()
    while scene.caller.open(Acquire):
        scene.grant()
    assert (scene.status("try-0"), scene.status("try-4")) == (HELD, HELD)


def test_an_open_breaker_stays_open_for_longer_each_time_but_not_for_ever() -> None:
    scene = Silence()
    pauses = []
    for times in range(1, 7):
        scene.try_one()
        scene.pass_until_open(times)
        pauses.append(scene.pass_until(lambda: scene.try_one() and scene.caller.open(Hello)))
    assert pauses == pytest.approx([OPEN_S, 2.0, 4.0, OPEN_MAX_S, OPEN_MAX_S, OPEN_MAX_S], abs=2 * TICK_S)


def test_what_waits_keeps_waiting_while_a_breaker_is_open() -> None:
    """Its time is not up, and a peer that comes back meanwhile serves it."""
    scene = Silence(acquire_timeout_s=16.0)
    scene.pass_silence(15.0)
    assert scene.try_one() == Pending()
    scene.pass_until_open()
    scene.pass_until_asked()
    assert scene.status("try-0") == Pending()
    scene.welcome()
    scene.grant()
    assert scene.status("try-0") == HELD


@pytest.mark.parametrize("stopped_s", [1.0, 5.0, 12.0, 15.0])
def test_a_peer_that_was_stopped_for_a_while_loses_nothing(stopped_s: float) -> None:
    """SIGSTOP, or a machine that stalls, with 64 requests under way and more coming; also just after another stall."""
    scene = Scene()
    network = Network({P: start_prefill(num_leases=200)})
    numbers = itertools.count()
    for _ in range(3):
        scene.caller.respond = None
        began = scene.clock()
        while scene.clock() < began + stopped_s:
            for _ in range(64 if scene.clock() == began else 0):
                scene.consumer.acquire(f"r{next(numbers)}", remote("cmpl-0"))
            if round((scene.clock() - began) / TICK_S) % 20 == 0:
                scene.consumer.acquire(f"r{next(numbers)}", remote("cmpl-0"))
            scene.clock.advance(TICK_S)
            scene.caller.time_out()
            scene.consumer.tick()
        scene.caller.respond = network.respond
        for call in scene.caller.open():
            reply = network.respond(call)
            assert reply is not None
            call.answer(reply)
        for _ in range(60):
            scene.clock.advance(TICK_S)
            scene.caller.time_out()
            scene.consumer.tick()
    assert scene.counts("breaker_opened", "breaker_refused") == (0, 0)


def test_a_restarted_peer_of_another_engine_id_is_asked_though_the_breaker_is_open() -> None:
    """Case 9: who names an engine that was not waited for yet has heard from it."""
    scene = Silence()
    scene.pass_until_open()
    assert isinstance(scene.try_one(), Lost)
    assert scene.try_one("prefill-1") == Pending()
    scene.welcome(restarted("prefill-1"))
    scene.grant("second")
    assert scene.status("try-1") == Held(restarted("prefill-1"), BLOCKS, 17)


def test_a_restarted_peer_of_the_same_engine_id_is_served_within_the_longest_opening() -> None:
    """Case 9, after a minute in which it was asked all the time."""
    scene = Silence()
    for _ in range(60):
        scene.pass_silence(1.0)
        scene.try_one()
    assert scene.counts("breaker_opened") == (5,)
    network = Network({P: start_prefill(num_leases=1000)})
    scene.caller.respond = network.respond
    for call in scene.caller.open():  # the side channel sends what waits when there is a connection
        reply = network.respond(call)
        assert reply is not None
        call.answer(reply)
    numbers = itertools.count()

    def is_served() -> bool:
        name = f"cmpl-{next(numbers)}"
        scene.consumer.acquire(name, remote(name))
        return isinstance(scene.status(name), Held)

    assert scene.pass_until(is_served) <= OPEN_MAX_S + TICK_S


def test_renewals_go_on_while_a_breaker_is_open() -> None:
    """A promise is running out: an answer saves it, and closes the breaker."""
    scene = Scene(acquire_timeout_s=12.0)
    scene.hold()
    scene.consumer.acquire("other", remote("cmpl-2"))
    while not scene.consumer.counts["breaker_opened"]:
        scene.pass_time(TICK_S)
        scene.caller.time_out()
    assert scene.status() == HELD
    scene.caller.open(Renew)[0].answer(Renewed("cmpl-1", LEASE_S, incarnation="first"))
    assert scene.status() == HELD
    scene.consumer.acquire("new", remote("cmpl-3"))
    assert scene.status("new") == Pending()
    assert scene.caller.open(Hello)


def test_a_dead_peer_is_asked_one_question_however_many_wait() -> None:
    scene = Silence()
    scene.welcome()
    scene.pass_silence(10.0)
    for i in range(100):
        scene.consumer.acquire(f"r{i}", remote(f"cmpl-{i}"))
    scene.pass_until_open()
    before = len(scene.caller.calls)
    scene.pass_silence(OPEN_S)
    scene.pass_silence(5.0)
    assert all(scene.status(f"r{i}") == Pending() for i in range(100))
    assert [type(call.request) for call in scene.caller.calls[before:]] == [Hello]


def test_a_silent_peer_that_nobody_needs_is_forgotten() -> None:
    scene = Silence()
    scene.pass_until_open()
    scene.consumer.release("first")
    scene.pass_silence(30.0)
    assert len(scene.consumer._peers) == 1
    scene.pass_silence(REMEMBER_SILENCE_S)
    assert len(scene.consumer._peers) == 0
    assert scene.try_one() == Pending()


# P restarts.


def restarted(engine_id: str = "prefill-0", incarnation: str = "second") -> EngineManifest:
    return engine_manifest(LAYOUTS, engine_id, incarnation, model="m")


def test_p_restarts_under_a_new_engine_id() -> None:
    """Case 9: what names the new engine succeeds after one new handshake, what names the old one is lost."""
    scene = Scene()
    scene.hold()
    scene.clock.advance(1.0)
    scene.consumer.acquire("new", remote("cmpl-2", engine_id="prefill-1"))
    scene.welcome(restarted("prefill-1"))
    scene.grant("second")
    assert scene.status("new") == Held(restarted("prefill-1"), BLOCKS, 17)
    scene.clock.advance(1.0)
    scene.consumer.acquire("old", remote("cmpl-3"))
    assert scene.status("old") == Pending()  # it might be this side that is behind
    scene.welcome(restarted("prefill-1"))
    assert scene.status("old") == Lost("10.0.0.1:5600 is engine prefill-1, the request names engine prefill-0")
    assert scene.caller.count(Hello) == 3


def test_p_restarts_under_the_same_engine_id() -> None:
    """Case 9: the first answer of the new incarnation leads to one new handshake for all who wait."""
    scene = Scene()
    scene.hold()
    scene.clock.advance(1.0)
    for i in range(3):
        scene.consumer.acquire(f"new-{i}", remote(f"new-{i}"))
    scene.consumer.acquire("old", remote("old"))
    for _ in range(3):
        scene.grant("second")
    unknown = Refused("old", RefusalReason.UNKNOWN, "long ago", incarnation="second")
    scene.caller.open(Acquire)[0].answer(unknown)
    assert scene.status("old") == Pending()  # the old incarnation might have answered otherwise
    scene.caller.only(Hello)
    scene.welcome(restarted())
    for _ in range(3):
        scene.grant("second")
    scene.caller.only(Acquire).answer(unknown)
    for i in range(3):
        assert scene.status(f"new-{i}") == Held(restarted(), BLOCKS, 17)
    assert scene.status("old") == Lost("lease refused by engine prefill-0: unknown: long ago")
    assert scene.caller.count(Hello) == 2


def test_an_answer_that_arrives_after_anothers_handshake_belongs_to_the_new_incarnation() -> None:
    """Both requests name the restarted P. The first answer starts the handshake, the second comes after it."""
    scene = Scene()
    scene.hold()
    scene.clock.advance(1.0)
    scene.consumer.acquire("a", remote("cmpl-a"))
    scene.consumer.acquire("b", remote("cmpl-b"))
    scene.grant("second")
    (late,) = scene.caller.open(Acquire)
    scene.clock.advance(1.0)
    scene.welcome(restarted())
    late.answer(Granted("cmpl-b", BLOCKS, 17, LEASE_S, incarnation="second"))
    scene.grant("second")
    assert scene.status("a") == scene.status("b") == Held(restarted(), BLOCKS, 17)


def test_a_request_that_joined_a_handshake_of_before_the_restart_gets_its_own() -> None:
    scene = Scene()
    scene.consumer.acquire("old", remote("cmpl-1"))
    scene.consumer.acquire("new", remote("cmpl-2", engine_id="prefill-1"))
    scene.welcome()
    assert scene.status("new") == Pending()
    scene.welcome(restarted("prefill-1"))
    scene.grant("second")
    assert scene.status("new") == Pending()  # that was the grant of "old", from an engine that it does not name
    scene.grant("second")
    assert scene.status("new") == Held(restarted("prefill-1"), BLOCKS, 17)


def test_two_engines_behind_one_address_do_not_shake_hands_for_ever() -> None:
    scene = Scene()
    scene.consumer.acquire("r", remote())
    scene.welcome()
    scene.grant("second")
    assert scene.status() == Lost("engine prefill-0 restarted; what it held is gone")
    assert scene.caller.open() == []


def test_a_restart_is_noticed_by_a_renewal() -> None:
    scene = Scene()
    scene.hold()
    scene.pass_time(LEASE_S / 3)
    scene.caller.only(Renew).answer(Refused("cmpl-1", RefusalReason.UNKNOWN, "", incarnation="second"))
    assert scene.status() == Lost("engine prefill-0 restarted while its lease was held")
    assert scene.counts("grants_lost") == (1,)


# Keeping a grant.


def test_a_grant_is_renewed_after_a_third_of_its_promise_and_again() -> None:
    scene = Scene()
    scene.hold()
    for renewals in range(1, 10):
        scene.pass_time(LEASE_S / 3 - 0.1)
        assert scene.caller.open() == []
        scene.pass_time(0.2)
        renew = scene.caller.only(Renew)
        holder = next(call.request.holder for call in scene.caller.calls if isinstance(call.request, Acquire))
        assert renew.request == Renew("cmpl-1", "token", holder)
        renew.answer(Renewed("cmpl-1", LEASE_S, incarnation="first"))
        assert scene.counts("renewals", "grants_lost") == (renewals, 0)
    assert scene.status() == HELD


def test_a_renewed_promise_counts_from_before_the_question_too() -> None:
    scene = Scene()
    scene.hold()
    scene.pass_time(10.0)
    scene.clock.advance(5.0)
    scene.caller.only(Renew).answer(Renewed("cmpl-1", LEASE_S, incarnation="first"))
    scene.clock.advance(KEPT_S - 5.0 - 1e-6)
    assert scene.status() == HELD
    scene.clock.advance(2e-6)
    assert isinstance(scene.status(), Lost)


@pytest.mark.parametrize("promise_s", [2.0, LEASE_S])
@pytest.mark.parametrize("num_lost", [0, 1, 2])
def test_a_promise_leaves_time_for_three_renewals(promise_s: float, num_lost: int) -> None:
    """However long the side channel would wait for an answer that was lost."""
    scene = Scene(handshake_timeout_s=1000.0)
    scene.hold(promise_s=promise_s)
    seen = 0
    for _ in range(int(promise_s / TICK_S)):
        scene.pass_time(TICK_S)
        scene.caller.time_out()
        if scene.caller.count(Renew) > num_lost:
            scene.caller.only(Renew).answer(Renewed("cmpl-1", promise_s, incarnation="first"))
            seen = scene.caller.count(Renew)
            break
    assert seen == num_lost + 1
    assert scene.status() == HELD


def test_renewals_that_nobody_answers_lose_the_grant_on_time() -> None:
    scene = Scene()
    scene.hold()
    for _ in range(int(KEPT_S / TICK_S)):
        scene.pass_time(TICK_S)
        scene.caller.time_out()
        assert scene.status() == HELD
    assert scene.caller.count(Renew) >= 3
    scene.pass_time(TICK_S)
    lost = scene.status()
    assert lost == Lost("the lease ran out: P promised 30 s and was not reached since")
    for call in scene.caller.open(Renew):
        call.answer(Renewed("cmpl-1", LEASE_S, incarnation="first"))
    assert scene.status() == lost
    assert scene.counts("grants_lost", "renewals") == (1, 0)


def test_a_renewal_that_arrives_after_the_promise_ended_does_not_mend_it() -> None:
    """P may have given the blocks away, and granted nothing to us, in between."""
    scene = Scene()
    scene.hold()
    scene.pass_time(10.0)
    renew = scene.caller.only(Renew)
    scene.clock.advance(KEPT_S - 10.0 + 1e-6)
    renew.answer(Renewed("cmpl-1", LEASE_S, incarnation="first"))
    assert scene.status() == Lost("the lease ran out: P promised 30 s and was not reached since")
    assert scene.counts("grants_lost", "renewals") == (1, 0)
    scene.pass_time(10.0, ticks=10)
    assert scene.caller.open() == []


def test_a_refused_renewal_loses_the_grant_at_once() -> None:
    scene = Scene()
    scene.hold()
    scene.pass_time(10.0)
    scene.refuse(Renew, RefusalReason.EXPIRED, "its reader did not renew in time")
    assert scene.status() == Lost("lease not renewed by engine prefill-0: expired: its reader did not renew in time")
    assert scene.counts("grants_lost") == (1,)


def test_a_renewal_that_p_puts_off_is_repeated() -> None:
    scene = Scene()
    scene.hold()
    scene.pass_time(10.0)
    scene.refuse(Renew, RefusalReason.OVERLOADED, retry_after_s=1.0)
    scene.pass_time(0.5)
    assert scene.caller.open() == []
    scene.pass_time(0.6)
    scene.caller.only(Renew).answer(Renewed("cmpl-1", LEASE_S, incarnation="first"))
    scene.clock.advance(LEASE_S - 1.0)
    assert scene.status() == HELD


def test_a_renewal_answered_with_something_else_loses_the_grant() -> None:
    scene = Scene()
    scene.hold()
    scene.pass_time(10.0)
    scene.caller.only(Renew).answer(Released("cmpl-1", incarnation="first"))
    assert scene.status() == Lost("engine prefill-0 answered Renew with Released")


@pytest.mark.parametrize("num_lost", [0, 1])
def test_a_queue_of_requests_keeps_its_leases(num_lost: int) -> None:
    """Case 13: 128 requests, leases of 2 s, D busy for 6 s; the first answers to renewals may be lost."""
    clock = Clock(50.0)
    producer = start_prefill(num_leases=128, lease_s=2.0, clock=clock)
    network = Network({P: producer})
    scene = Scene(network.respond, lease_s=2.0)
    for i in range(128):
        scene.consumer.acquire(f"r{i}", remote(f"cmpl-{i}"))
    network.num_lost = 128 * num_lost
    for _ in range(int(6.0 / TICK_S)):
        scene.clock.advance(TICK_S)
        clock.advance(TICK_S)
        scene.caller.time_out()
        scene.consumer.tick()
    assert all(isinstance(scene.status(f"r{i}"), Held) for i in range(128))
    assert producer.num_leases == 128
    assert scene.counts("grants", "grants_lost") == (128, 0)
    scene.consumer.close()
    assert sorted(producer.take_ended()) == sorted(f"cmpl-{i}" for i in range(128))


# Giving back.


def test_an_abort_before_the_handshake_gives_the_lease_back() -> None:
    """Case 10: P learns of it at once, instead of keeping the blocks for the whole lease."""
    scene = Scene()
    scene.consumer.acquire("r", remote())
    scene.consumer.release("r")
    assert scene.caller.open(Release)[0].request.request_id == "cmpl-1"
    scene.welcome()
    assert scene.caller.open(Acquire) == []


def test_an_abort_before_the_grant_follows_the_acquire_and_ignores_the_grant() -> None:
    scene = Scene()
    scene.consumer.acquire("r", remote())
    scene.welcome()
    scene.consumer.release("r")
    assert [type(call.request) for call in scene.caller.calls] == [Hello, Acquire, Release]
    scene.grant()
    assert scene.status() == Lost("no lease was acquired for this request")
    assert scene.counts("grants") == (0,)


def test_an_abort_during_a_renewal_ignores_its_answer() -> None:
    scene = Scene()
    scene.hold()
    scene.pass_time(10.0)
    scene.consumer.release("r")
    scene.caller.open(Renew)[0].answer(Renewed("cmpl-1", LEASE_S, incarnation="first"))
    assert scene.counts("renewals", "grants_lost") == (0, 0)


def test_a_grant_for_an_earlier_request_of_the_same_id_is_ignored() -> None:
    scene = Scene()
    scene.consumer.acquire("r", remote("cmpl-1"))
    scene.welcome()
    scene.consumer.release("r")
    scene.consumer.acquire("r", remote("cmpl-2"))
    scene.grant()
    assert scene.status() == Pending()
    scene.grant()
    assert scene.status() == HELD


def test_a_lease_is_given_back_once() -> None:
    scene = Scene()
    scene.hold()
    scene.consumer.release("r")
    scene.consumer.release("r")
    scene.consumer.release("never seen")
    assert scene.caller.count(Release) == 1


@pytest.mark.parametrize("reply", [PeerError("no answer"), Refused("", RefusalReason.EXPIRED, "", incarnation="first")])
def test_a_release_that_fails_is_counted(reply: Reply | Exception) -> None:
    scene = Scene()
    scene.hold()
    scene.consumer.release("r")
    scene.caller.only(Release).answer(reply)
    assert scene.counts("releases", "releases_failed") == (0, 1)


def test_close_gives_everything_back_and_ends_the_thread() -> None:
    producer = start_prefill(num_leases=3)
    scene = Scene(Network({P: producer}).respond)
    scene.consumer.start()
    for i in range(3):
        scene.consumer.acquire(f"r{i}", remote(f"cmpl-{i}"))
    scene.consumer.close()
    assert "hybrid-connector-leases" not in [thread.name for thread in threading.enumerate()]
    assert sorted(producer.take_ended()) == ["cmpl-0", "cmpl-1", "cmpl-2"]
    assert scene.counts("grants", "releases") == (3, 3)
    scene.consumer.close()


def test_close_waits_for_its_releases_as_long_as_it_may() -> None:
    """The side channel, closed next, drops what it has not sent: P would keep the blocks for the whole lease."""
    scene = Scene()
    scene.hold("a")
    scene.hold("b")
    scene.consumer.release("a")
    scene.consumer.close(wait_s=0)
    assert [call.request.request_id for call in scene.caller.open(Release)] == ["cmpl-1", "cmpl-1"]
    closing = threading.Thread(target=scene.consumer.close, args=(60.0,))
    closing.start()
    for call in scene.caller.open(Release):
        assert closing.is_alive()
        call.answer(Released("cmpl-1", incarnation="first"))
    closing.join()
    assert scene.counts("releases") == (2,)


# What a client may write.

PARAMS = {
    "remote_engine_id": "prefill-0",
    "remote_request_id": "cmpl-1",
    "remote_lease_token": "token",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
}


def test_the_parameters_name_a_lease() -> None:
    assert RemoteRequest.from_params(PARAMS | {"do_remote_prefill": True, "tp_size": 4}) == remote()


@pytest.mark.parametrize("key", PARAMS)
def test_a_missing_parameter_is_named(key: str) -> None:
    expected = "int" if key == "remote_port" else "str"
    for params in ({k: v for k, v in PARAMS.items() if k != key}, PARAMS | {key: None}):
        with refused(f"kv_transfer_params.{key}: expected {expected}, got None", HybridConnectorError):
            RemoteRequest.from_params(params)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("remote_port", "5600", "expected int, got '5600'"),
        ("remote_port", 5600.0, "expected int, got 5600.0"),
        ("remote_port", True, "expected int, got True"),
        ("remote_port", 0, "expected 1 to 65535, got 0"),
        ("remote_port", -1, "expected 1 to 65535, got -1"),
        ("remote_port", 65536, "expected 1 to 65535, got 65536"),
        ("remote_host", "", "expected 1 to 255 characters, got ''"),
        ("remote_host", ["10.0.0.1"], "expected str, got ['10.0.0.1']"),
        ("remote_host", "10.0.0.1\n", "expected printable characters, got '10.0.0.1\\n'"),
        ("remote_host", "x" * 256, f"expected 1 to 255 characters, got '{'x' * 99}"),
        ("remote_request_id", 7, "expected str, got 7"),
        ("remote_request_id", "", "expected 1 to 512 characters, got ''"),
        ("remote_request_id", "\ud800", "expected Unicode, got '\\ud800'"),
        ("remote_engine_id", b"prefill-0", "expected str, got b'prefill-0'"),
        ("remote_engine_id", True, "expected str, got True"),
        ("remote_lease_token", "t" * 129, f"expected 1 to 128 characters, got '{'t' * 99}"),
        ("remote_lease_token", {"a": 1}, "expected str, got {'a': 1}"),
    ],
)
def test_a_parameter_that_cannot_be_used_says_what_was_expected(key: str, value: Any, problem: str) -> None:
    with refused(f"kv_transfer_params.{key}: {problem}", HybridConnectorError):
        RemoteRequest.from_params(PARAMS | {key: value})


@pytest.mark.parametrize("params", [PARAMS, {**PARAMS, "remote_request_id": "x" * 512, "remote_host": "é"}])
def test_what_is_accepted_can_be_sent(params: dict[str, Any]) -> None:
    accepted = RemoteRequest.from_params(params)
    request = Acquire(accepted.request_id, accepted.token, "holder")
    assert decode_request(encode(request)) == request


# All together, with real producers.


def start_prefill(
    num_leases: int = 2, lease_s: float = LEASE_S, incarnation: str = "first", clock: Clock | None = None
) -> Producer:
    """A P engine that keeps the requests ``cmpl-0``, ``cmpl-1``, ..., sealed."""
    producer = Producer(lease_s, incarnation, clock or Clock(50.0))
    producer.publish(engine_manifest(LAYOUTS, "prefill-0", incarnation, model="m"))
    for i in range(num_leases):
        producer.open(f"cmpl-{i}", "token", BLOCKS, 17, 0)
    producer.seal(0)
    return producer


class Network:
    """Answers for the engines at addresses, through the bytes of the protocol; nobody answers elsewhere."""

    def __init__(self, engines: dict[tuple[str, int], Producer]) -> None:
        self.engines = engines
        self.num_lost = 0  # of the next renewals, P sees them but the answers get lost

    def respond(self, call: Call) -> Reply | None:
        engine = self.engines.get(call.address)
        if engine is None:
            return None
        reply = decode_reply(encode(engine.answer(decode_request(encode(call.request)))))
        if self.num_lost and isinstance(call.request, Renew):
            self.num_lost -= 1
            return None
        return reply


class Chaos:
    """One consumer, one P address, and a side channel that delays, loses and, at a restart, forgets."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.at_once = self.rng.random() < 0.5
        self.d_clock = Clock(1000.0)
        self.p_clock = Clock(5.0)
        self.caller = ScriptedCaller(self.d_clock, self.respond)
        config = ConnectorConfig(lease_s=2.0, acquire_timeout_s=5.0, handshake_timeout_s=1.0)
        self.consumer = Consumer(self.caller, config, self.d_clock, self.rng.random)
        self.consumer.publish(LOCAL)
        self.unsent: list[Call] = []  # not seen by P
        self.unread: list[tuple[Call, Reply]] = []  # answered, not seen by D
        self.numbers = itertools.count()
        self.step = 0
        self.wanted: dict[str, str] = {}  # local request id -> remote request id
        self.incarnations: dict[str, str] = {}  # remote request id -> of the P that leased it
        self.ended: list[str] = []
        self.opened: list[str] = []
        self.restart()

    def restart(self) -> None:
        if self.opened:
            self.producer.expire_all()
            self.ended += self.producer.take_ended()
        self.incarnation = f"i{next(self.numbers)}"
        self.engine_id = self.rng.choice(["prefill-0", "prefill-1"])
        self.producer = Producer(2.0, self.incarnation, self.p_clock)
        self.producer.publish(engine_manifest(LAYOUTS, self.engine_id, self.incarnation, model="m"))
        self.unsent.clear()
        self.is_up = True

    def respond(self, call: Call) -> Reply | None:
        if not self.at_once:
            self.unsent.append(call)
            return None
        return self.producer.answer(call.request) if self.is_up else None

    def lease(self) -> None:
        number = next(self.numbers)
        remote_id, local_id = f"cmpl-{number}", f"r{number}"
        self.producer.open(remote_id, "token", BLOCKS, 17, self.step)
        self.opened.append(remote_id)
        self.incarnations[remote_id] = self.incarnation
        self.wanted[local_id] = remote_id
        self.consumer.acquire(local_id, remote(remote_id, self.engine_id))

    def reset(self) -> None:
        """P's cache is reset: what nobody holds is gone, what D holds stays until D lets go."""
        self.producer.withdraw_all()

    def serve(self) -> None:
        if self.unsent and self.is_up:
            call = self.unsent.pop(0)
            self.unread.append((call, self.producer.answer(call.request)))

    def read(self) -> None:
        if self.unread:
            call, reply = self.unread.pop(0)
            if not call.future.done():  # else it is late, and the side channel drops it
                call.answer(reply)

    def lose(self) -> None:
        lossy = self.unsent or self.unread
        if lossy:
            lossy.pop(0)

    def seal(self) -> None:
        self.producer.seal(self.step)
        self.step += 1

    def wait(self) -> None:
        seconds = self.rng.choice([0.001, 0.05, 0.3])
        self.d_clock.advance(seconds)
        self.p_clock.advance(seconds)
        self.caller.time_out()
        self.ended += self.producer.take_ended()

    def release(self) -> None:
        if self.wanted:
            local_id = self.rng.choice(list(self.wanted))
            del self.wanted[local_id]
            self.consumer.release(local_id)

    def toggle(self) -> None:
        self.is_up = not self.is_up

    def check(self) -> None:
        """I2: what D holds is leased, unless P has died, whose memory is then out of reach too."""
        self.ended += self.producer.take_ended()
        for local_id, remote_id in self.wanted.items():
            status = self.consumer.status(local_id)
            if isinstance(status, Held):
                assert status.block_ids == BLOCKS
                assert status.manifest.incarnation == self.incarnations[remote_id]
                if status.manifest.incarnation == self.incarnation:
                    assert remote_id not in self.ended

    def settle(self) -> None:
        """The network heals: whatever was still waiting has an answer soon."""
        self.is_up = True
        for _ in range(150):
            self.seal()
            while self.unsent or self.unread:
                self.serve()
                self.read()
            self.d_clock.advance(TICK_S)
            self.p_clock.advance(TICK_S)
            self.caller.time_out()
            self.consumer.tick()
            self.check()

    def run(self, num_steps: int) -> None:
        actions = {
            self.lease: 2,
            self.serve: 8,
            self.read: 8,
            self.consumer.tick: 4,
            self.seal: 3,
            self.wait: 4,
            self.lose: 0.5,
            self.release: 1,
            self.toggle: 0.3,
            self.reset: 0.2,
            self.restart: 0.2,
        }
        for action in self.rng.choices(list(actions), list(actions.values()), k=num_steps):
            action()
            self.check()


def test_whatever_happens_nothing_is_held_that_was_given_away_and_nobody_waits_for_ever() -> None:
    grants = 0
    for seed in range(300):
        chaos = Chaos(seed)
        chaos.run(120)
        # A request that comes now, to a P that is up, is granted whatever went before.
        chaos.is_up = True
        before = set(chaos.wanted)
        chaos.lease()
        (last,) = set(chaos.wanted) - before
        chaos.settle()
        assert isinstance(chaos.consumer.status(last), Held), (seed, chaos.consumer.status(last))
        for local_id in chaos.wanted:
            assert not isinstance(chaos.consumer.status(local_id), Pending)
        chaos.consumer.close(wait_s=0)
        while chaos.unsent or chaos.unread:
            chaos.serve()
            chaos.read()
        chaos.p_clock.advance(10.0)
        chaos.ended += chaos.producer.take_ended()
        assert sorted(chaos.ended) == sorted(chaos.opened)  # I4
        grants += chaos.consumer.counts["grants"]
    assert grants > 1000


def test_answers_from_another_thread() -> None:
    """Scheduler, ticks and answers on three threads: nothing is left over, and nobody waits for another for ever."""
    num_requests = 300
    producer = start_prefill(num_leases=num_requests)
    calls: queue.Queue[Call | None] = queue.Queue()
    caller = ScriptedCaller(Clock(), lambda call: calls.put(call))  # type: ignore[func-returns-value]
    consumer = Consumer(caller, ConnectorConfig())
    consumer.publish(LOCAL)

    def answer() -> None:
        while (call := calls.get()) is not None:
            call.answer(producer.answer(call.request))

    is_over = threading.Event()

    def tick() -> None:
        while not is_over.wait(1e-4):
            consumer.tick()

    threads = [threading.Thread(target=answer), threading.Thread(target=tick)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for i in range(num_requests):
            consumer.acquire(f"r{i}", remote(f"cmpl-{i}"))
            if i % 3 == 0:
                consumer.release(f"r{i}")
        waiting = {f"r{i}" for i in range(num_requests) if i % 3}
        while waiting:
            for request_id in list(waiting):
                status = consumer.status(request_id)
                assert not isinstance(status, Lost)
                if isinstance(status, Held):
                    waiting.remove(request_id)
        consumer.close()
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        calls.put(None)
        for thread in threads:
            thread.join()
    assert producer.num_leases == 0
    assert consumer.counts["releases"] == num_requests
    assert consumer.counts["grants"] >= len([i for i in range(num_requests) if i % 3])


def test_counts_may_be_read_while_peers_answer() -> None:
    """The engine's thread reads them each step; one that is counted for the first time meanwhile must not end it."""
    for _ in range(50):
        scene = Scene()

        def answer(scene: Scene = scene) -> None:
            scene.consumer.acquire("r", remote())
            scene.welcome()
            scene.grant()
            scene.consumer.release("r")

        def read(scene: Scene = scene) -> None:
            assert sum(count for _, count in scene.consumer.counts.items()) <= 2

        read_while(answer, read)
        assert scene.consumer.counts == {"handshakes": 1, "grants": 1}


def test_an_engine_that_waits_for_an_answer_goes_on_as_soon_as_there_is_one() -> None:
    """A loop that only asks ``status`` keeps the interpreter lock from the thread that would change it."""
    scene = Scene()
    scene.consumer.acquire("r", remote())
    scene.welcome()
    answer = threading.Thread(target=scene.grant)
    scene.consumer.wait_answer(0)  # the welcome
    answer.start()
    scene.consumer.wait_answer(60)
    assert isinstance(scene.consumer.status("r"), Held)
    answer.join()


def test_a_peer_is_counted_on_once_it_has_granted_quickly_and_until_it_is_silent() -> None:
    scene = Scene()
    assert not scene.consumer.is_prompt("r")
    scene.consumer.acquire("r", remote())
    assert not scene.consumer.is_prompt("r"), "a handshake comes first"
    scene.welcome()
    assert not scene.consumer.is_prompt("r"), "nobody knows how long it takes"
    scene.clock.advance(PROMPT_S / 2)
    scene.grant()
    assert not scene.consumer.is_prompt("r"), "it has answered"
    scene.consumer.acquire("s", remote("cmpl-2"))
    assert scene.consumer.is_prompt("s")
    scene.clock.advance(PROMPT_S)
    scene.consumer.acquire("t", remote("cmpl-3"))
    assert scene.consumer.is_prompt("t")
    scene.clock.advance(PROMPT_S / 10)
    assert not scene.consumer.is_prompt("t"), "what was asked before is not answered"
    scene.grant()
    assert not scene.consumer.is_prompt("t"), "it takes longer now"


def test_a_step_waits_for_grants_no_longer_than_asked_and_not_for_slow_peers() -> None:
    scene = Scene()
    scene.hold("r")
    scene.consumer.acquire("s", remote("cmpl-2"))
    scene.consumer.acquire("t", remote("cmpl-3"))
    answers = threading.Thread(target=lambda: (scene.grant(), scene.grant()))
    answers.start()
    scene.consumer.wait_grants(["s", "t", "unknown"], 60)
    answers.join()
    assert scene.status("s") == scene.status("t") == HELD

    scene.consumer.acquire("u", remote("cmpl-4"))
    scene.consumer.wait_grants(["u"], 0.001)  # returns though nobody answers
    assert scene.status("u") == Pending()
    scene.clock.advance(2.0)
    scene.grant()
    scene.consumer.acquire("v", remote("cmpl-5"))
    began = time.monotonic()
    scene.consumer.wait_grants(["v"], 0.25)  # the last answer took 2 s
    assert time.monotonic() - began < 0.2


def test_the_ticker_rests_until_the_next_retry_is_due() -> None:
    scene = Scene()
    scene.consumer.acquire("r", remote())
    scene.welcome()
    assert scene.consumer._pause_s() == TICK_S
    scene.refuse(Acquire, RefusalReason.NOT_SEALED, retry_after_s=SEAL_RETRY_S)
    assert scene.consumer._pause_s() == pytest.approx(SEAL_RETRY_S)
    scene.clock.advance(2 * SEAL_RETRY_S)
    assert scene.consumer._pause_s() == 0
