"""How does a rank store its layers' pages?

1. ``Group``: layers that share a block table; a logical block is ``pages_per_block`` pages (kernel blocks).
2. ``Layer``: where the pages of one layer start, how far apart they lie, and what one page holds.
3. ``RankLayout``: all groups and layers of one rank.

Page ``j`` of block ``b`` starts ``layer.offset + (b * pages_per_block + j) * layer.page_stride`` bytes into
the rank's region.
"""

from dataclasses import dataclass

from hybrid_connector.core.geometry import Shard, nest

BlockIds = tuple[tuple[int | None, ...], ...]
"""A request's logical blocks, per group, in order; ``None`` where it needs no block (any more): outside a window."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers with one block table.

    ``page_tokens``: tokens in one page; ``None`` for recurrent groups, whose single page holds the whole state.
    """

    num_blocks: int
    pages_per_block: int = 1
    page_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.num_blocks <= 0 or self.pages_per_block <= 0:
            raise ValueError(f"expected positive num_blocks and pages_per_block, got {self}")
        if self.page_tokens is None:
            if self.pages_per_block != 1:
                raise ValueError(f"a recurrent state lies in one page, got {self.pages_per_block} pages per block")
        elif self.page_tokens <= 0:
            raise ValueError(f"expected page_tokens > 0, got {self.page_tokens}")

    @property
    def block_tokens(self) -> int | None:
        """Tokens in one logical block; ``None`` for recurrent groups."""
        return None if self.page_tokens is None else self.page_tokens * self.pages_per_block

    def num_request_blocks(self, num_tokens: int) -> int:
        """Logical blocks that hold the state of a request of ``num_tokens`` tokens."""
        return 1 if self.block_tokens is None else -(-num_tokens // self.block_tokens)

    def num_request_pages(self, num_tokens: int) -> int:
        """Pages that hold the state of a request of ``num_tokens`` tokens."""
        return 1 if self.page_tokens is None else -(-num_tokens // self.page_tokens)


@dataclass(frozen=True, slots=True)
class Layer:
    """The pages of one layer: ``offset`` of page 0 in the region, ``page_stride`` between pages, all in bytes."""

    name: str
    group: int
    offset: int
    page_stride: int
    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        if self.offset < 0 or self.page_stride <= 0:
            raise ValueError(
                f"{self.name}: expected offset >= 0 and page_stride > 0, got {self.offset}, {self.page_stride}"
            )
        if not self.shards:
            raise ValueError(f"{self.name}: a layer holds at least one tensor")


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Everything one rank holds, address-free: offsets count from the start of its one region."""

    rank: int
    region_bytes: int
    groups: tuple[Group, ...]
    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for layer in self.layers:
            if not 0 <= layer.group < len(self.groups):
                raise ValueError(f"{layer.name}: group {layer.group} of {len(self.groups)}")
            group = self.groups[layer.group]
            num_pages = group.num_blocks * group.pages_per_block
            last_page = layer.offset + (num_pages - 1) * layer.page_stride
            for shard in layer.shards:
                name = shard.tensor.name
                if name in seen:
                    raise ValueError(f"{name}: held twice by rank {self.rank}")
                seen.add(name)
                paged = shard.tensor.paged_axis is not None
                if paged != (group.page_tokens is not None) or (paged and shard.page_extent != group.page_tokens):
                    raise ValueError(
                        f"{name}: a page holds {shard.page_extent} tokens, its group says {group.page_tokens}"
                    )
                axes = zip((*shard.strides, layer.page_stride), (*shard.box.shape, num_pages), strict=True)
                if not nest(axes, shard.tensor.item_bytes):
                    raise ValueError(f"{name}: pages {layer.page_stride} bytes apart overlap")
                reach = shard.offset + shard.tensor.item_bytes
                reach += sum(stride * (n - 1) for stride, n in zip(shard.strides, shard.box.shape, strict=True))
                if last_page + reach > self.region_bytes:
                    raise ValueError(
                        f"{name}: the last page ends at byte {last_page + reach}, the region has {self.region_bytes}"
                    )
