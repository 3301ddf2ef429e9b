"""Who may ask how often, and do honest engines ever feel it?"""

import random

import pytest

from hybrid_connector.core.pace import Pace, Rate, Verdict
from hybrid_connector.wire.server import ADDRESS_RATE, CLIENT_RATE, Limits

from refusals import refused


@pytest.mark.parametrize(("per_s", "burst"), [(0, 1), (-1, 1), (1, 0), (float("nan"), 1)])
def test_a_rate_lets_something_through(per_s: float, burst: float) -> None:
    with refused(f"expected a rate and a burst > 0, got {per_s} and {burst}"):
        Rate(per_s, burst)


def test_a_burst_then_as_much_as_flows_back() -> None:
    pace = Pace(Rate(10, 5))
    assert [pace.judge("a", 0.0) for _ in range(6)] == [Verdict.SERVE] * 5 + [Verdict.REFUSE]
    assert pace.wait_s("a", 0.0) == pytest.approx(0.2)
    assert pace.judge("a", 0.2) is Verdict.SERVE
    assert pace.judge("b", 0.0) is Verdict.SERVE


def test_who_comes_back_when_told_is_served() -> None:
    pace, now = Pace(Rate(10, 5)), 0.0
    for _ in range(50):
        while pace.judge("a", now) is Verdict.SERVE:
            pass
        now += pace.wait_s("a", now)
        assert pace.judge("a", now) is Verdict.SERVE


def test_who_does_not_is_dropped_and_recovers_in_a_bounded_time() -> None:
    pace = Pace(Rate(10, 5))
    verdicts = [pace.judge("a", 0.0) for _ in range(1000)]
    assert verdicts == sorted(verdicts)
    assert (verdicts.count(Verdict.SERVE), verdicts.count(Verdict.REFUSE)) == (5, 5)
    assert pace.judge("a", 1.2) is Verdict.SERVE


def test_large_answers_are_paid_for_later() -> None:
    pace = Pace(Rate(10, 5))
    assert pace.judge("a", 0.0) is Verdict.SERVE
    pace.charge("a", 8, 0.0)
    assert pace.judge("a", 0.1) is Verdict.REFUSE
    assert pace.judge("a", 0.8) is Verdict.SERVE


def test_the_table_is_bounded_and_forgets_who_was_quiet_for_longest() -> None:
    pace = Pace(Rate(1, 1), max_askers=100)
    for i in range(1000):
        pace.judge(i, float(i) * 1e-6)
        pace.judge("busy", float(i) * 1e-6)
    assert len(pace) == 100
    assert pace.judge("busy", 1e-3) is Verdict.DROP
    assert pace.judge(1, 1e-3) is Verdict.SERVE


def test_64_engines_with_512_requests_each_never_hit_the_limits() -> None:
    """All behind one address: they get a manifest of 4 MiB, want everything at once, renew, and end at once.

    Each engine's renewals come in one burst per 10 s; a tenth of the grants is "not sealed yet" up to ten times.
    """
    clients, address = Pace(CLIENT_RATE), Pace(ADDRESS_RATE)
    hello_cost = 4 * 2**20 // Limits().bytes_per_credit
    dice = random.Random(1)

    def ask(engine: int, now: float, weight: int = 0) -> None:
        assert clients.judge(engine, now) is address.judge("10.0.0.1", now) is Verdict.SERVE
        clients.charge(engine, weight, now)
        address.charge("10.0.0.1", weight, now)

    for engine in range(64):
        ask(engine, 0.0, hello_cost)
    for engine in range(64):
        for request in range(512):
            ask(engine, 0.1)
            for retry in range(10 if request % 10 == 0 else 0):
                ask(engine, 0.1 + 0.005 * retry)
    for start in (10.0, 20.0):
        for engine in sorted(range(64), key=lambda _: dice.random()):
            for _ in range(512):
                ask(engine, start + engine / 64)
    for engine in range(64):
        for _ in range(512):
            ask(engine, 25.0)
