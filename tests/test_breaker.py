"""When is a silent peer asked again, and when is it given up for a while?"""

import pytest

from hybrid_connector.core.breaker import BACKOFF_MAX_S, BACKOFF_S, MIN_UNANSWERED, OPEN_MAX_S, OPEN_S, Breaker

PATIENCE_S = 20.0
TIMEOUT_S = 5.0


def ask_in_vain(breaker: Breaker, now: float, chance: float = 1.0, took_s: float = TIMEOUT_S) -> tuple[Breaker, float]:
    """Ask as soon as it may be, and wait for the answer that does not come."""
    asked_at = max(now, breaker.ask_at)
    return breaker.after_silence(asked_at, asked_at + took_s, PATIENCE_S, chance), asked_at + took_s


def opened(chance: float = 1.0) -> tuple[Breaker, float]:
    breaker, now = Breaker(), 0.0
    while not breaker.is_open:
        breaker, now = ask_in_vain(breaker, now, chance)
    return breaker, now


def test_a_peer_of_which_nothing_is_known_may_be_asked() -> None:
    assert Breaker().may_ask(0.0)
    assert not Breaker().is_open


def test_pauses_double_up_to_a_bound() -> None:
    breaker, now, pauses = Breaker(), 0.0, []
    for _ in range(7):
        breaker, now = ask_in_vain(breaker, now, took_s=0.0)
        assert not breaker.may_ask(now)
        assert not breaker.is_open
        pauses.append(breaker.ask_at - now)
    assert pauses == pytest.approx([BACKOFF_S, 0.2, 0.4, 0.8, 1.6, BACKOFF_MAX_S, BACKOFF_MAX_S])


@pytest.mark.parametrize("chance", [0.0, 0.5, 0.999])
def test_chance_shortens_a_pause_by_up_to_half(chance: float) -> None:
    breaker, now = ask_in_vain(Breaker(), 100.0, chance)
    assert breaker.ask_at - now == pytest.approx(BACKOFF_S * (1 + chance) / 2)
    breaker, now = opened(chance)
    assert breaker.ask_at - now == pytest.approx(OPEN_S * (1 + chance) / 2)


def test_questions_that_were_out_together_count_as_one() -> None:
    breaker = Breaker()
    for asked_at in (0.0, 0.1, 1.0, 5.05):
        breaker = breaker.after_silence(asked_at, 5.0 + asked_at / 10, PATIENCE_S, 1.0)
    assert breaker == Breaker(1, 0.0, 5.0 + BACKOFF_S)


def test_it_opens_after_the_time_that_a_request_may_wait() -> None:
    breaker, now = opened()
    assert (breaker.num_unanswered, breaker.silent_since) == (4, 0.0)
    assert PATIENCE_S <= now < PATIENCE_S + TIMEOUT_S


def test_a_stall_of_this_process_is_not_a_silence_of_all_peers() -> None:
    """It was stopped for an hour while two questions were out, one after the other."""
    breaker = Breaker()
    for asked_at in (0.0, 3600.5):
        breaker = breaker.after_silence(asked_at, asked_at + 3600.0, PATIENCE_S, 1.0)
        assert not breaker.is_open
    assert MIN_UNANSWERED > 2


def test_silences_with_quiet_times_between_do_not_add_up() -> None:
    breaker, now = Breaker(), 0.0
    for _ in range(20):
        for _ in range(3):
            breaker, now = ask_in_vain(breaker, now)
            assert not breaker.is_open
        now += BACKOFF_MAX_S + BACKOFF_S * 8


def test_openings_double_up_to_a_bound() -> None:
    breaker, now = opened()
    pauses = []
    for _ in range(6):
        pauses.append(breaker.ask_at - now)
        assert breaker.is_open
        assert not breaker.may_ask(now)
        assert breaker.may_ask(breaker.ask_at)
        breaker, now = ask_in_vain(breaker, now)
    assert pauses == pytest.approx([OPEN_S, 2.0, 4.0, OPEN_MAX_S, OPEN_MAX_S, OPEN_MAX_S])
    assert breaker.num_openings == 7


def test_only_a_question_of_after_the_opening_opens_again() -> None:
    breaker, now = opened()
    assert breaker.after_silence(now - 1.0, now + 0.5, PATIENCE_S, 1.0) == breaker
    half_open_at = breaker.ask_at
    again = breaker.after_silence(half_open_at, half_open_at + TIMEOUT_S, PATIENCE_S, 1.0)
    assert again.num_openings == 2
    assert again.after_silence(half_open_at + 0.1, half_open_at + TIMEOUT_S + 0.1, PATIENCE_S, 1.0) == again


def test_it_stays_open_however_late_the_next_question_is() -> None:
    breaker, now = opened()
    assert breaker.after_silence(now + 1000.0, now + 1005.0, PATIENCE_S, 1.0).num_openings == 2


def test_a_very_long_silence_overflows_nothing() -> None:
    breaker, now = Breaker(), 0.0
    for _ in range(3000):
        breaker, now = ask_in_vain(breaker, now)
    assert breaker.ask_at - now == pytest.approx(OPEN_MAX_S)
