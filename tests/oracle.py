"""What must lie in D's memory after a transfer, said without the planner?

1. ``stream``: the bytes of a cache tensor by global coordinate; no two places are likely to agree.
2. ``prefilled``: P's memory, noise everywhere but in the request's pages.
3. ``expected``: D's memory after a right transfer: noise but for the slots that P's pages hold.
4. ``execute``: D's memory after a plan, byte for byte, and how often each byte was written.
5. ``differences``: where 3 and 4 disagree.

Addresses follow the formulas in the docstrings of ``Shard`` and ``blocks``; nothing here calls ``lower``, ``locate``,
``box_at``, ``intersect`` or the planner. ``fewest_runs`` counts runs by walking D's bytes in order.
"""

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from hybrid_connector.core.blocks import Group, Layer, RankLayout
from hybrid_connector.core.geometry import CacheTensor, Shard
from hybrid_connector.core.planning import Plan

COUNT_ONE_MORE = bytes(min(count + 1, 255) for count in range(256))


@dataclass(frozen=True, slots=True)
class Request:
    """A request's blocks on both sides, per group; D already holds its first ``cached_tokens`` tokens."""

    num_tokens: int
    src_blocks: tuple[tuple[int, ...], ...]
    dst_blocks: tuple[tuple[int, ...], ...]
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Memory:
    """A rank's region, and how often each of its bytes was (or must be) written."""

    data: bytes
    counts: bytes


@cache
def noise(name: str, num_bytes: int) -> bytes:
    return hashlib.shake_128(name.encode()).digest(num_bytes)


@cache
def stream(tensor: str, num_bytes: int) -> bytes:
    """The first bytes of a tensor, elements in order of their global coordinate, the paged axis outermost."""
    return hashlib.shake_128(f"tensor {tensor}".encode()).digest(num_bytes)


@cache
def weights(tensor: CacheTensor) -> tuple[int, ...]:
    """Bytes of ``stream`` from one coordinate to the next, per axis."""
    steps = [0] * len(tensor.axes)
    step = tensor.item_bytes
    paged = tensor.shape.index(None) if None in tensor.shape else None
    for axis in reversed(range(len(steps))):
        if (extent := tensor.shape[axis]) is not None:
            steps[axis] = step
            step *= extent
    if paged is not None:
        steps[paged] = step
    return tuple(steps)


@cache
def elements(shard: Shard) -> tuple[tuple[int, int], ...]:
    """Of page 0: where each element lies in the page, and where in its tensor's stream. In bytes."""
    steps = weights(shard.tensor)
    starts = [interval.start for interval in shard.box.intervals]
    return tuple(
        (
            shard.offset
            + sum((x - start) * stride for x, start, stride in zip(index, starts, shard.strides, strict=True)),
            sum(x * step for x, step in zip(index, steps, strict=True)),
        )
        for index in itertools.product(*(range(i.start, i.stop) for i in shard.box.intervals))
    )


def num_pages(group: Group, num_tokens: int) -> int:
    return 1 if group.page_tokens is None else math.ceil(num_tokens / group.page_tokens)


def first_page(group: Group, request: Request) -> int:
    """The first D page that must come from P; a recurrent state always comes as a whole."""
    return 0 if group.page_tokens is None else request.cached_tokens // group.page_tokens


def region_pages(group: Group, block_ids: Sequence[int], num_tokens: int) -> list[int]:
    """The request's pages, counted from page 0 of the region."""
    return [
        block_ids[page // group.pages_per_block] * group.pages_per_block + page % group.pages_per_block
        for page in range(num_pages(group, num_tokens))
    ]


def page_bytes(tensor: CacheTensor, group: Group) -> int:
    """Bytes of the tensor's stream in one page, all ranks together."""
    extents = [extent for extent in tensor.shape if extent is not None]
    return math.prod(extents) * (group.page_tokens or 1) * tensor.item_bytes


def _cells(
    layout: RankLayout, blocks: Sequence[Sequence[int]], num_tokens: int
) -> Iterator[tuple[str, int, int, int, int]]:
    """Every element that the request's pages hold: tensor, page, address, place in the stream, bytes."""
    for layer in layout.layers:
        group = layout.groups[layer.group]
        for shard in layer.shards:
            tensor = shard.tensor
            step = page_bytes(tensor, group)
            for page, number in enumerate(region_pages(group, blocks[layer.group], num_tokens)):
                start = layer.offset + number * layer.page_stride
                for address, place in elements(shard):
                    yield tensor.name, page, start + address, place + page * step, tensor.item_bytes


def _streams(layout: RankLayout, num_tokens: int) -> dict[str, bytes]:
    """What the request's pages hold of each tensor, all ranks together."""
    held = {}
    for layer in layout.layers:
        group = layout.groups[layer.group]
        for shard in layer.shards:
            size = num_pages(group, num_tokens) * page_bytes(shard.tensor, group)
            held[shard.tensor.name] = stream(shard.tensor.name, size)
    return held


@cache
def prefilled(layout: RankLayout, request: Request) -> bytes:
    """The region of P's rank: the request's pages hold its state, every other byte is noise."""
    region = bytearray(noise(f"P {layout.rank}", layout.region_bytes))
    held = _streams(layout, request.num_tokens)
    for name, _, address, place, size in _cells(layout, request.src_blocks, request.num_tokens):
        region[address : address + size] = held[name][place : place + size]
    return bytes(region)


def expected(dst: RankLayout, srcs: Sequence[RankLayout], request: Request) -> Memory:
    """D's rank after the transfer: every slot that a page of P holds, from D's first uncached page on."""
    held: dict[str, bytes] = {}
    for src in srcs:
        held |= _streams(src, request.num_tokens)
    first = {
        shard.tensor.name: first_page(dst.groups[layer.group], request)
        for layer in dst.layers
        for shard in layer.shards
    }
    region = bytearray(noise(f"D {dst.rank}", dst.region_bytes))
    counts = bytearray(dst.region_bytes)
    for name, page, address, place, size in _cells(dst, request.dst_blocks, request.num_tokens):
        if page >= first[name] and place < len(held[name]):
            region[address : address + size] = held[name][place : place + size]
            counts[address : address + size] = b"\x01" * size
    return Memory(bytes(region), bytes(counts))


def execute(
    plan: Plan, dst: RankLayout, srcs: Sequence[RankLayout], request: Request, regions: Sequence[bytes]
) -> Memory:
    """D's rank after ``plan`` read from P's ``regions`` (one per rank of ``srcs``)."""
    region = bytearray(noise(f"D {dst.rank}", dst.region_bytes))
    counts = bytearray(dst.region_bytes)
    by_rank = {src.rank: (src, data) for src, data in zip(srcs, regions, strict=True)}
    for copies in plan.copies:
        src, data = by_rank[copies.src_rank]
        src_group, dst_group = src.groups[copies.src_group], dst.groups[copies.dst_group]
        src_pages = region_pages(src_group, request.src_blocks[copies.src_group], request.num_tokens)
        dst_pages = region_pages(dst_group, request.dst_blocks[copies.dst_group], request.num_tokens)
        for period in range(math.ceil(len(dst_pages) / copies.dst_pages)):
            for run in copies.runs:
                src_page = period * copies.src_pages + run.src_page
                dst_page = period * copies.dst_pages + run.dst_page
                if src_page >= len(src_pages) or not first_page(dst_group, request) <= dst_page < len(dst_pages):
                    continue
                for pair in copies.layers:
                    a = pair.src_offset + src_pages[src_page] * pair.src_page_stride + run.src_offset
                    b = pair.dst_offset + dst_pages[dst_page] * pair.dst_page_stride + run.dst_offset
                    a_stop, b_stop = a + run.num_bytes, b + run.num_bytes
                    if not (0 <= a < a_stop <= len(data) and 0 <= b < b_stop <= len(region)):
                        raise IndexError(f"{run} leaves a region: P {a} of {len(data)}, D {b} of {len(region)}")
                    region[b:b_stop] = data[a:a_stop]
                    counts[b:b_stop] = counts[b:b_stop].translate(COUNT_ONE_MORE)
    return Memory(bytes(region), bytes(counts))


def differences(got: Memory, want: Memory) -> list[str]:
    """What is wrong with ``got``, one line a kind, with the first byte where it shows; nothing where all is right."""
    if got == want:
        return []
    wrong: dict[str, list[int]] = {}
    for address, (byte, count, right, times) in enumerate(
        zip(got.data, got.counts, want.data, want.counts, strict=True)
    ):
        if count > 1:
            wrong.setdefault("written more than once", []).append(address)
        if times and not count:
            wrong.setdefault("never written", []).append(address)
        if count and not times:
            wrong.setdefault("written, but padding, cached or foreign", []).append(address)
        if count and times and byte != right:
            wrong.setdefault("not the byte of this coordinate", []).append(address)
    return [f"{what}: {len(places)} bytes, first at {places[0]}" for what, places in wrong.items()]


def wrong_in(
    dsts: Sequence[RankLayout], received: Sequence[np.ndarray], srcs: Sequence[RankLayout], request: Request
) -> list[str]:
    """Where the memory of D's ranks differs from what it must hold after a transfer; nothing where all is right."""
    found = []
    for dst, memory in zip(dsts, received, strict=True):
        want = expected(dst, srcs, request)
        found += differences(Memory(memory.tobytes(), want.counts), want)
        untouched = np.frombuffer(want.counts, np.uint8) == 0
        if (memory[untouched] != np.frombuffer(want.data, np.uint8)[untouched]).any():
            found.append("written, but padding, cached or foreign")
    return found


def are_untouched(dsts: Sequence[RankLayout], received: Sequence[np.ndarray]) -> bool:
    """Whether the memory of D's ranks is the noise it was before."""
    before = (noise(f"D {dst.rank}", dst.region_bytes) for dst in dsts)
    return all(memory.tobytes() == data for memory, data in zip(received, before, strict=True))


def fewest_runs(dst: RankLayout, srcs: Sequence[RankLayout], layer: Layer, dst_pages: int) -> int:
    """The fewest runs that fill ``dst_pages`` pages of D's ``layer``; every element has one holder on P.

    Walks each page's bytes in order and counts where the source rank, page or address does not go on.
    """
    group = dst.groups[layer.group]
    # by tensor and place in the stream: P rank, page, address in the page
    origin: dict[tuple[str, int], tuple[int, int, int]] = {}
    wanted = {shard.tensor.name for shard in layer.shards}
    num_tokens = dst_pages * (group.page_tokens or 1)
    for src in srcs:
        for src_layer in src.layers:
            src_group = src.groups[src_layer.group]
            for shard in src_layer.shards:
                if shard.tensor.name not in wanted:
                    continue
                for page in range(num_pages(src_group, num_tokens)):
                    for address, place in elements(shard):
                        key = shard.tensor.name, place + page * page_bytes(shard.tensor, src_group)
                        assert key not in origin, "P holds replicas: the fewest runs depend on the choice"
                        origin[key] = src.rank, page, address
    count = 0
    for page in range(dst_pages):
        walk = sorted(
            (
                address,
                shard.tensor.item_bytes,
                *origin[shard.tensor.name, place + page * page_bytes(shard.tensor, group)],
            )
            for shard in layer.shards
            for address, place in elements(shard)
        )
        goes_on = None
        for address, size, rank, src_page, src_address in walk:
            count += (address, rank, src_page, src_address) != goes_on
            goes_on = (address + size, rank, src_page, src_address + size)
    return count
