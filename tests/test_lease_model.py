"""Does any short history of P, D and the network between them break I2, I3 or I4? (CASES.md, cases 3 and 10)"""

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hybrid_connector.core.leases import Hold, LeaseGrant, LeaseRefusal, LeaseTable
from lease_model import LEASE_S, Answer, Exploration, Op, Reader, World, explore

SMOOTH: tuple[Op, ...] = (
    ("admit", "r1"),
    ("step", ""),
    ("finish", "r1"),
    ("acquire", "A"),
    ("complete", ""),
    ("serve", "A"),
    ("hear", "A"),
    ("begin", "A"),
    ("land", "A"),
    ("learn", "A"),
    ("serve", "A"),
    ("hear", "A"),
)
"""From the prompt to the release. Aborts, losses, shutdowns, pauses and resets may come after every one of these."""

LATE: tuple[Op, ...] = (
    *SMOOTH[:8],
    ("wait", ""),
    ("wait", ""),
    ("step", ""),
    ("admit", "r2"),
    ("step", ""),
    ("complete", ""),
    ("complete", ""),
    ("land", "A"),
)
"""A read that takes longer than the promise, while its source block gets another request's state."""

PREEMPTED: tuple[Op, ...] = (
    ("admit", "r1"),
    ("admit", "r2"),
    ("step", ""),
    ("preempt", "r1"),
    ("finish", "r2"),
    ("admit", "r1"),
    ("step", ""),
    ("complete", ""),
    ("finish", "r1"),
    ("acquire", "A"),
    ("serve", "A"),
)
"""A request that loses its block while a step that writes it is in flight, and gets one again."""

RENEWED: tuple[Op, ...] = (
    *SMOOTH[:6],
    ("wait", ""),
    ("hear", "A"),
    ("renew", "A"),
    ("serve", "A"),
    ("hear", "A"),
    ("wait", ""),
)
"""A promise that took a while to arrive, and is prolonged while its holder queues."""

SEARCHES = [
    (("r1", "r2"), LATE, 3),
    (("r1", "r2"), PREEMPTED, 3),
    (("r1", "r1"), RENEWED, 3),
    (("r1", "r1"), SMOOTH, 4),
]
"""Who the two readers want, from where, and how far."""

ON_P = {"admit", "preempt", "abort", "step", "complete", "finish", "pause", "resume", "reset", "stop_p"}
ON_D = {"acquire", "renew", "begin", "land", "learn", "give_up", "stop_d"}
BETWEEN = {"wait", "serve", "hear", "lose"}


@pytest.fixture(autouse=True, scope="module")
def _no_search_for_cycles() -> Iterator[None]:
    """There are none among a hundred thousand worlds, and looking for them takes a third of the time."""
    gc.disable()
    yield
    gc.enable()


def search(world_class: type[World] = World, max_depth: int = 4) -> list[Exploration]:
    return [explore(world_class(*requests), path, min(depth, max_depth)) for requests, path, depth in SEARCHES]


def search_deeper_and_deeper(world_class: type[World]) -> None:
    """What is broken shows soon, as a rule."""
    for max_depth in range(1, 5):
        search(world_class, max_depth)


def test_every_short_history_keeps_the_invariants() -> None:
    found = search()
    assert sum(exploration.num_histories for exploration in found) > 100_000
    assert set().union(*(exploration.num_by_verb for exploration in found)) == ON_P | ON_D | BETWEEN


def test_everything_is_possible_in_the_end() -> None:
    """Else the invariants would hold for want of events."""
    for readers, path, _ in SEARCHES:
        world = World(*readers)
        for op in path:
            assert op in tuple(world.ops())
            world.do(op)


# The search finds each of these rules broken.


class TableThatDoesNotSeal(LeaseTable):
    def acquire(self, request_id: str, token: str, holder: str, now: float) -> LeaseGrant | LeaseRefusal:
        self.seal(1 << 30)
        return super().acquire(request_id, token, holder, now)


class TableThatBreaksPromises(LeaseTable):
    def withdraw_all(self, now: float) -> None:
        self.expire_all()


class TableThatLetsAnyoneRelease(LeaseTable):
    def release(self, request_id: str, token: str, holder: str, now: float) -> LeaseRefusal | None:
        lease = self._leases.get(request_id)
        return super().release(request_id, token, lease.holder or holder if lease else holder, now)


class TableThatForgetsTheHolder(LeaseTable):
    def withdraw_all(self, now: float) -> None:
        for request_id, lease in self._leases.items():
            self._leases[request_id] = replace(lease, holder=None)
        super().withdraw_all(now)


class TableThatEndsTwice(LeaseTable):
    def take_ended(self) -> list[tuple[str, LeaseRefusal]]:
        ended = self._ended
        return [*ended]


class TableThatKeepsWhatWasWithdrawn(LeaseTable):
    def expire(self, now: float) -> None:
        for lease in [lease for lease in self._leases.values() if lease.expires_at <= now and not lease.withdrawn]:
            self._end(lease, LeaseRefusal.EXPIRED)


class TableThatDoesNotStartTheTermAnew(LeaseTable):
    def renew(self, request_id: str, token: str, holder: str, now: float) -> float | LeaseRefusal:
        before = self._leases.get(request_id)
        answer = super().renew(request_id, token, holder, now)
        if before is not None and request_id in self._leases:
            self._leases[request_id] = before
        return answer


class StepsInFlightAreForgotten(World):
    def seal_step(self, name: str) -> int:
        return -1


class PromiseCountsFromTheAnswer(World):
    def believe(self, answer: Answer) -> Hold:
        return Hold.since(self.now, LEASE_S)


class ReadsCountHoweverLate(World):
    def is_loaded(self, reader: Reader) -> bool:
        return reader.is_wanted


class AbortsDoNotWaitForReads(World):
    def do_give_up(self, name: str) -> None:
        reader = self.readers[name]
        if reader.dst is not None:
            self.free_on_d |= {reader.dst}
        super().do_give_up(name)


class ShutdownDoesNotWaitForReads(World):
    def do_stop_d(self) -> None:
        super().do_stop_d()
        self.free_on_d = frozenset({0, 1})


class AbortsOnPForgetTheBlock(World):
    def do_abort(self, name: str) -> None:
        super().do_abort(name)
        self.free -= {max(self.free)}


class PreemptionKeepsTheBlockToo(World):
    def do_preempt(self, name: str) -> None:
        before = self.computed[name]
        super().do_preempt(name)
        self.computed[name] = before


class ShutdownLeavesLeases(World):
    def do_stop_p(self) -> None:
        self.is_up = False


def with_table(table_class_: type[LeaseTable]) -> type[World]:
    return type(table_class_.__name__, (World,), {"table_class": table_class_})


@pytest.mark.parametrize(
    ("world_class", "invariant"),
    [
        (with_table(TableThatDoesNotSeal), "I2"),
        (with_table(TableThatBreaksPromises), "I2"),
        (with_table(TableThatLetsAnyoneRelease), "I2"),
        (with_table(TableThatForgetsTheHolder), "I2"),
        (with_table(TableThatEndsTwice), "I4"),
        (with_table(TableThatKeepsWhatWasWithdrawn), "I4"),
        (with_table(TableThatDoesNotStartTheTermAnew), "I2"),
        (StepsInFlightAreForgotten, "I2"),
        (PromiseCountsFromTheAnswer, "I2"),
        (ReadsCountHoweverLate, "I2"),
        (AbortsDoNotWaitForReads, "I3"),
        (ShutdownDoesNotWaitForReads, "I3"),
        (AbortsOnPForgetTheBlock, "I4"),
        (PreemptionKeepsTheBlockToo, "I4"),
        (ShutdownLeavesLeases, "I4"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_broken_rule_is_found(world_class: type[World], invariant: str) -> None:
    with pytest.raises(AssertionError, match=invariant):
        search_deeper_and_deeper(world_class)
