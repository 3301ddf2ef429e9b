"""How often may one asker ask?

Each asker has a bucket of credits that fills by the second up to a limit; what it asks, and what the answers weigh,
is taken from it, also below zero.
1. While there is credit, it is served.
2. In debt, it is told when to come back.
3. Deep in debt, it came back too early too often and is not told anything either.
The table holds so many buckets; the one unused for longest makes room.
"""

from collections import OrderedDict
from dataclasses import dataclass
from enum import IntEnum


class Verdict(IntEnum):
    """The higher one counts where an asker has several buckets."""

    SERVE = 0
    REFUSE = 1
    DROP = 2


@dataclass(frozen=True, slots=True)
class Rate:
    """Credits: ``per_s`` more every second, ``burst`` at most, as many of debt until nothing is answered."""

    per_s: float
    burst: float

    def __post_init__(self) -> None:
        if not (self.per_s > 0 and self.burst > 0):
            raise ValueError(f"expected a rate and a burst > 0, got {self.per_s} and {self.burst}")


class Pace:
    """The buckets of all askers of one kind, at most ``max_askers``. Not thread-safe."""

    def __init__(self, rate: Rate, max_askers: int = 4096) -> None:
        self._rate = rate
        self._max_askers = max_askers
        self._buckets: OrderedDict[object, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def judge(self, asker: object, now: float) -> Verdict:
        """What becomes of a question that comes now; it costs one credit, whatever becomes of it."""
        left = self.charge(asker, 1, now)
        if left > -1e-9:  # rounding
            return Verdict.SERVE
        return Verdict.REFUSE if left >= -self._rate.burst else Verdict.DROP

    def charge(self, asker: object, cost: float, now: float) -> float:
        """Take ``cost`` from the asker's bucket; returns what is left. The debt is at most twice the burst."""
        credit, at = self._buckets.pop(asker, (self._rate.burst, now))
        credit = min(self._rate.burst, credit + (now - at) * self._rate.per_s)
        credit = max(credit - cost, -2 * self._rate.burst)
        self._buckets[asker] = credit, now
        if len(self._buckets) > self._max_askers:
            self._buckets.popitem(last=False)
        return credit

    def wait_s(self, asker: object, now: float) -> float:
        """Seconds until the asker has credit again."""
        return max(0.0, 1 - self.charge(asker, 0, now)) / self._rate.per_s
