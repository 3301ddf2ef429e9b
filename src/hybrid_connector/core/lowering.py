"""Which bytes move for a box that both sides hold?

1. Order the axes from the widest to the narrowest stride.
2. Fold axes from the inside while both sides continue without a gap: what is left is one run and its loops.
3. ``expand`` lists the runs; ``merge`` joins those that touch on both sides.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hybrid_connector.core.geometry import Box, Shard


@dataclass(frozen=True, slots=True)
class Loop:
    """Repeat ``extent`` times, that many bytes further on each side each time."""

    extent: int
    src_stride: int
    dst_stride: int


@dataclass(frozen=True, slots=True)
class Copy:
    """A strided byte copy between two pages: one run, repeated by ``loops``, outermost first."""

    src_offset: int
    dst_offset: int
    run_bytes: int
    loops: tuple[Loop, ...] = ()


@dataclass(frozen=True, slots=True, order=True)
class Run:
    """A contiguous range on both sides. Pages count from the start of a period, offsets from the page's start."""

    dst_page: int
    dst_offset: int
    src_page: int
    src_offset: int
    num_bytes: int


def lower(src: Shard, src_box: Box, dst: Shard, dst_box: Box) -> Copy:
    """The byte copy that fills ``dst_box`` of ``dst`` from ``src_box`` of ``src``.

    Both boxes have the same shape; each is in its own shard's page coordinates.
    """
    if src_box.shape != dst_box.shape:
        raise ValueError(f"{dst.tensor.name}: boxes of different shape: {src_box}; {dst_box}")
    axes = sorted(
        (
            (dst_stride, src_stride, extent)
            for extent, src_stride, dst_stride in zip(dst_box.shape, src.strides, dst.strides, strict=True)
            if extent > 1
        ),
    )
    run_bytes = dst.tensor.item_bytes
    inner = 0
    for dst_stride, src_stride, extent in axes:
        if not dst_stride == src_stride == run_bytes:
            break
        run_bytes *= extent
        inner += 1
    loops = tuple(Loop(extent, src_stride, dst_stride) for dst_stride, src_stride, extent in reversed(axes[inner:]))
    return Copy(src.locate(src_box), dst.locate(dst_box), run_bytes, loops)


def expand(copy: Copy, src_page: int, dst_page: int) -> Iterator[Run]:
    """Every run of ``copy`` between the two pages."""
    for index in itertools.product(*(range(loop.extent) for loop in copy.loops)):
        yield Run(
            dst_page,
            copy.dst_offset + sum(i * loop.dst_stride for i, loop in zip(index, copy.loops, strict=True)),
            src_page,
            copy.src_offset + sum(i * loop.src_stride for i, loop in zip(index, copy.loops, strict=True)),
            copy.run_bytes,
        )


def merge(runs: Iterable[Run]) -> tuple[Run, ...]:
    """The same bytes in the fewest runs: neighbours that touch on both sides of one page pair become one."""
    merged: list[Run] = []
    for run in sorted(runs):
        last = merged[-1] if merged else None
        if (
            last is not None
            and (last.dst_page, last.src_page) == (run.dst_page, run.src_page)
            and last.dst_offset + last.num_bytes == run.dst_offset
            and last.src_offset + last.num_bytes == run.src_offset
        ):
            merged[-1] = Run(
                last.dst_page, last.dst_offset, last.src_page, last.src_offset, last.num_bytes + run.num_bytes
            )
        else:
            merged.append(run)
    return tuple(merged)
