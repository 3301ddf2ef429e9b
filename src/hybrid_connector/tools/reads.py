"""What does each D rank read for one request, from which P rank, and would whole pages be cheaper?

1. ``Part``: what one D rank reads from one P rank for the layers of one pair of cache groups.
2. ``list_reads``: binds the plan of two engines to a request's blocks, and counts runs and the pages around them.
3. ``seconds``: how long a D rank's parts take, each read the cheaper way.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hybrid_connector.core.blocks import BlockIds, Layer, RankLayout
from hybrid_connector.core.geometry import StateKind
from hybrid_connector.core.planning import PageCopies, Plan, plan_engine
from hybrid_connector.transport.binding import Binder, kind_bytes
from hybrid_connector.transport.cost import Choice, Cost, Read, cheapest


@dataclass(frozen=True, slots=True)
class Part:
    """``direct``: the runs. ``staged``: whole pages of P with the same bytes in them; ``None`` where runs are pages."""

    dst_rank: int
    src_rank: int
    src_group: int
    dst_group: int
    kinds: tuple[tuple[StateKind, int], ...]
    direct: Read
    staged: Read | None

    def choose(self, transfer: Cost, scatter: Cost) -> Choice:
        return cheapest(self.direct, self.staged, transfer, scatter)


@dataclass(frozen=True, slots=True)
class RankReads:
    """All of one D rank. ``num_descriptors`` and ``kinds`` are what the connector counts when it moves it."""

    dst_rank: int
    num_descriptors: int
    kinds: Mapping[StateKind, int]
    parts: tuple[Part, ...]


def list_reads(
    dsts: Sequence[RankLayout],
    srcs: Sequence[RankLayout],
    dst_block_ids: BlockIds,
    src_block_ids: BlockIds,
    num_tokens: int,
) -> tuple[RankReads, ...]:
    """The reads of every D rank for one request. Raises ``IncompatibleError`` where there is no plan."""
    reads = []
    for dst, plan in zip(dsts, plan_engine(dsts, srcs), strict=True):
        bound = Binder(plan, dst, srcs).bind(src_block_ids, dst_block_ids, num_tokens)
        by_groups: dict[tuple[int, int, int], list[PageCopies]] = defaultdict(list)
        for copies in plan.copies:
            by_groups[copies.src_rank, copies.src_group, copies.dst_group].append(copies)
        layouts = {src.rank: src for src in srcs}
        parts = []
        for (src_rank, src_group, dst_group), some in sorted(by_groups.items()):
            of_part = Binder(Plan(dst.rank, tuple(some)), dst, srcs).bind(src_block_ids, dst_block_ids, num_tokens)
            direct = sum((Read(len(copies), copies.total_bytes) for copies in of_part), Read(0, 0))
            if direct.num_descriptors == 0:
                continue
            layers = _layers_read(layouts[src_rank], src_group, some)
            whole = _whole_pages(layouts[src_rank], layers, src_block_ids, num_tokens)
            if whole is not None and whole.num_descriptors >= direct.num_descriptors:
                whole = None
            parts.append(
                Part(dst.rank, src_rank, src_group, dst_group, tuple(kind_bytes(of_part).items()), direct, whole)
            )
        reads.append(RankReads(dst.rank, sum(map(len, bound)), kind_bytes(bound), tuple(parts)))
    return tuple(reads)


def total_kinds(reads: Iterable[RankReads]) -> dict[StateKind, int]:
    """Bytes by kind of all D ranks together; kinds that a model has none of are left out."""
    kinds: Counter[StateKind] = Counter()
    for rank in reads:
        kinds.update(rank.kinds)
    return dict(kinds)


def seconds(reads: Iterable[RankReads], transfer: Cost, scatter: Cost, *, may_stage: bool) -> float:
    """From the first read until the last D rank has everything; ranks read side by side, a rank one P after another.

    ``may_stage``: each part the cheaper way, not all direct.
    """
    return max((_rank_seconds(rank.parts, transfer, scatter, may_stage) for rank in reads), default=0.0)


def _rank_seconds(parts: Sequence[Part], transfer: Cost, scatter: Cost, may_stage: bool) -> float:
    read: dict[int, Read] = defaultdict(lambda: Read(0, 0))
    scatter_s = 0.0
    for part in parts:
        if may_stage and part.staged is not None and part.choose(transfer, scatter).is_staged:
            read[part.src_rank] += part.staged
            scatter_s += scatter.seconds(part.direct.num_descriptors, part.direct.num_bytes)
        else:
            read[part.src_rank] += part.direct
    return scatter_s + sum(transfer.seconds(one.num_descriptors, one.num_bytes) for one in read.values())


def _layers_read(src: RankLayout, group: int, some: Iterable[PageCopies]) -> list[Layer]:
    """P's layers of a group that copies read from; layers of one group start at different bytes."""
    starts = {pair.src_offset for copies in some for pair in copies.layers}
    return [layer for layer in src.layers if layer.group == group and layer.offset in starts]


def _whole_pages(src: RankLayout, layers: Sequence[Layer], block_ids: BlockIds, num_tokens: int) -> Read | None:
    """The request's pages of these layers, neighbours joined; ``None`` where a page is not one piece of memory."""
    starts, sizes = [], []
    for layer in layers:
        num_bytes = sum(shard.num_bytes for shard in layer.shards)
        if num_bytes != max(_reach(layer)):
            return None
        group = src.groups[layer.group]
        held = [block for block in block_ids[layer.group] if block is not None]
        skipped = len(block_ids[layer.group]) - len(held)
        num_pages = group.num_request_pages(num_tokens) - skipped * group.pages_per_block
        pages = (np.array(held)[:, None] * group.pages_per_block + np.arange(group.pages_per_block)).ravel()[:num_pages]
        starts.append(layer.offset + pages * layer.page_stride)
        sizes.append(np.full(len(pages), num_bytes))
    start, size = np.concatenate(starts), np.concatenate(sizes)
    order = np.argsort(start)
    start, size = start[order], size[order]
    apart = int((start[1:] != start[:-1] + size[:-1]).sum())
    return Read(apart + 1, int(size.sum()))


def _reach(layer: Layer) -> list[int]:
    """Where each shard ends in its page."""
    return [
        shard.offset
        + shard.tensor.item_bytes
        + sum(stride * (extent - 1) for stride, extent in zip(shard.strides, shard.box.shape, strict=True))
        for shard in layer.shards
    ]
