"""Which byte of the model's state lies at each address, said without the planner?

1. ``identities``: for every byte of a rank's region, which byte of the model it is, or that it is no state.
2. ``follow``: what arrives when byte ranges are copied, and how often each address was written.

Addresses follow the formulas in the docstrings of ``Shard`` and ``blocks``. Nothing here calls ``locate``, ``box_at``,
``intersect``, ``lower``, the planner or the binder. ``tests/oracle.py`` says the same in plain Python, byte by byte.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from hybrid_connector.core.blocks import Group, RankLayout
from hybrid_connector.core.geometry import CacheTensor, Shard

Ints = NDArray[np.int64]

NO_STATE = -1
PLACE_BITS = 32
"""An identity is the tensor's number, then the byte's place in the tensor, which has this many bits."""


@dataclass(frozen=True, slots=True, eq=False)
class Ranges:
    """Byte ranges to copy from one P rank: ``num_bytes[i]`` from ``src[i]`` to ``dst[i]``, offsets into the regions."""

    src_rank: int
    src: Ints
    dst: Ints
    num_bytes: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """What lies in D's region after copies: an identity and a number of writes per byte."""

    identities: Ints
    writes: Ints


def steps(tensor: CacheTensor) -> tuple[int, ...]:
    """Places from one coordinate to the next, per axis: bytes in order of the coordinate, the paged axis outermost."""
    found = [0] * len(tensor.axes)
    step = tensor.item_bytes
    for axis in sorted(range(len(found)), key=lambda axis: (tensor.shape[axis] is None, -axis)):
        found[axis] = step
        step *= tensor.shape[axis] or 1
    return tuple(found)


@cache
def cells(shard: Shard) -> tuple[Ints, Ints]:
    """Of page 0: offset into the page and place in the tensor of every byte."""
    offset, place = np.array(shard.offset, np.int64), np.array(0, np.int64)
    for interval, stride, step in zip(shard.box.intervals, shard.strides, steps(shard.tensor), strict=True):
        along = np.arange(interval.stop - interval.start, dtype=np.int64)
        offset = offset[..., None] + along * stride
        place = place[..., None] + (along + interval.start) * step
    item = np.arange(shard.tensor.item_bytes, dtype=np.int64)
    return (offset[..., None] + item).ravel(), (place[..., None] + item).ravel()


def identities(
    layout: RankLayout, numbers: Mapping[str, int], blocks: Sequence[Sequence[int]], num_pages: Sequence[int]
) -> Ints:
    """What each byte of the region is when the first ``num_pages`` pages of each group hold a request's state.

    ``numbers``: of the tensors. ``blocks``: the request's logical blocks, per group.
    """
    region = np.full(layout.region_bytes, NO_STATE, np.int64)
    for layer in layout.layers:
        group = layout.groups[layer.group]
        pages = _region_pages(group, blocks[layer.group])[: num_pages[layer.group]]
        starts = layer.offset + pages * layer.page_stride
        for shard in layer.shards:
            offset, place = cells(shard)
            paged = [i for i, extent in enumerate(shard.tensor.shape) if extent is None]
            tokens = shard.box.shape[paged[0]] * steps(shard.tensor)[paged[0]] if paged else 0
            identity = (numbers[shard.tensor.name] << PLACE_BITS) + place
            region[starts[:, None] + offset] = identity + np.arange(len(pages))[:, None] * tokens
    return region


def _region_pages(group: Group, blocks: Sequence[int]) -> Ints:
    """The pages of logical blocks, counted from page 0 of a layer."""
    ratio = group.pages_per_block
    return (np.array(blocks, np.int64)[:, None] * ratio + np.arange(ratio)).ravel()


def follow(ranges: Iterable[Ranges], srcs: Mapping[int, Ints], region_bytes: int) -> Arrival:
    """Copy identities as ``ranges`` say. ``srcs``: the identities of each P rank.

    A range that leaves a region raises ``IndexError``.
    """
    arrived = np.full(region_bytes, NO_STATE, np.int64)
    writes = np.zeros(region_bytes, np.int64)
    for copies in ranges:
        within = np.arange(int(copies.num_bytes.sum())) - np.repeat(
            np.cumsum(copies.num_bytes) - copies.num_bytes, copies.num_bytes
        )
        src = np.repeat(copies.src, copies.num_bytes) + within
        dst = np.repeat(copies.dst, copies.num_bytes) + within
        if src.size and min(src.min(), dst.min()) < 0:
            raise IndexError(f"P rank {copies.src_rank}: a range starts before its region")
        arrived[dst] = srcs[copies.src_rank][src]
        writes += np.bincount(dst, minlength=region_bytes)
    return Arrival(arrived, writes)
