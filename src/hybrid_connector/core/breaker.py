"""When is a peer that does not answer asked again, and when is a request told at once that nobody answers?

1. Closed: a question in vain is repeated after a pause that doubles from ``BACKOFF_S`` to ``BACKOFF_MAX_S``.
2. Open, once the peer was asked ``MIN_UNANSWERED`` times and was silent for as long as a request may wait: that one
   lost its whole time, the next need not. Nobody is asked for a time that doubles from ``OPEN_S`` to ``OPEN_MAX_S``.
3. Half-open after that: one question decides. An answer closes, another silence opens again.

The clock (seconds, monotonic, own process) is an argument, and so is chance.
"""

from dataclasses import dataclass

BACKOFF_S, BACKOFF_MAX_S = 0.1, 2.0
"""The longest pause is as long as the side channel takes at most to notice that a peer listens again."""

MIN_UNANSWERED = 3
"""One question is not enough: this process may have been stopped while it was out. Two are overtaken by a stall of
12 s, as seen on busy machines, with answers awaited for 5 s each."""

OPEN_S, OPEN_MAX_S = 1.0, 8.0
"""A question costs a dead peer nothing, so the bound is what a restarted one is worth: as long as that, its first
requests may still be told that nobody answers."""


@dataclass(frozen=True, slots=True)
class Breaker:
    """What one peer left unanswered since it last answered; ``Breaker()`` for nothing.

    Questions that were out together count as one. ``silent_since``: when the first was asked. ``ask_at``: when the
    next may be. ``num_openings``: 0 while closed.
    """

    num_unanswered: int = 0
    silent_since: float = float("inf")
    ask_at: float = float("-inf")
    num_openings: int = 0

    @property
    def is_open(self) -> bool:
        """Open or half-open: the last question that counted was not answered."""
        return self.num_openings > 0

    def may_ask(self, now: float) -> bool:
        return now >= self.ask_at

    def after_silence(self, asked_at: float, now: float, patience_s: float, chance: float) -> "Breaker":
        """A question was not answered. ``patience_s``: how long a request may wait. ``chance``: from 0 to 1.

        Pauses are shortened by up to half by chance, so that engines do not ask in step.
        """
        if asked_at < self.ask_at:
            return self
        before = self
        if not self.is_open and asked_at > self.ask_at + BACKOFF_MAX_S:
            before = Breaker()  # nobody asked for a while: that peer may have been well in between
        num_unanswered = before.num_unanswered + 1
        silent_since = min(before.silent_since, asked_at)
        is_open = before.is_open or (num_unanswered >= MIN_UNANSWERED and now - silent_since >= patience_s)
        num_openings = before.num_openings + is_open
        pause_s = (
            _doubled(OPEN_S, num_openings, OPEN_MAX_S)
            if is_open
            else _doubled(BACKOFF_S, num_unanswered, BACKOFF_MAX_S)
        )
        return Breaker(num_unanswered, silent_since, now + pause_s * (1 + chance) / 2, num_openings)


def _doubled(first_s: float, number: int, max_s: float) -> float:
    return min(first_s * 2.0 ** min(number - 1, 60), max_s)
