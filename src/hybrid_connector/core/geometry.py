"""Which part of which tensor does a rank hold, and where in a page?

1. ``CacheTensor``: a logical tensor with named axes and a global shape.
2. ``Box``: a half-open interval per axis, in global coordinates.
3. ``Shard``: the box a rank holds, and the byte strides that place it inside a page.
Two shards with equal boxes are replicas; nothing else says so.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class StateKind(StrEnum):
    """What a cache tensor is for; only reports distinguish the kinds, the planner never does."""

    ATTENTION = "attention"
    CONV = "conv"
    TEMPORAL = "temporal"


@dataclass(frozen=True, slots=True, order=True)
class Interval:
    """Integers from ``start`` up to, not including, ``stop``; never empty."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"interval [{self.start}, {self.stop}): expected 0 <= start < stop")

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """One interval per axis of a cache tensor."""

    intervals: tuple[Interval, ...]

    @classmethod
    def of(cls, *bounds: tuple[int, int]) -> "Box":
        """``Box.of((0, 2), (0, 32))`` is heads 0-1 of tokens 0-31."""
        return cls(tuple(Interval(start, stop) for start, stop in bounds))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(interval) for interval in self.intervals)

    @property
    def volume(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return " x ".join(map(str, self.intervals))

    def shift(self, axis: int, distance: int) -> "Box":
        """The same box, ``distance`` further along ``axis``."""
        moved = Interval(self.intervals[axis].start + distance, self.intervals[axis].stop + distance)
        return Box((*self.intervals[:axis], moved, *self.intervals[axis + 1 :]))


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes of the same rank, ``None`` where they do not meet."""
    if len(a.intervals) != len(b.intervals):
        raise ValueError(f"boxes of {len(a.intervals)} and {len(b.intervals)} axes do not compare: {a}; {b}")
    common = []
    for x, y in zip(a.intervals, b.intervals, strict=True):
        start, stop = max(x.start, y.start), min(x.stop, y.stop)
        if start >= stop:
            return None
        common.append(Interval(start, stop))
    return Box(tuple(common))


def subtract(box: Box, hole: Box) -> tuple[Box, ...]:
    """Disjoint boxes that tile ``box`` without ``hole``: at most two per axis."""
    common = intersect(box, hole)
    if common is None:
        return (box,)
    rest = []
    core = list(box.intervals)
    for axis, (whole, cut) in enumerate(zip(box.intervals, common.intervals, strict=True)):
        for start, stop in ((whole.start, cut.start), (cut.stop, whole.stop)):
            if start < stop:
                rest.append(Box((*core[:axis], Interval(start, stop), *box.intervals[axis + 1 :])))
        core[axis] = cut
    return tuple(rest)


def subtract_all(boxes: Iterable[Box], hole: Box) -> tuple[Box, ...]:
    """``subtract`` for a set of disjoint boxes."""
    return tuple(rest for box in boxes for rest in subtract(box, hole))


def nest(axes: Iterable[tuple[int, int]], item_bytes: int) -> bool:
    """Whether axes of (stride, extent) keep elements apart: each stride reaches past all that lies inside it."""
    reach = item_bytes
    for stride, extent in sorted(axes):
        if extent > 1:
            if stride < reach:
                return False
            reach += stride * (extent - 1)
    return True


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """A logical tensor of the model's cache, the same on every engine that serves the model.

    ``shape`` has one extent per axis; ``None`` marks the one axis that runs on across pages (tokens).
    ``dtype`` is the element type's name (``bfloat16``), ``item_bytes`` its size.
    """

    name: str
    kind: StateKind
    axes: tuple[str, ...]
    shape: tuple[int | None, ...]
    dtype: str
    item_bytes: int

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape) or not self.axes:
            raise ValueError(f"{self.name}: {len(self.axes)} axes {self.axes}, {len(self.shape)} extents {self.shape}")
        if self.shape.count(None) > 1 or any(extent is not None and extent <= 0 for extent in self.shape):
            raise ValueError(f"{self.name}: expected positive extents, at most one None, got {self.shape}")
        if self.item_bytes <= 0:
            raise ValueError(f"{self.name}: expected item_bytes > 0, got {self.item_bytes}")

    @property
    def paged_axis(self) -> int | None:
        """The axis that runs on across pages; ``None`` where one page holds all."""
        return self.shape.index(None) if None in self.shape else None


@dataclass(frozen=True, slots=True)
class Shard:
    """The box of ``tensor`` that one page of a rank holds.

    Element ``x`` (global coordinates) lies ``offset + sum((x[a] - box[a].start) * strides[a])`` bytes
    into the page. Along the paged axis the box starts at 0 and page ``i`` holds it shifted by ``i`` extents.
    A stride may exceed the page (head-outermost layouts); no two elements may share a byte.
    """

    tensor: CacheTensor
    box: Box
    offset: int
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        tensor = self.tensor
        if not len(tensor.axes) == len(self.box.intervals) == len(self.strides):
            raise ValueError(
                f"{tensor.name}: axes {tensor.axes}, box {self.box} and strides {self.strides} differ in rank"
            )
        for axis, extent, interval in zip(tensor.axes, tensor.shape, self.box.intervals, strict=True):
            if extent is not None and interval.stop > extent:
                raise ValueError(f"{tensor.name}: axis {axis} has {extent} elements, the shard holds {interval}")
        if (paged := tensor.paged_axis) is not None and self.box.intervals[paged].start != 0:
            raise ValueError(f"{tensor.name}: a page starts at 0 on axis {tensor.axes[paged]}, got {self.box}")
        if self.offset < 0:
            raise ValueError(f"{tensor.name}: expected offset >= 0, got {self.offset}")
        if not nest(zip(self.strides, self.box.shape, strict=True), tensor.item_bytes):
            raise ValueError(f"{tensor.name}: strides {self.strides} make elements of {self.box} overlap")

    @property
    def num_bytes(self) -> int:
        """Bytes of state in one page, padding not counted."""
        return self.box.volume * self.tensor.item_bytes

    @property
    def page_extent(self) -> int:
        """Elements of the paged axis in one page; 1 where there is no such axis."""
        paged = self.tensor.paged_axis
        return 1 if paged is None else len(self.box.intervals[paged])

    def locate(self, box: Box) -> int:
        """Byte offset into the page of the first element of ``box``, which lies inside this shard's box."""
        return self.offset + sum(
            (part.start - own.start) * stride
            for part, own, stride in zip(box.intervals, self.box.intervals, self.strides, strict=True)
        )

    def box_at(self, page: int) -> Box:
        """What page ``page`` of a request holds, in the request's coordinates along the paged axis."""
        paged = self.tensor.paged_axis
        return self.box if paged is None else self.box.shift(paged, page * self.page_extent)


def dense_shard(tensor: CacheTensor, box: Box, offset: int = 0, order: tuple[int, ...] | None = None) -> Shard:
    """A shard without gaps whose axes lie in memory as ``order`` says, outermost first (default: as named)."""
    strides = [0] * len(box.intervals)
    stride = tensor.item_bytes
    for axis in reversed(order or range(len(strides))):
        strides[axis] = stride
        stride *= len(box.intervals[axis])
    return Shard(tensor, box, offset, tuple(strides))
