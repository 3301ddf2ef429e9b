"""P's lease table and D's hold: every transition, and every short history (invariants I2, I4, I6)."""

import itertools
import random
from collections.abc import Callable
from typing import TypeVar

import pytest

from hybrid_connector.core.leases import (
    MAX_CLOCK_DRIFT,
    REMEMBERED_LEASES,
    Hold,
    LeaseGrant,
    LeaseRefusal,
    LeaseTable,
)

from refusals import refused

LEASE_S = 30.0
BLOCKS = ((3, 4), (7,))
ENDED = (LeaseRefusal.EXPIRED, LeaseRefusal.CONSUMED, LeaseRefusal.WITHDRAWN)


def leased(seal_step: int = 0, sealed: bool = True) -> LeaseTable:
    """Request ``r`` with token ``t``, leased at time 0."""
    table = LeaseTable(LEASE_S)
    table.open("r", "t", BLOCKS, 17, seal_step, 0.0)
    if sealed:
        table.seal(seal_step)
    return table


def ended(how: LeaseRefusal) -> LeaseTable:
    table = leased()
    if how is LeaseRefusal.CONSUMED:
        assert table.release("r", "t", "A", 1.0) is None
    elif how is LeaseRefusal.WITHDRAWN:
        table.withdraw_all(1.0)
    else:
        table.expire(LEASE_S)
    return table


def ask(table: LeaseTable, verb: str, token: str = "t", holder: str = "A", now: float = 1.0, request_id: str = "r"):
    return getattr(table, verb)(request_id, token, holder, now)


VERBS = ("acquire", "renew", "release")


@pytest.mark.parametrize("lease_s", [0.0, -1.0, float("nan")])
def test_a_lease_lasts(lease_s: float) -> None:
    with refused(f"expected lease_s > 0, got {lease_s}"):
        LeaseTable(lease_s)


def test_a_grant_names_the_blocks_and_starts_the_promise_anew() -> None:
    table = leased()
    assert ask(table, "acquire", now=29.0) == LeaseGrant(BLOCKS, 17, LEASE_S)
    table.expire(58.9)
    assert len(table) == 1
    table.expire(59.0)
    assert table.take_ended() == [("r", LeaseRefusal.EXPIRED)]


def test_asking_twice_is_answered_twice() -> None:
    table = leased()
    assert ask(table, "acquire", now=1.0) == ask(table, "acquire", now=20.0) == LeaseGrant(BLOCKS, 17, LEASE_S)
    table.expire(49.9)
    assert len(table) == 1


def test_a_lease_has_one_holder() -> None:
    table = leased()
    ask(table, "acquire")
    for verb in VERBS:
        assert ask(table, verb, holder="B") is LeaseRefusal.HELD
    assert ask(table, "renew") == LEASE_S
    assert ask(table, "release") is None


def test_nobody_renews_what_nobody_acquired() -> None:
    table = leased()
    assert ask(table, "renew") is LeaseRefusal.HELD
    table.expire(LEASE_S)
    assert len(table) == 0


def test_renewing_starts_the_promise_anew() -> None:
    table = leased()
    ask(table, "acquire", now=0.0)
    for now in range(20, 200, 20):
        assert ask(table, "renew", now=now) == LEASE_S
    assert ask(table, "renew", now=210.0) is LeaseRefusal.EXPIRED
    assert ask(table, "acquire", now=210.0) is LeaseRefusal.EXPIRED


def test_nothing_is_granted_before_its_steps_have_completed() -> None:
    table = leased(seal_step=5, sealed=False)
    for completed in (-1, 0, 4):
        table.seal(completed)
        assert ask(table, "acquire") is LeaseRefusal.NOT_SEALED
    assert ask(table, "renew") is LeaseRefusal.HELD
    table.seal(7)
    assert isinstance(ask(table, "acquire"), LeaseGrant)
    table.seal(3)
    assert isinstance(ask(table, "acquire"), LeaseGrant)


def test_a_refusal_does_not_prolong_a_lease() -> None:
    table = leased(sealed=False)
    assert ask(table, "acquire", now=29.0) is LeaseRefusal.NOT_SEALED
    assert ask(table, "acquire", token="x", now=29.0) is LeaseRefusal.WRONG_TOKEN
    assert ask(table, "acquire", now=30.0) is LeaseRefusal.EXPIRED


def test_who_knows_the_token_can_give_a_lease_up_before_it_is_sealed() -> None:
    table = leased(sealed=False)
    assert ask(table, "release") is None
    assert table.take_ended() == [("r", LeaseRefusal.CONSUMED)]
    table.seal(10)
    assert ask(table, "acquire") is LeaseRefusal.CONSUMED


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("how", ENDED)
def test_an_ended_lease_says_how_it_ended(verb: str, how: LeaseRefusal) -> None:
    assert ask(ended(how), verb, now=31.0) is how


@pytest.mark.parametrize("verb", VERBS)
def test_an_unknown_request(verb: str) -> None:
    assert ask(leased(), verb, request_id="other") is LeaseRefusal.UNKNOWN


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("token", ["", "x", "T", "tt", "ü", "t" * 128])
def test_without_the_token_nothing_is_told_or_changed(verb: str, token: str) -> None:
    """Also not whether a lease has ended, and how."""
    for table in (leased(), leased(sealed=False), *map(ended, ENDED)):
        before = len(table), table.take_ended()
        assert ask(table, verb, token=token) is LeaseRefusal.WRONG_TOKEN
        assert (len(table), table.take_ended()) == (before[0], [])


def test_the_promise_ends_at_its_time_whoever_asks() -> None:
    for verb in VERBS:
        assert ask(leased(), verb, now=LEASE_S) is LeaseRefusal.EXPIRED
        assert ask(leased(), verb, now=LEASE_S - 1e-9) is not LeaseRefusal.EXPIRED


def test_a_cache_reset_takes_back_what_nobody_holds() -> None:
    table = leased()
    table.withdraw_all(2.0)
    assert table.take_ended() == [("r", LeaseRefusal.WITHDRAWN)]
    assert ask(table, "acquire") is LeaseRefusal.WITHDRAWN
    table.open("later", "t", BLOCKS, 17, -1, 3.0)
    assert ask(table, "acquire", request_id="later", now=3.0) == LeaseGrant(BLOCKS, 17, LEASE_S)


def test_a_cache_reset_keeps_promises_and_makes_no_new_ones() -> None:
    """Blocks handed back under a reader that believes in its promise would be another request's when it reads (I2)."""
    table = leased()
    ask(table, "acquire", now=1.0)
    table.withdraw_all(2.0)
    assert table.take_ended() == []
    assert ask(table, "renew", now=20.0) is ask(table, "acquire", now=20.0) is LeaseRefusal.WITHDRAWN
    assert ask(table, "acquire", holder="B", now=20.0) is LeaseRefusal.HELD
    table.expire(30.9)
    assert table.take_ended() == []
    table.expire(31.0)
    assert table.take_ended() == [("r", LeaseRefusal.WITHDRAWN)]


def test_who_holds_what_was_withdrawn_can_release_it() -> None:
    table = leased()
    ask(table, "acquire")
    table.withdraw_all(2.0)
    assert ask(table, "release") is None
    assert table.take_ended() == [("r", LeaseRefusal.CONSUMED)]


def test_leases_end_one_by_one_or_all_at_once() -> None:
    table = LeaseTable(LEASE_S)
    for i in range(4):
        table.open(f"r{i}", "t", BLOCKS, 17, 0, 10.0 * i)
    table.expire(40.0)
    assert table.take_ended() == [("r0", LeaseRefusal.EXPIRED), ("r1", LeaseRefusal.EXPIRED)]
    table.expire_all()
    assert table.take_ended() == [("r2", LeaseRefusal.EXPIRED), ("r3", LeaseRefusal.EXPIRED)]
    table.expire_all()
    table.expire(1000.0)
    assert table.take_ended() == []
    assert len(table) == 0


def test_a_request_is_leased_once_at_a_time() -> None:
    table = leased()
    with refused("request r is leased already"):
        table.open("r", "t", BLOCKS, 17, 0, 1.0)


def test_a_request_id_may_come_back_with_other_blocks() -> None:
    table = ended(LeaseRefusal.CONSUMED)
    assert table.take_ended() == [("r", LeaseRefusal.CONSUMED)]
    table.open("r", "new", ((9,), (1,)), 5, 0, 2.0)
    table.seal(0)
    assert ask(table, "acquire", now=3.0) is LeaseRefusal.WRONG_TOKEN
    assert ask(table, "acquire", token="new", now=3.0) == LeaseGrant(((9,), (1,)), 5, LEASE_S)
    table.expire_all()
    assert table.take_ended() == [("r", LeaseRefusal.EXPIRED)]


def test_only_so_many_ends_are_remembered() -> None:
    table = LeaseTable(LEASE_S)
    for i in range(REMEMBERED_LEASES + 2):
        table.open(f"r{i}", "t", (), 1, 0, 0.0)
        assert ask(table, "release", request_id=f"r{i}", now=0.0) is None
    ends = [ask(table, "acquire", request_id=f"r{i}") for i in (0, 1, 2, REMEMBERED_LEASES + 1)]
    assert ends == [LeaseRefusal.UNKNOWN] * 2 + [LeaseRefusal.CONSUMED] * 2
    assert len(table.take_ended()) == REMEMBERED_LEASES + 2


def test_an_end_is_as_young_as_its_lease() -> None:
    table = LeaseTable(LEASE_S)
    for i in (*range(REMEMBERED_LEASES), 0, REMEMBERED_LEASES):
        table.open(f"r{i}", "t", (), 1, 0, 0.0)
        assert ask(table, "release", request_id=f"r{i}", now=0.0) is None
    assert ask(table, "acquire", request_id="r0") is LeaseRefusal.CONSUMED
    assert ask(table, "acquire", request_id="r1") is LeaseRefusal.UNKNOWN


def test_a_hold_counts_from_before_the_question() -> None:
    hold = Hold.since(100.0, LEASE_S)
    end = 100.0 + LEASE_S * (1 - MAX_CLOCK_DRIFT)
    assert hold.is_valid(100.0)
    assert hold.is_valid(end - 1e-6)
    assert not hold.is_valid(end)


def test_a_hold_is_renewed_with_time_for_two_more_tries() -> None:
    hold = Hold.since(100.0, LEASE_S)
    assert not hold.should_renew(109.9)
    assert hold.should_renew(110.0)
    assert hold.should_renew(1000.0)


@pytest.mark.parametrize("drift", [-MAX_CLOCK_DRIFT, 0.0, MAX_CLOCK_DRIFT])
@pytest.mark.parametrize("delay_s", [0.0, 1e-4, 3.0])
def test_a_slow_clock_on_d_does_not_outlive_the_lease(drift: float, delay_s: float) -> None:
    """P's clock is the true one; D's reads ``5000 + t * (1 - drift)``."""

    def on_d(t: float) -> float:
        return 5000.0 + t * (1 - drift)

    table = leased()
    ask(table, "acquire", now=10.0 + delay_s)
    hold = Hold.since(on_d(10.0), LEASE_S)
    last_valid = max(t for t in (10.0 + i * 1e-3 for i in range(40_000)) if hold.is_valid(on_d(t)))
    assert last_valid > 10.0 + LEASE_S * (1 - 3 * MAX_CLOCK_DRIFT)
    table.expire(last_valid)
    assert len(table) == 1


DELAY_S = LEASE_S / 8
"""Of a message, each way."""
WAIT_S = LEASE_S / 2
D_EPOCH = 12345.0
"""D's clock minus P's."""

Op = tuple[str, str, str]

T = TypeVar("T")


def _twin(thing: T) -> T:
    """A copy with its own containers; ``copy.copy`` takes most of the time of a long search."""
    twin = object.__new__(type(thing))
    twin.__dict__.update({n: v.copy() if isinstance(v, (dict, list)) else v for n, v in vars(thing).items()})
    return twin


class World:
    """A table, what was done to it, and what its readers believe. ``do`` checks each answer against the log alone."""

    def __init__(self) -> None:
        self.table = LeaseTable(LEASE_S)
        self.now = 0.0
        self.step = 0
        self.log: list[tuple[str, str, str, float]] = []  # what succeeded
        self.holds: dict[tuple[str, str], Hold] = {}
        self.opened = {"r1": 0, "r2": 0}
        self.ended = {"r1": 0, "r2": 0}

    def fork(self) -> "World":
        twin = _twin(self)
        twin.table = _twin(self.table)
        return twin

    def take(self) -> None:
        for request, _ in self.table.take_ended():
            self.ended[request] += 1
            assert self.ended[request] <= self.opened[request]

    def is_live(self, request: str) -> bool:
        """By the log: opened, and since then neither given back nor without a promise at any time.

        A reset takes back what nobody has acquired, and what was acquired keeps its last promise.
        """
        events = [event for event in self.log if event[1] == request]
        last_open = max((i for i, event in enumerate(events) if event[0] == "open"), default=None)
        if last_open is None:
            return False
        verbs = [event[0] for event in events[last_open:]]
        if "withdraw" in verbs and "acquire" not in verbs[: verbs.index("withdraw")]:
            return False
        promises = [event[3] for event in events[last_open:] if event[0] in ("open", "acquire", "renew")]
        gaps = [later - earlier for earlier, later in itertools.pairwise([*promises, self.now])]
        return not any(event[0] == "release" for event in events[last_open:]) and max(gaps) < LEASE_S

    def history(self, request: str) -> list[tuple[str, str, str, float]]:
        """What succeeded since the request was last opened; steps belong to all requests."""
        last_open = max(
            (i for i, event in enumerate(self.log) if event[:2] == ("open", request)), default=len(self.log)
        )
        return [event for event in self.log[last_open:] if event[1] in (request, "")]

    def do(self, op: Op) -> None:
        verb, request, holder = op
        getattr(self, f"do_{verb}")(request, holder)
        self.check_holds()

    def succeed(self, verb: str, request: str, holder: str) -> None:
        self.log.append((verb, request, holder, self.now))

    def do_open(self, request: str, _: str) -> None:
        self.table.expire(self.now)
        self.take()  # a request id does not come back before its blocks have
        if self.is_live(request):
            with refused(f"request {request} is leased already"):
                self.table.open(request, "t", (), 1, self.step, self.now)
            return
        self.opened[request] += 1
        self.table.open(request, "t", ((self.opened[request],),), 1, self.step, self.now)
        self.succeed("open", request, "")

    def do_step(self, _: str, __: str) -> None:
        self.table.seal(self.step)
        self.step += 1
        self.succeed("step", "", "")

    def do_wait(self, _: str, __: str) -> None:
        self.now += WAIT_S

    def do_withdraw(self, _: str, __: str) -> None:
        self.table.withdraw_all(self.now)
        for request in filter(self.is_live, self.opened):
            self.succeed("withdraw", request, "")

    def is_withdrawn(self, request: str) -> bool:
        return any(event[0] == "withdraw" for event in self.history(request))

    def do_acquire(self, request: str, holder: str) -> None:
        asked_at = self.now + D_EPOCH
        self.now += DELAY_S
        answer = self.table.acquire(request, "t", holder, self.now)
        history = self.history(request)
        is_sealed = any(event[0] == "step" for event in history)
        holders = {event[2] for event in history if event[0] == "acquire"}
        if self.is_live(request) and self.is_withdrawn(request) and holders <= {holder}:
            assert answer is LeaseRefusal.WITHDRAWN
        elif self.is_live(request) and is_sealed and holders <= {holder}:
            assert answer == LeaseGrant(((self.opened[request],),), 1, LEASE_S)
            self.succeed("acquire", request, holder)
            self.now += DELAY_S
            self.holds[request, holder] = Hold.since(asked_at, answer.promise_s)
        elif not self.opened[request]:
            assert answer is LeaseRefusal.UNKNOWN
        elif not self.is_live(request):
            if any(event[0] == "release" for event in history):
                assert answer is LeaseRefusal.CONSUMED
            else:
                withdrawn = self.is_withdrawn(request)
                assert answer is (LeaseRefusal.WITHDRAWN if withdrawn else LeaseRefusal.EXPIRED)
        else:
            assert answer is (LeaseRefusal.HELD if holders - {holder} else LeaseRefusal.NOT_SEALED)

    def do_renew(self, request: str, holder: str) -> None:
        asked_at = self.now + D_EPOCH
        self.now += DELAY_S
        answer = self.table.renew(request, "t", holder, self.now)
        acquired = ("acquire", holder) in {(e[0], e[2]) for e in self.history(request)}
        if self.is_live(request) and acquired and not self.is_withdrawn(request):
            assert answer == LEASE_S
            self.succeed("renew", request, holder)
            self.now += DELAY_S
            # A consumer keeps to this: a promise that ran out before the answer came stays broken.
            if self.holds[request, holder].is_valid(self.now + D_EPOCH):
                self.holds[request, holder] = Hold.since(asked_at, LEASE_S)
        else:
            assert isinstance(answer, LeaseRefusal)

    def do_release(self, request: str, holder: str) -> None:
        self.holds.pop((request, holder), None)  # who gives back does not read any more
        self.now += DELAY_S
        answer = self.table.release(request, "t", holder, self.now)
        holders = {event[2] for event in self.history(request) if event[0] == "acquire"}
        if self.is_live(request) and holders <= {holder}:
            assert answer is None
            self.succeed("release", request, holder)
        else:
            assert isinstance(answer, LeaseRefusal)

    def check_holds(self) -> None:
        """Who believes to hold a lease does: P has not handed its blocks back, by the latest moment it could."""
        for (request, _), hold in self.holds.items():
            if hold.is_valid(self.now + D_EPOCH):
                probe = self.fork()
                probe.table.expire(probe.now)
                probe.take()
                assert probe.ended[request] == probe.opened[request] - 1

    def check_end(self) -> None:
        """Every lease that was opened ends, once."""
        self.now += 10 * LEASE_S
        self.table.expire(self.now)
        self.take()
        assert self.ended == self.opened
        assert len(self.table) == 0
        assert self.table.take_ended() == []


SHORT_OPS: tuple[Op, ...] = (
    ("open", "r1", ""),
    ("open", "r2", ""),
    ("step", "", ""),
    ("wait", "", ""),
    ("acquire", "r1", "A"),
    ("acquire", "r1", "B"),
    ("acquire", "r2", "A"),
    ("renew", "r1", "A"),
    ("renew", "r1", "B"),
    ("release", "r1", "A"),
    ("release", "r1", "B"),
    ("release", "r2", "A"),
    ("withdraw", "", ""),
)


def explore(world: World, ops: tuple[Op, ...], depth: int, visit: Callable[[World], None]) -> int:
    """Do every sequence of ``depth`` operations, and visit the world after each; returns how many sequences."""
    if depth == 0:
        visit(world)
        return 1
    count = 0
    for op in ops:
        then = world.fork()
        then.do(op)
        count += explore(then, ops, depth - 1, visit)
    return count


def test_every_short_history() -> None:
    """All histories of five operations that begin with a lease; before one, everything is refused as unknown.

    Each answer is compared with the log; ``test_lease_model.py`` has longer ones, and what D does with the answers.
    """
    start = World()
    start.do(("open", "r1", ""))
    assert explore(start, SHORT_OPS, 4, World.check_end) == 13**4 == 28_561


def test_long_histories_at_random() -> None:
    ops = [
        *(("open", request, "") for request in ("r1", "r2")),
        *((verb, request, holder) for verb in VERBS for request in ("r1", "r2") for holder in "AB"),
        ("step", "", ""),
        ("wait", "", ""),
    ]
    weights = [{"open": 3, "step": 4, "acquire": 2}.get(verb, 1) for verb, _, _ in ops]
    granted = 0
    for seed in range(1000):
        rng = random.Random(seed)
        world = World()
        for op in rng.choices(ops, weights, k=40):
            world.do(op)
        granted += sum(event[0] == "acquire" for event in world.log)
        world.check_end()
    assert granted > 1000


def test_a_lease_opened_after_its_step_is_readable_at_once() -> None:
    table = LeaseTable(10.0)
    table.open("nothing-in-flight", "token", ((1,),), 5, -1, 0.0)
    assert isinstance(table.acquire("nothing-in-flight", "token", "D", 1.0), LeaseGrant)
    table.seal(7)
    table.open("old-step", "token", ((2,),), 5, 7, 1.0)
    table.open("next-step", "token", ((3,),), 5, 8, 1.0)
    assert isinstance(table.acquire("old-step", "token", "D", 1.0), LeaseGrant)
    assert table.acquire("next-step", "token", "D", 1.0) is LeaseRefusal.NOT_SEALED
