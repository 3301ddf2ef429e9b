"""How long does a read take, and is it cheaper to read the runs or the whole pages that contain them?

1. ``Cost``: seconds of a read from its descriptors and bytes; ``DEFAULTS`` by transport, ``SCATTER`` by memory.
2. ``Estimate``: a cost fitted to the transfers that completed with one peer.
3. ``cheapest``: *direct* runs, or *staged* whole pages and a local scatter; ``choose`` for what a request reads.

A straight line is enough for the choice, not for the last per cent: NIXL merges neighbours, and pieces from about
1 MiB on move faster than short ones by more than their descriptors cost.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hybrid_connector.core.errors import ConfigError
from hybrid_connector.transport.binding import BoundPart

Staging = Literal["auto", "never", "always"]
"""Whether whole pages are read where that is cheaper, never, or wherever pages can be read whole."""

_FACTOR = 1000.0
"""How far a fitted figure may be from the one it started with, up or down."""

_PRIOR_WEIGHT = 1e-4
"""What the starting figures count for, in transfers: they decide only what the transfers leave open."""

_TOLERANCE = 0.25
"""Relative error up to which a transfer counts in full; beyond it, the less the further it is off."""

_ROUNDS = 12

MARGIN = 0.8
"""Staged must be that much cheaper: the model is no better than this, and staging moves bytes that nobody wants."""


@dataclass(frozen=True, slots=True)
class Cost:
    """``base_s + num_descriptors * per_descriptor_s + num_bytes / bytes_per_s``."""

    base_s: float
    per_descriptor_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (self.base_s >= 0 and self.per_descriptor_s >= 0 and self.bytes_per_s > 0):
            raise ValueError(f"expected base_s and per_descriptor_s >= 0, bytes_per_s > 0, got {self}")

    def seconds(self, num_descriptors: int, num_bytes: int) -> float:
        """The time of one read; nothing takes no time."""
        if num_descriptors == 0:
            return 0.0
        return self.base_s + num_descriptors * self.per_descriptor_s + num_bytes / self.bytes_per_s

    @classmethod
    def parse(cls, text: str) -> "Cost":
        """``"20,3.2,240"``: microseconds at all, microseconds a descriptor, gigabytes (1e9) a second.

        Raises ``ConfigError`` for anything else.
        """
        try:
            base_us, per_descriptor_us, gb_per_s = map(float, text.split(","))
            return cls(base_us * 1e-6, per_descriptor_us * 1e-6, gb_per_s * 1e9)
        except ValueError as error:
            raise ConfigError(
                f"expected three numbers, microseconds, microseconds per descriptor and GB/s, as in 20,3.2,240; "
                f"got {text!r}"
            ) from error

    def __str__(self) -> str:
        return (
            f"{self.base_s * 1e6:.3g} us + {self.per_descriptor_s * 1e6:.3g} us per descriptor, "
            f"{self.bytes_per_s / 1e9:.3g} GB/s"
        )


DEFAULTS: Mapping[str, Cost] = {
    "cuda_ipc": Cost(100e-6, 3.2e-6, 240e9),
    "rdma": Cost(30e-6, 0.5e-6, 45e9),
    "tcp": Cost(100e-6, 5e-6, 0.45e9),
    "shared_memory": Cost(30e-6, 3e-6, 10e9),
}
"""Where an estimate starts, by transport.

``cuda_ipc``: two H200s with NVLink, 2,944 and 4,096 descriptors in 9.96 and 15.4 ms, 92 and 161 whole pages in 1.8 and
3.15 ms. ``tcp`` and ``shared_memory``: one machine of two cores over loopback, a first run of
``integration/benchmarks/cost_grid.py``; the one that is recorded in docs/performance came after it. ``rdma``: not
measured, nine tenths of the line rate of one 400 Gb/s port.
"""

START: Mapping[str, str] = {"VRAM": "cuda_ipc", "DRAM": "shared_memory"}
"""The transport whose figures an estimate starts with where nobody names one, by memory: both engines on one host."""

SCATTER: Mapping[str, Cost] = {"VRAM": Cost(20e-6, 0.0, 450e9), "DRAM": Cost(5e-6, 0.5e-6, 14e9)}
"""Of bringing staged runs to their places, by memory; bytes count once, as useful bytes. ``VRAM``: 184 MiB in 0.45 ms
on an H200. ``DRAM``: `HostScatter` on two cores, runs of 256 bytes to 2 MiB.
"""


@dataclass(frozen=True, slots=True)
class Read:
    """What a read consists of."""

    num_descriptors: int
    num_bytes: int

    def __add__(self, other: "Read") -> "Read":
        return Read(self.num_descriptors + other.num_descriptors, self.num_bytes + other.num_bytes)


@dataclass(frozen=True, slots=True)
class Choice:
    """Both ways' seconds. ``staged_s`` includes the scatter; ``None`` where there is nothing to stage."""

    direct_s: float
    staged_s: float | None

    @property
    def is_staged(self) -> bool:
        return self.staged_s is not None and self.staged_s < MARGIN * self.direct_s

    @property
    def seconds(self) -> float:
        """Of the way that is chosen."""
        return self.staged_s if self.staged_s is not None and self.is_staged else self.direct_s


def cheapest(direct: Read, staged: Read | None, transfer: Cost, scatter: Cost) -> Choice:
    """Weigh the runs of ``direct`` against the whole pages of ``staged`` that contain them.

    Staged, every run is then copied once more, on this side: ``scatter`` of the direct runs and bytes.
    """
    direct_s = transfer.seconds(direct.num_descriptors, direct.num_bytes)
    if staged is None:
        return Choice(direct_s, None)
    return Choice(
        direct_s,
        transfer.seconds(staged.num_descriptors, staged.num_bytes)
        + scatter.seconds(direct.num_descriptors, direct.num_bytes),
    )


@dataclass(frozen=True, slots=True)
class Weighed:
    """A part of a request's reads, both ways. ``staged``: ``None`` where whole pages are no fewer, or none are read."""

    direct: Read
    staged: Read | None
    choice: Choice
    is_staged: bool


def choose(part: BoundPart, transfer: Cost, scatter: Cost, staging: Staging = "auto") -> Weighed:
    """How ``part`` is read: the engine does what this says, and ``explain`` prints it."""
    direct = Read(len(part.copies), part.copies.total_bytes)
    pages = part.pages() if staging != "never" else None
    staged = None if pages is None else Read(len(pages), pages.total_bytes)
    if staging != "always" and staged is not None and staged.num_descriptors >= direct.num_descriptors:
        staged = None
    choice = cheapest(direct, staged, transfer, scatter)
    return Weighed(direct, staged, choice, staged is not None and (staging == "always" or choice.is_staged))


def is_staged(part: BoundPart, transfer: Cost, scatter: Cost, staging: Staging = "auto") -> bool:
    """What ``choose`` says, without counting pages where no number of them could be cheaper: the engine's short cut.

    Whole pages save descriptors at most, and cost a scatter at least.
    """
    if not part.can_stage:
        return False
    direct = Read(len(part.copies), part.copies.total_bytes)
    saved_s = direct.num_descriptors * transfer.per_descriptor_s
    if staging == "auto" and saved_s <= scatter.seconds(direct.num_descriptors, direct.num_bytes):
        return False
    return choose(part, transfer, scatter, staging).is_staged


Floats = NDArray[np.float64]


class Estimate:
    """A cost that follows the transfers of one peer.

    Weighted least squares of the relative error over the last ``window`` transfers; the weight falls by half every
    ``half_life`` transfers, and with the error of a transfer beyond a tolerance, so that a machine that stood still
    tells nothing. Refitted when asked for, first after ``refit_every`` new transfers, then after twice as many each
    time, up to a window full of them: a fit of 256 takes 1 ms. Not thread-safe.
    """

    def __init__(self, start: Cost, *, window: int = 256, half_life: float = 64.0, refit_every: int = 1) -> None:
        self._start = start
        self._half_life = half_life
        self._seen: deque[tuple[int, int, float]] = deque(maxlen=window)
        self._cost = start
        self._refit_every = refit_every
        self._num_new = 0

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, num_descriptors: int, num_bytes: int, seconds: float) -> None:
        """A transfer that completed; one without descriptors or time says nothing and is left out."""
        if num_descriptors > 0 and num_bytes > 0 and seconds > 0:
            self._seen.append((num_descriptors, num_bytes, seconds))
            self._num_new += 1

    @property
    def cost(self) -> Cost:
        """What the transfers so far say; the starting figures before the first."""
        if self._num_new >= self._refit_every:
            self._cost = fit(self._start, self._seen, half_life=self._half_life)
            self._num_new = 0
            self._refit_every = min(2 * self._refit_every, self._seen.maxlen or 1)
        return self._cost


def fit(start: Cost, transfers: Sequence[tuple[int, int, float]] | deque[Any], *, half_life: float = 64.0) -> Cost:
    """The cost that (descriptors, bytes, seconds) show, newest last; ``start`` fills in what they leave open.

    Figures are fitted as factors on ``start``, each within 1/1000 and 1000.
    """
    seen = np.array(transfers, dtype=np.float64)
    scale = np.array([max(start.base_s, 1e-6), max(start.per_descriptor_s, 1e-9), 1 / start.bytes_per_s])
    # Row i: the parts of what ``start`` predicts for transfer i, as shares of what it took.
    parts = np.column_stack((np.ones(len(seen)), seen[:, 0], seen[:, 1])) * scale / seen[:, 2:]
    level = 1 / float(np.median(parts.sum(axis=1)))
    age = np.arange(len(seen))[::-1]
    recency = 0.5 ** (age / half_life)
    centre = np.clip(np.full(3, level), 1 / _FACTOR, _FACTOR)
    factors = centre
    for _ in range(_ROUNDS):
        error = np.abs(parts @ factors - 1)
        weight = recency * np.minimum(1, _TOLERANCE / np.maximum(error, 1e-12)) ** 2
        factors = _least_squares(parts, weight, centre)
    base_s, per_descriptor_s, per_byte_s = factors * scale
    return Cost(float(base_s), float(per_descriptor_s), float(1 / per_byte_s))


def _least_squares(parts: Floats, weight: Floats, centre: Floats) -> Floats:
    """Factors that bring ``parts @ factors`` to 1, near ``centre`` where the rows do not say, within the bounds.

    A figure that would leave its bounds is set to the bound and the others are solved again.
    """
    normal = (parts * weight[:, None]).T @ parts + np.diag(_PRIOR_WEIGHT / centre**2)
    right = parts.T @ weight + _PRIOR_WEIGHT / centre
    low, high = 1 / _FACTOR, _FACTOR
    factors = centre.copy()
    free = np.ones(3, dtype=bool)
    while free.any():
        held = ~free
        solved = np.linalg.solve(normal[np.ix_(free, free)], right[free] - normal[np.ix_(free, held)] @ factors[held])
        outside = (solved < low) | (solved > high)
        factors[free] = np.clip(solved, low, high)
        if not outside.any():
            break
        free[np.flatnonzero(free)[outside]] = False
    return factors
