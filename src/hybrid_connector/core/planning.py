"""From which rank does each byte of a D rank come?

1. Refuse tensors that are missing, or differ in shape or element type (``IncompatibleError``).
2. For every D tensor, cover its box with the P ranks' boxes, each byte once; replicas take turns by D rank.
3. Pages of different length repeat their pattern after a period (their least common multiple of tokens).
4. Lower each piece to runs, join the runs of a page, and share the result among layers that look alike.

A plan holds no addresses and no block ids; ``transport.binding`` adds them per request.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hybrid_connector.core.blocks import Layer, RankLayout
from hybrid_connector.core.errors import IncompatibleError
from hybrid_connector.core.geometry import Box, Shard, StateKind, intersect, subtract_all
from hybrid_connector.core.lowering import Run, expand, lower, merge

MAX_PERIOD_PAGES = 1024
"""Longest period that is planned. A peer names its page length; 16 * 1024 tokens exceed any real one."""


@dataclass(frozen=True, slots=True)
class LayerPair:
    """The same layer on both sides: byte offset of page 0, and bytes from page to page."""

    src_offset: int
    src_page_stride: int
    dst_offset: int
    dst_page_stride: int


@dataclass(frozen=True, slots=True)
class PageCopies:
    """What moves from one P rank for the layers of one group pair that look alike.

    One period is ``src_pages`` pages of P and ``dst_pages`` pages of D, the same tokens; ``runs`` describes it.
    ``kind_bytes``: bytes of each kind in one period of one layer.
    """

    src_rank: int
    src_group: int
    dst_group: int
    src_pages: int
    dst_pages: int
    runs: tuple[Run, ...]
    kind_bytes: tuple[tuple[StateKind, int], ...]
    layers: tuple[LayerPair, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """All copies that fill one D rank."""

    dst_rank: int
    copies: tuple[PageCopies, ...]

    @property
    def src_ranks(self) -> tuple[int, ...]:
        return tuple(sorted({copies.src_rank for copies in self.copies}))


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """A layer of a P rank; compared by identity, because a plan looks up many."""

    rank: int
    layer: Layer


@dataclass(frozen=True, slots=True)
class _Holder:
    """A shard that a P rank holds, and the layer it lies in."""

    source: _Source
    shard: Shard


@dataclass(frozen=True, slots=True)
class _Match:
    """A D layer, the P shards of each of its tensors, and the P layers those lie in."""

    layer: Layer
    held: tuple[tuple[_Holder, ...], ...]
    sources: tuple[_Source, ...]


def plan_engine(dsts: Sequence[RankLayout], srcs: Sequence[RankLayout]) -> tuple[Plan, ...]:
    """A plan for every D rank; also refuses P tensors that no D rank wants (another model)."""
    plans = tuple(plan_transfer(dst, srcs) for dst in dsts)
    wanted = {shard.tensor.name for dst in dsts for layer in dst.layers for shard in layer.shards}
    for src in srcs:
        for layer in src.layers:
            for shard in layer.shards:
                if shard.tensor.name not in wanted:
                    raise IncompatibleError(f"{shard.tensor.name}: P rank {src.rank} holds it, no rank of D does")
    return plans


def plan_transfer(dst: RankLayout, srcs: Sequence[RankLayout]) -> Plan:
    """Plan how D's rank ``dst`` is filled from P's ranks ``srcs``.

    Raises ``IncompatibleError`` when a tensor is missing on P, differs in shape or element type,
    or is not held completely by ``srcs``; or when two of ``srcs`` claim the same rank.
    """
    holders = _holders_by_name(srcs)
    alike: dict[tuple[object, ...], list[_Match]] = defaultdict(list)
    for layer in dst.layers:
        match = _match(layer, holders)
        alike[_look(match)].append(match)
    return Plan(dst.rank, tuple(copies for matches in alike.values() for copies in _plan_alike(dst.rank, matches)))


def _holders_by_name(srcs: Sequence[RankLayout]) -> dict[str, list[_Holder]]:
    """Every P shard under its tensor's name."""
    holders: dict[str, list[_Holder]] = defaultdict(list)
    ranks: set[int] = set()
    for src in srcs:
        if src.rank in ranks:
            raise IncompatibleError(f"P rank {src.rank}: two layouts claim it")
        ranks.add(src.rank)
        for layer in src.layers:
            source = _Source(src.rank, layer)
            for shard in layer.shards:
                holders[shard.tensor.name].append(_Holder(source, shard))
    return holders


def _match(layer: Layer, holders: Mapping[str, Sequence[_Holder]]) -> _Match:
    """The P shards of the layer's tensors, refused where they are not the same tensors."""
    held = []
    for shard in layer.shards:
        want = shard.tensor
        found = holders.get(want.name, ())
        if not found:
            raise IncompatibleError(f"{want.name}: D needs it, no rank of P holds it")
        for holder in found:
            have = holder.shard.tensor
            for what, theirs, ours in (
                ("element type", have.dtype, want.dtype),
                ("bytes per element", have.item_bytes, want.item_bytes),
                ("axes", have.axes, want.axes),
                ("shape", have.shape, want.shape),
            ):
                if theirs != ours:
                    raise IncompatibleError(f"{want.name}: {what} is {theirs} on P, {ours} on D")
        held.append(tuple(found))
    return _Match(layer, tuple(held), tuple(dict.fromkeys(holder.source for found in held for holder in found)))


def _look(match: _Match) -> tuple[object, ...]:
    """Everything the runs of a layer depend on; equal for layers that can share them."""

    def geometry(shard: Shard) -> tuple[object, ...]:
        tensor = shard.tensor
        return tensor.kind, tensor.item_bytes, tensor.paged_axis, shard.box, shard.offset, shard.strides

    number = {source: i for i, source in enumerate(match.sources)}
    return (
        match.layer.group,
        tuple((source.rank, source.layer.group) for source in match.sources),
        tuple(
            (geometry(shard), tuple((number[holder.source], geometry(holder.shard)) for holder in holders))
            for shard, holders in zip(match.layer.shards, match.held, strict=True)
        ),
    )


def _plan_alike(dst_rank: int, matches: Sequence[_Match]) -> Iterator[PageCopies]:
    """The copies of D layers that look alike, one for each P layer that such a layer reads from."""
    layer, held, sources = matches[0].layer, matches[0].held, matches[0].sources
    runs: dict[_Source, list[Run]] = defaultdict(list)
    kinds: dict[_Source, dict[StateKind, int]] = defaultdict(lambda: defaultdict(int))
    periods: dict[_Source, tuple[int, int]] = {}
    for shard, holders in zip(layer.shards, held, strict=True):
        src_pages, dst_pages = _period(shard, holders)
        for dst_page in range(dst_pages):
            for holder, src_page, box in _cover(shard, dst_page, holders, dst_rank):
                copy = lower(holder.shard, _local(holder.shard, box, src_page), shard, _local(shard, box, dst_page))
                runs[holder.source].extend(expand(copy, src_page, dst_page))
                kinds[holder.source][shard.tensor.kind] += box.volume * shard.tensor.item_bytes
                periods[holder.source] = src_pages, dst_pages
    for number, source in enumerate(sources):
        if source in runs:
            yield PageCopies(
                source.rank,
                source.layer.group,
                layer.group,
                *periods[source],
                merge(runs[source]),
                tuple(sorted(kinds[source].items())),
                tuple(_pair(match.sources[number].layer, match.layer) for match in matches),
            )


def _pair(src: Layer, dst: Layer) -> LayerPair:
    return LayerPair(src.offset, src.page_stride, dst.offset, dst.page_stride)


def _period(shard: Shard, holders: Sequence[_Holder]) -> tuple[int, int]:
    """Pages of P and of D after which the pattern repeats: (1, 1) where both sides' pages are alike."""
    lengths = sorted({holder.shard.page_extent for holder in holders})
    if len(lengths) > 1:
        raise IncompatibleError(
            f"{shard.tensor.name}: P's ranks store pages of different lengths: {', '.join(map(str, lengths))} tokens"
        )
    period = math.lcm(lengths[0], shard.page_extent)
    pages = period // lengths[0], period // shard.page_extent
    if max(pages) > MAX_PERIOD_PAGES:
        raise IncompatibleError(
            f"{shard.tensor.name}: pages of {lengths[0]} tokens on P, {shard.page_extent} on D "
            f"repeat after {max(pages)} pages, expected at most {MAX_PERIOD_PAGES}"
        )
    return pages


def _cover(shard: Shard, dst_page: int, holders: Sequence[_Holder], turn: int) -> list[tuple[_Holder, int, Box]]:
    """Tile one D page with parts of P pages: holder, P page in the period, and the part (request coordinates).

    The parts are disjoint by construction and complete or refused. Of replicas, number ``turn`` (modulo) is read.
    """
    replicas: dict[Box, list[_Holder]] = defaultdict(list)
    for holder in holders:
        replicas[holder.shard.box].append(holder)
    want = shard.box_at(dst_page)
    offers = []
    for group in replicas.values():
        holder = group[turn % len(group)]
        page_extent = holder.shard.page_extent
        first, last = (dst_page * shard.page_extent + i for i in (0, shard.page_extent - 1))
        for src_page in range(first // page_extent, last // page_extent + 1):
            if (common := intersect(holder.shard.box_at(src_page), want)) is not None:
                offers.append((holder, src_page, common))
    offers.sort(key=lambda offer: (-offer[2].volume, offer[1], offer[0].source.rank))
    missing: tuple[Box, ...] = (want,)
    pieces: list[tuple[_Holder, int, Box]] = []
    for holder, src_page, offered in offers:
        parts = [part for hole in missing if (part := intersect(hole, offered)) is not None]
        pieces.extend((holder, src_page, part) for part in parts)
        missing = subtract_all(missing, offered)
    if missing:
        have = "; ".join(sorted(str(holder.shard.box) for holder in holders))
        raise IncompatibleError(
            f"{shard.tensor.name} ({', '.join(shard.tensor.axes)}): P's ranks hold {have}, D needs {missing[0]}"
        )
    return pieces


def _local(shard: Shard, box: Box, page: int) -> Box:
    """``box`` in the page coordinates of ``shard``."""
    paged = shard.tensor.paged_axis
    return box if paged is None or page == 0 else box.shift(paged, -page * shard.page_extent)
