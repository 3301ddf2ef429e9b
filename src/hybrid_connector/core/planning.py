"""From which rank does each byte of a D rank come?

1. Refuse tensors that are missing, or differ in shape or element type (``IncompatibleError``).
2. For every D tensor, tile its box with the P ranks' boxes, each byte once.
3. Of replicas, read one on a rank that is read anyway; where there is none, D's ranks take turns.
4. Pages of different length repeat their pattern after a period (their least common multiple of tokens).
5. Lower each piece to runs, join the runs of a page, and share the result among layers that look alike.

A plan holds no addresses and no block ids; ``transport.binding`` adds them per request.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hybrid_connector.core.blocks import Layer, RankLayout
from hybrid_connector.core.errors import IncompatibleError
from hybrid_connector.core.geometry import Box, Shard, StateKind, intersect, subtract_all
from hybrid_connector.core.lowering import Copy, Run, expand, lower, merge

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


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a part of a D page comes from: for people who ask, the plan itself holds runs only.

    ``box`` in the request's coordinates; ``replicas``: the P ranks that hold it too. ``copy`` moves it from page
    ``src_page`` to page ``dst_page`` of a period.
    """

    layer: str
    tensor: str
    kind: StateKind
    box: Box
    src_rank: int
    replicas: tuple[int, ...]
    src_page: int
    dst_page: int
    copy: Copy
    num_bytes: int


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
class _Piece:
    """A part of a D page (request coordinates), and the P page of the same period that every replica has it in."""

    replicas: tuple[_Holder, ...]
    src_page: int
    dst_page: int
    box: Box

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(holder.source.rank for holder in self.replicas)


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
    alike, ranks = _prepare(dst, srcs)
    return Plan(
        dst.rank,
        tuple(copies for matches, tiling in alike for copies in _plan_alike(matches, tiling, dst.rank, ranks)),
    )


def trace_transfer(dst: RankLayout, srcs: Sequence[RankLayout]) -> tuple[Origin, ...]:
    """Where each part of one period of D's rank ``dst`` comes from, in the plan that ``plan_transfer`` makes."""
    alike, ranks = _prepare(dst, srcs)
    return tuple(
        Origin(
            match.layer.name,
            shard.tensor.name,
            shard.tensor.kind,
            piece.box,
            holder.source.rank,
            piece.ranks,
            piece.src_page,
            piece.dst_page,
            copy,
            piece.box.volume * shard.tensor.item_bytes,
        )
        for matches, _ in alike
        for match in matches
        for shard, piece, holder, copy in _pieces(match, _tile(match), dst.rank, ranks)
    )


def _prepare(
    dst: RankLayout, srcs: Sequence[RankLayout]
) -> tuple[list[tuple[list[_Match], tuple[tuple[_Piece, ...], ...]]], frozenset[int]]:
    """D's layers that look alike, with the tiling of the first of each; and the P ranks to read."""
    holders = _holders_by_name(srcs)
    alike: dict[tuple[object, ...], list[_Match]] = defaultdict(list)
    for layer in dst.layers:
        match = _match(layer, holders)
        alike[_look(match)].append(match)
    tiled = [(matches, _tile(matches[0])) for matches in alike.values()]
    ranks = _choose_ranks(dst.rank, (piece.ranks for _, tiling in tiled for pieces in tiling for piece in pieces))
    return tiled, ranks


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


def _tile(match: _Match) -> tuple[tuple[_Piece, ...], ...]:
    """For each tensor of a D layer, what fills the D pages of one period."""
    tiling = []
    for shard, holders in zip(match.layer.shards, match.held, strict=True):
        _, dst_pages = _period(shard, holders)
        replicas = _replicas(holders)
        tiling.append(tuple(piece for page in range(dst_pages) for piece in _cover(shard, page, replicas)))
    return tuple(tiling)


def _replicas(holders: Sequence[_Holder]) -> tuple[tuple[_Holder, ...], ...]:
    """The holders by the box they hold, each in order of rank."""
    by_box: dict[Box, list[_Holder]] = defaultdict(list)
    for holder in holders:
        by_box[holder.shard.box].append(holder)
    return tuple(tuple(sorted(group, key=lambda holder: holder.source.rank)) for group in by_box.values())


def _choose_ranks(turn: int, needs: Iterable[tuple[int, ...]]) -> frozenset[int]:
    """P ranks, few of them, that hold a replica for each of ``needs`` (ranks that will do, ascending).

    Whoever has the least choice goes first; a need that no chosen rank meets takes its number ``turn`` (modulo).
    """
    chosen: set[int] = set()
    for ranks in sorted(set(needs), key=lambda ranks: (len(ranks), ranks)):
        if chosen.isdisjoint(ranks):
            chosen.add(ranks[turn % len(ranks)])
    return frozenset(chosen)


def _plan_alike(
    matches: Sequence[_Match], tiling: Sequence[Sequence[_Piece]], turn: int, ranks: frozenset[int]
) -> Iterator[PageCopies]:
    """The copies of D layers that look alike, one for each P layer that such a layer reads from.

    ``tiling`` is the first layer's. Of replicas on several of ``ranks``, number ``turn`` (modulo) is read.
    """
    layer, sources = matches[0].layer, matches[0].sources
    runs: dict[_Source, list[Run]] = defaultdict(list)
    kinds: dict[_Source, dict[StateKind, int]] = defaultdict(lambda: defaultdict(int))
    periods: dict[_Source, tuple[int, int]] = {}
    for shard, piece, holder, copy in _pieces(matches[0], tiling, turn, ranks):
        runs[holder.source].extend(expand(copy, piece.src_page, piece.dst_page))
        kinds[holder.source][shard.tensor.kind] += piece.box.volume * shard.tensor.item_bytes
        periods[holder.source] = _period(shard, piece.replicas)
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


def _pieces(
    match: _Match, tiling: Sequence[Sequence[_Piece]], turn: int, ranks: frozenset[int]
) -> Iterator[tuple[Shard, _Piece, _Holder, Copy]]:
    """For each part of a D layer's period: the shard it belongs to, who is read, and the copy between the pages."""
    for shard, pieces in zip(match.layer.shards, tiling, strict=True):
        for piece in pieces:
            read = [holder for holder in piece.replicas if holder.source.rank in ranks]
            holder = read[turn % len(read)]
            src_box, dst_box = _local(holder.shard, piece.box, piece.src_page), _local(shard, piece.box, piece.dst_page)
            yield shard, piece, holder, lower(holder.shard, src_box, shard, dst_box)


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


def _cover(shard: Shard, dst_page: int, replicas: Sequence[tuple[_Holder, ...]]) -> Iterator[_Piece]:
    """Tile one D page with parts of P pages.

    The parts are disjoint by construction and complete or refused.
    """
    want = shard.box_at(dst_page)
    first, last = (dst_page * shard.page_extent + i for i in (0, shard.page_extent - 1))
    offers = []
    for group in replicas:
        held, page_extent = group[0].shard, group[0].shard.page_extent
        for src_page in range(first // page_extent, last // page_extent + 1):
            if (common := intersect(held.box_at(src_page), want)) is not None:
                offers.append((group, src_page, common))
    offers.sort(key=lambda offer: (-offer[2].volume, offer[1], offer[0][0].source.rank))
    missing: tuple[Box, ...] = (want,)
    for group, src_page, offered in offers:
        for hole in missing:
            if (part := intersect(hole, offered)) is not None:
                yield _Piece(group, src_page, dst_page, part)
        missing = subtract_all(missing, offered)
    if missing:
        have = "; ".join(sorted(str(holder.shard.box) for group in replicas for holder in group))
        raise IncompatibleError(
            f"{shard.tensor.name} ({', '.join(shard.tensor.axes)}): P's ranks hold {have}, D needs {missing[0]}"
        )


def _local(shard: Shard, box: Box, page: int) -> Box:
    """``box`` in the page coordinates of ``shard``."""
    paged = shard.tensor.paged_axis
    return box if paged is None or page == 0 else box.shift(paged, -page * shard.page_extent)
