"""What does each D rank read for one request, from which P rank, and would whole pages be cheaper?

1. ``Part``: what one D rank reads from one P rank for the layers of one pair of cache groups.
2. ``list_reads``: binds the plan of two engines to a request's blocks, and counts runs and the pages around them.
3. ``seconds``: how long a D rank's parts take, each read the cheaper way.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hybrid_connector.core.blocks import BlockIds, RankLayout
from hybrid_connector.core.geometry import StateKind
from hybrid_connector.core.planning import plan_engine
from hybrid_connector.transport.binding import Binder, BoundPart, join_parts, kind_bytes
from hybrid_connector.transport.cost import Cost, Read, Weighed, choose


@dataclass(frozen=True, slots=True)
class Part:
    """What D's rank reads from one P rank for one pair of cache groups."""

    dst_rank: int
    bound: BoundPart

    @property
    def src_rank(self) -> int:
        return self.bound.copies.src_rank

    def choose(self, transfer: Cost, scatter: Cost) -> Weighed:
        """The engine's own choice."""
        return choose(self.bound, transfer, scatter)


@dataclass(frozen=True, slots=True)
class RankReads:
    """All of one D rank. ``num_descriptors``, where nothing is staged, and ``kinds`` are what the connector counts."""

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
        bound = Binder(plan, dst, srcs).bind_parts(src_block_ids, dst_block_ids, num_tokens)
        copies = tuple(map(join_parts, bound))
        parts = tuple(Part(dst.rank, part) for of_rank in bound for part in of_rank)
        reads.append(RankReads(dst.rank, sum(map(len, copies)), kind_bytes(copies), parts))
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
        weighed = part.choose(transfer, scatter)
        if may_stage and weighed.is_staged and weighed.staged is not None:
            read[part.src_rank] += weighed.staged
            scatter_s += scatter.seconds(weighed.direct.num_descriptors, weighed.direct.num_bytes)
        else:
            read[part.src_rank] += weighed.direct
    return scatter_s + sum(transfer.seconds(one.num_descriptors, one.num_bytes) for one in read.values())
