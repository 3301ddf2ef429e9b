"""Which addresses does a plan stand for, for one request?

1. ``Binder``: a plan as arrays, with both sides' layouts and base addresses; built once per D rank and P engine.
2. ``Binder.bind``: checks the request's block ids, then adds them for all pages and layers at once.
3. Copies that touch on both sides are joined: within a layer, where it makes the lists short, then across layers.
4. ``Binder.bind_parts``: the same by pairs of cache groups, each with the whole pages of P that hold its runs.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybrid_connector.core.blocks import BlockIds, Group, RankLayout
from hybrid_connector.core.errors import TransferError
from hybrid_connector.core.geometry import StateKind
from hybrid_connector.core.planning import LayerPair, PageCopies, Plan

_NO_BLOCK = -(2**31)
"""So far below zero that every page of it is negative."""

Ints = NDArray[np.int64]
Addresses = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class BoundCopies:
    """What D reads from one P rank: copy ``i`` moves ``num_bytes[i]`` bytes from ``src[i]`` to ``dst[i]``.

    The three arrays are one-dimensional uint64 of the same length; no two copies share a byte of D.
    ``kind_bytes``: the same bytes by kind of state, empty where nobody knows.
    """

    src_rank: int
    src: Addresses
    dst: Addresses
    num_bytes: Addresses
    kind_bytes: tuple[tuple[StateKind, int], ...] = ()

    def __post_init__(self) -> None:
        for name, array in (("src", self.src), ("dst", self.dst), ("num_bytes", self.num_bytes)):
            if array.dtype != np.uint64 or array.ndim != 1 or array.shape != self.src.shape:
                raise ValueError(
                    f"{name}: expected {self.src.size} of uint64, got {array.dtype} of shape {array.shape}"
                )
        if not self.num_bytes.all():
            raise ValueError(f"num_bytes: expected at least one byte per copy, got {self.num_bytes}")

    def __len__(self) -> int:
        return len(self.src)

    @property
    def total_bytes(self) -> int:
        return int(self.num_bytes.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Disjoint ranges of addresses that do not touch, ascending: ``num_bytes[i]`` bytes from ``starts[i]`` on."""

    starts: Ints
    num_bytes: Ints

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def total_bytes(self) -> int:
        return int(self.num_bytes.sum())

    @classmethod
    def union(cls, starts: Ints, stops: Ints) -> "Spans":
        """What any of the ranges ``[starts[i], stops[i])`` holds."""
        order = np.argsort(starts, kind="stable")
        starts, stops = starts[order], np.maximum.accumulate(stops[order])
        first = np.concatenate(([0], np.flatnonzero(starts[1:] > stops[:-1]) + 1))
        last = np.concatenate((first[1:], [len(starts)])) - 1
        return cls(starts[first], stops[last] - starts[first])


@dataclass(frozen=True, slots=True, eq=False)
class BoundPart:
    """What D reads from one P rank for the layers of one pair of cache groups. ``copies``: the runs."""

    src_group: int
    dst_group: int
    copies: BoundCopies
    _held: "tuple[tuple[_Part, Ints], ...]"

    @property
    def can_stage(self) -> bool:
        """Whether P's pages are more than one run, or go to other pages of D, and can be read whole."""
        return _can_stage([part for part, _ in self._held])

    def pages(self) -> Spans | None:
        """P's pages that hold the runs, whole, neighbours as one; ``None`` where ``can_stage`` is false.

        A page is what the layer's tensors reach over, gaps between them included: bytes of the request's own block.
        """
        starts, stops = [], []
        if not self.can_stage:
            return None
        for part, slots in self._held:
            assert part.src_extents is not None
            first, num_bytes = part.src_extents
            slots, counts = _successive(slots, part.src_page_stride, num_bytes)
            start = (part.src_layers + first)[:, None] + slots * part.src_page_stride
            starts.append(start.ravel())
            stops.append((start + (counts - 1) * part.src_page_stride + num_bytes[:, None]).ravel())
        return Spans.union(np.concatenate(starts), np.concatenate(stops))


class Binder:
    """A plan and where its two sides lie.

    ``dst`` and ``srcs`` are the layouts the plan was made from. Base addresses default to 0, so that copies hold
    offsets into the ranks' regions. Raises ``TransferError`` for a base address where no region can lie.
    """

    def __init__(
        self,
        plan: Plan,
        dst: RankLayout,
        srcs: Iterable[RankLayout],
        *,
        dst_base: int = 0,
        src_bases: Mapping[int, int] | None = None,
    ) -> None:
        layouts = {src.rank: src for src in srcs}
        bases = {rank: (src_bases or {}).get(rank, 0) for rank in plan.src_ranks}
        _check_base("D", dst, dst_base)
        for rank, base in bases.items():
            _check_base("P", layouts[rank], base)
        self._dst_groups = dst.groups
        by_pair: dict[tuple[int, int, int], list[_Part]] = defaultdict(list)
        for copies in plan.copies:
            rank = copies.src_rank
            parts = _parts(copies, layouts[rank], bases[rank], dst, dst_base)
            by_pair[rank, copies.src_group, copies.dst_group].extend(parts)
        self._parts: dict[int, list[list[_Part]]] = {rank: [] for rank in plan.src_ranks}
        for rank, src_group, dst_group in sorted(by_pair):
            self._parts[rank].append(by_pair[rank, src_group, dst_group])
        self._src_groups = list({layouts[rank].groups: None for rank in plan.src_ranks})
        self._groups_of = {rank: self._src_groups.index(layouts[rank].groups) for rank in plan.src_ranks}

    @property
    def can_stage(self) -> bool:
        """Whether some pages of P are more than one run, or go to other pages of D, and can be read whole."""
        return any(_can_stage(parts) for pairs in self._parts.values() for parts in pairs)

    def bind(
        self,
        src_block_ids: BlockIds,
        dst_block_ids: BlockIds,
        num_tokens: int,
        first_tokens: int = 0,
    ) -> tuple[BoundCopies, ...]:
        """The copies that bring one request to D, one ``BoundCopies`` per P rank that has something to send.

        Block ids: per group, the logical blocks of all ``num_tokens`` tokens in order, also those D already holds;
        where D has no block, nothing moves.
        ``first_tokens``: tokens whose attention state D already holds; recurrent state moves whatever it is.
        Raises ``TransferError`` for block ids that are too few, too many, out of range or used twice by D, and
        ``ValueError`` where ``first_tokens`` is not a page boundary of D.
        """
        return tuple(
            join_parts(parts) for parts in self.bind_parts(src_block_ids, dst_block_ids, num_tokens, first_tokens)
        )

    def bind_parts(
        self,
        src_block_ids: BlockIds,
        dst_block_ids: BlockIds,
        num_tokens: int,
        first_tokens: int = 0,
    ) -> tuple[tuple[BoundPart, ...], ...]:
        """What ``bind`` gives, by pairs of cache groups: for each P rank that has something to send, its parts.

        Arguments and errors are those of ``bind``; blocks that two groups of D share are ``join_parts``'s to refuse.
        """
        if not 0 <= first_tokens <= num_tokens or num_tokens == 0:
            raise TransferError(
                f"P holds {num_tokens} tokens, D already has {first_tokens}: expected 0 <= D <= P, P > 0"
            )
        for group in self._dst_groups:
            if group.page_tokens is not None and first_tokens % group.page_tokens:
                raise ValueError(
                    f"first_tokens {first_tokens} is no multiple of D's page of {group.page_tokens} tokens"
                )
        dst_pages = request_pages("D", self._dst_groups, dst_block_ids, num_tokens)
        src_pages = [request_pages("P", groups, src_block_ids, num_tokens) for groups in self._src_groups]
        bound = []
        for rank, pairs in self._parts.items():
            of_rank = src_pages[self._groups_of[rank]]
            parts = (_bind_pair(rank, pair, of_rank, dst_pages, first_tokens) for pair in pairs)
            if held := tuple(part for part in parts if part is not None):
                bound.append(held)
        return tuple(bound)


def kind_bytes(bound: Iterable[BoundCopies]) -> dict[StateKind, int]:
    """Bytes of each kind of state in a bound request."""
    kinds: dict[StateKind, int] = defaultdict(int)
    for copies in bound:
        for kind, size in copies.kind_bytes:
            kinds[kind] += size
    return dict(kinds)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """``PageCopies`` as arrays, for layers with the same page strides.

    ``*_layers``: address of page 0, per layer, in order of D's. ``*_page``, ``*_offset``, ``num_bytes``: per run.
    ``state``: where each side's page is one, the copies of all layers for page 0 of both.
    ``src_extents``: per layer, where in its page P's tensors start, and bytes from there to their end; ``None`` where
    that leaves the page. ``is_whole``: each run is all that a page holds, on both sides.
    """

    copies: PageCopies
    page_tokens: int | None
    src_page_stride: int
    dst_page_stride: int
    src_layers: Ints
    dst_layers: Ints
    src_page: Ints
    src_offset: Ints
    dst_page: Ints
    dst_offset: Ints
    num_bytes: Ints
    state: tuple[Ints, Ints, Ints] | None
    src_extents: tuple[Ints, Ints] | None
    is_whole: bool

    def bind(self, src_slots: Ints, dst_slots: Ints, first_tokens: int) -> tuple[Ints, Ints, Ints, int, Ints] | None:
        """``src``, ``dst`` and ``num_bytes`` of every copy of every layer, the bytes of one layer, and P's slots read.

        ``*_slots``: the request's pages, counted from page 0 of a layer. ``None`` where D wants none of them.
        """
        if self.state is not None:
            return self._bind_state(src_slots, dst_slots, self.state)
        if self.copies.src_pages == self.copies.dst_pages == 1 and len(self.num_bytes) == 1:
            found = self._bind_pages(src_slots, dst_slots, first_tokens)
        else:
            found = self._bind_runs(src_slots, dst_slots, first_tokens)
        if found is None:
            return None
        src, dst, num_bytes, read = found
        src, dst, num_bytes = _join(src, dst, num_bytes)
        num_layers = len(self.dst_layers)
        return (
            (self.src_layers[:, None] + src).ravel(),
            (self.dst_layers[:, None] + dst).ravel(),
            num_bytes if num_layers == 1 else num_bytes[None, :].repeat(num_layers, 0).ravel(),
            int(num_bytes.sum()),
            read,
        )

    def _bind_state(
        self, src_slots: Ints, dst_slots: Ints, state: tuple[Ints, Ints, Ints]
    ) -> tuple[Ints, Ints, Ints, int, Ints] | None:
        src_slot, dst_slot = int(src_slots[0]), int(dst_slots[0])
        if dst_slot < 0:
            return None
        if src_slot < 0:
            raise self._nothing_held()
        src, dst, num_bytes = state
        src, dst = src + src_slot * self.src_page_stride, dst + dst_slot * self.dst_page_stride
        return src, dst, num_bytes, sum(size for _, size in self.copies.kind_bytes), src_slots

    def _bind_pages(self, src_slots: Ints, dst_slots: Ints, first_tokens: int) -> tuple[Ints, Ints, Ints, Ints] | None:
        """Every page is one run, to one page."""
        assert self.page_tokens is not None
        first = first_tokens // self.page_tokens
        dst, src = dst_slots[first:], src_slots[first:]
        if len(src) != len(dst):
            shared = min(len(src), len(dst))
            dst, src = dst[:shared], src[:shared]
        if not len(dst):
            return None
        if dst.min() < 0:
            dst, src = dst[dst >= 0], src[dst >= 0]
            if not len(dst):
                return None
        if src.min() < 0:
            raise self._nothing_held()
        num_bytes = self.num_bytes.repeat(len(dst))
        return (
            src * self.src_page_stride + self.src_offset,
            dst * self.dst_page_stride + self.dst_offset,
            num_bytes,
            src,
        )

    def _bind_runs(self, src_slots: Ints, dst_slots: Ints, first_tokens: int) -> tuple[Ints, Ints, Ints, Ints] | None:
        assert self.page_tokens is not None
        first, stop = first_tokens // self.page_tokens, len(dst_slots)
        periods = np.arange(first // self.copies.dst_pages, -(-stop // self.copies.dst_pages), dtype=np.int64)[:, None]
        src_page = periods * self.copies.src_pages + self.src_page
        dst_page = periods * self.copies.dst_pages + self.dst_page
        there = (dst_page >= first) & (dst_page < stop) & (src_page < len(src_slots))
        there[there] = dst_slots[dst_page[there]] >= 0
        read = src_slots[src_page[there]]
        if not len(read):
            return None
        if read.min() < 0:
            raise self._nothing_held()
        run = there.nonzero()[1]
        return (
            read * self.src_page_stride + self.src_offset[run],
            dst_slots[dst_page[there]] * self.dst_page_stride + self.dst_offset[run],
            self.num_bytes[run],
            read,
        )

    def _nothing_held(self) -> TransferError:
        return TransferError(f"P group {self.copies.src_group}: holds no block for pages that D needs")


def _parts(copies: PageCopies, src: RankLayout, src_base: int, dst: RankLayout, dst_base: int) -> list[_Part]:
    """One part per distinct pair of page strides: nearly always one."""
    page_tokens = dst.groups[copies.dst_group].page_tokens
    if page_tokens is not None and len(copies.kind_bytes) > 1:
        raise ValueError(
            f"pages of tokens hold one kind of state, a plan for D rank {dst.rank} has {copies.kind_bytes}"
        )
    by_strides: dict[tuple[int, int], list[LayerPair]] = defaultdict(list)
    for layer in copies.layers:
        by_strides[layer.src_page_stride, layer.dst_page_stride].append(layer)
    return [
        _part(copies, page_tokens, strides, layers, src, src_base, dst, dst_base)
        for strides, layers in by_strides.items()
    ]


def _part(
    copies: PageCopies,
    page_tokens: int | None,
    strides: tuple[int, int],
    layers: Sequence[LayerPair],
    src: RankLayout,
    src_base: int,
    dst: RankLayout,
    dst_base: int,
) -> _Part:
    layers = sorted(layers, key=lambda layer: layer.dst_offset)
    num_bytes = np.array([run.num_bytes for run in copies.runs], dtype=np.int64)
    src_layers = np.array([src_base + layer.src_offset for layer in layers], dtype=np.int64)
    dst_layers = np.array([dst_base + layer.dst_offset for layer in layers], dtype=np.int64)
    src_offset = np.array([run.src_offset for run in copies.runs], dtype=np.int64)
    dst_offset = np.array([run.dst_offset for run in copies.runs], dtype=np.int64)
    state = None
    if page_tokens is None:
        src_all, dst_all = (src_layers[:, None] + src_offset).ravel(), (dst_layers[:, None] + dst_offset).ravel()
        state = _join(src_all, dst_all, np.tile(num_bytes, len(layers)))
    src_extents = _extents(src, copies.src_group, [layer.src_offset for layer in layers])
    dst_extents = _extents(dst, copies.dst_group, [layer.dst_offset for layer in layers])
    is_whole = (
        src_extents is not None
        and dst_extents is not None
        and len(np.unique(np.concatenate((num_bytes, src_extents[1], dst_extents[1])))) == 1
    )
    return _Part(
        copies,
        page_tokens,
        *strides,
        src_layers,
        dst_layers,
        np.array([run.src_page for run in copies.runs], dtype=np.int64),
        src_offset,
        np.array([run.dst_page for run in copies.runs], dtype=np.int64),
        dst_offset,
        num_bytes,
        state,
        src_extents,
        is_whole,
    )


def _can_stage(parts: Sequence[_Part]) -> bool:
    return all(part.src_extents is not None for part in parts) and not all(part.is_whole for part in parts)


def _extents(rank: RankLayout, group: int, offsets: Sequence[int]) -> tuple[Ints, Ints] | None:
    """Of the layers that start there: where in its page a layer's tensors start, and bytes until they end.

    ``None`` if that is beyond the page's stride, or where the layout does not say what a page holds.
    """
    layers_at = {layer.offset: layer for layer in rank.layers if layer.group == group}  # each starts somewhere else
    known = [layers_at[offset] for offset in offsets if offset in layers_at]
    if len(known) < len(offsets):
        return None
    starts = [min(shard.offset for shard in layer.shards) for layer in known]
    stops = [
        max(
            shard.offset
            + shard.tensor.item_bytes
            + sum(stride * (extent - 1) for stride, extent in zip(shard.strides, shard.box.shape, strict=True))
            for shard in layer.shards
        )
        for layer in known
    ]
    if any(stop > layer.page_stride for stop, layer in zip(stops, known, strict=True)):
        return None
    first = np.array(starts, dtype=np.int64)
    return first, np.array(stops, dtype=np.int64) - first


def _successive(slots: Ints, page_stride: int, num_bytes: Ints) -> tuple[Ints, Ints]:
    """First slot and number of slots of each range of pages; a page alone where pages leave gaps."""
    slots = np.unique(slots)
    if (num_bytes != page_stride).any():
        return slots, np.ones_like(slots)
    first = np.concatenate(([0], np.flatnonzero(np.diff(slots) != 1) + 1))
    return slots[first], np.diff(np.concatenate((first, [len(slots)])))


def _bind_pair(
    rank: int, parts: Sequence[_Part], src_pages: Sequence[Ints], dst_pages: Sequence[Ints], first_tokens: int
) -> BoundPart | None:
    """All copies from one P rank for one pair of groups; ``None`` where there are none."""
    lists: list[tuple[Ints, Ints, Ints]] = []
    held: list[tuple[_Part, Ints]] = []
    kinds: dict[StateKind, int] = defaultdict(int)
    for part in parts:
        src_slots, dst_slots = src_pages[part.copies.src_group], dst_pages[part.copies.dst_group]
        bound = part.bind(src_slots, dst_slots, first_tokens)
        if bound is None:
            continue
        src, dst, num_bytes, layer_bytes, read = bound
        lists.append((src, dst, num_bytes))
        held.append((part, read))
        for kind, size in _layer_kinds(part.copies, layer_bytes):
            kinds[kind] += size * len(part.dst_layers)
    if not lists:
        return None
    if len(lists) == 1 and held[0][0].state is not None:
        copies = _bound_copies(rank, *lists[0], kinds)
    else:
        copies = _joined_copies(rank, lists, kinds)
    return BoundPart(parts[0].copies.src_group, parts[0].copies.dst_group, copies, tuple(held))


def join_parts(parts: Sequence[BoundPart]) -> BoundCopies:
    """All runs of some parts of one P rank. Raises ``TransferError`` where they write a byte of D twice."""
    if len(parts) == 1:
        return parts[0].copies
    kinds = kind_bytes(part.copies for part in parts)
    lists = [
        (c.src.view(np.int64), c.dst.view(np.int64), c.num_bytes.view(np.int64)) for c in (p.copies for p in parts)
    ]
    return _joined_copies(parts[0].copies.src_rank, lists, kinds)


def _joined_copies(rank: int, lists: Sequence[tuple[Ints, Ints, Ints]], kinds: Mapping[StateKind, int]) -> BoundCopies:
    src, dst, num_bytes = _join(*(lists[0] if len(lists) == 1 else map(np.concatenate, zip(*lists, strict=True))))
    overlaps = (dst[1:] < dst[:-1] + num_bytes[:-1]).nonzero()[0]
    if overlaps.size:
        raise TransferError(
            f"D's block ids put two pages at address {dst[overlaps[0] + 1]:#x}: expected every block once"
        )
    return _bound_copies(rank, src, dst, num_bytes, kinds)


def _bound_copies(rank: int, src: Ints, dst: Ints, num_bytes: Ints, kinds: Mapping[StateKind, int]) -> BoundCopies:
    return BoundCopies(
        rank,
        src.view(np.uint64),
        dst.view(np.uint64),
        num_bytes.view(np.uint64),
        tuple(sorted((kind, size) for kind, size in kinds.items() if size)),
    )


def _layer_kinds(copies: PageCopies, layer_bytes: int) -> tuple[tuple[StateKind, int], ...]:
    """The bytes of one layer by kind. Pages of tokens hold one kind; the page of a recurrent state moves whole."""
    if len(copies.kind_bytes) == 1:
        ((kind, _),) = copies.kind_bytes
        return ((kind, layer_bytes),)
    assert layer_bytes == sum(size for _, size in copies.kind_bytes)
    return copies.kind_bytes


def _join(src: Ints, dst: Ints, num_bytes: Ints) -> tuple[Ints, Ints, Ints]:
    """The same bytes in order of ``dst``, in as few copies as possible."""
    if len(dst) < 2:
        return src, dst, num_bytes
    if (dst[1:] < dst[:-1]).any():
        order = np.argsort(dst, kind="stable")
        src, dst, num_bytes = src[order], dst[order], num_bytes[order]
    starts = np.empty(len(dst), dtype=bool)
    starts[0] = True
    np.not_equal(dst[:-1] + num_bytes[:-1], dst[1:], out=starts[1:])
    starts[1:] |= src[:-1] + num_bytes[:-1] != src[1:]
    first = starts.nonzero()[0]
    if len(first) == len(dst):
        return src, dst, num_bytes
    return src[first], dst[first], np.add.reduceat(num_bytes, first)


def spread(counts: Ints) -> tuple[Ints, Ints]:
    """``counts[i]`` entries for each item ``i``, in order: which item each belongs to, and its number within it."""
    item = np.repeat(np.arange(len(counts)), counts)
    return item, np.arange(len(item)) - (np.cumsum(counts) - counts)[item]


def request_pages(side: str, groups: Sequence[Group], block_ids: BlockIds, num_tokens: int) -> tuple[Ints, ...]:
    """Per group, the request's pages counted from page 0 of a layer, negative where there is no block.

    Refuses block ids that do not fit the group.
    """
    if len(block_ids) != len(groups):
        raise TransferError(f"{side}: expected block ids for {len(groups)} groups, got {len(block_ids)}")
    pages = []
    for number, (group, ids) in enumerate(zip(groups, block_ids, strict=True)):
        if len(ids) != (expected := group.num_request_blocks(num_tokens)):
            raise TransferError(f"{side} group {number}: {num_tokens} tokens need {expected} block ids, got {len(ids)}")
        held = [block for block in ids if block is not None]
        if group.page_tokens is None and not held:
            raise TransferError(f"{side} group {number}: expected the block of the recurrent state, got none")
        if set(map(type, held)) - {int}:
            raise TransferError(f"{side} group {number}: expected integer block ids, got {ids[:8]!r}")
        if held and (min(held) < 0 or max(held) >= group.num_blocks):
            bad = next(i for i, block in enumerate(ids) if block is not None and not 0 <= block < group.num_blocks)
            raise TransferError(
                f"{side} group {number}: expected block ids in [0, {group.num_blocks}), got {ids[bad]} at {bad}"
            )
        complete = held if len(held) == len(ids) else [_NO_BLOCK if block is None else block for block in ids]
        slots = np.array(complete, dtype=np.int64)
        if group.pages_per_block > 1:
            slots = (slots[:, None] * group.pages_per_block + np.arange(group.pages_per_block)).ravel()
            slots = slots[: group.num_request_pages(num_tokens)]
        pages.append(slots)
    return tuple(pages)


def _check_base(side: str, layout: RankLayout, base: int) -> None:
    if not 0 <= base <= 2**63 - layout.region_bytes:
        raise TransferError(
            f"{side} rank {layout.rank}: no region of {layout.region_bytes} bytes lies at address {base:#x}"
        )
