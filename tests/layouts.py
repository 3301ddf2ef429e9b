"""Which engines do the tests pair? A small model, and every way in which an engine may store its state.

``Model`` says what there is, ``Storage`` how one engine keeps it; ``build_engine`` gives the layout of each rank.
The boxes come from ``core.families``; strides, offsets and placement are chosen here.
"""

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from hybrid_connector.core.blocks import Group, Layer, RankLayout
from hybrid_connector.core.families import (
    Attention,
    ElementType,
    Recurrent,
    StatePage,
    TokenPage,
    delta_net,
    kda,
    linear_attention,
    mamba1,
    mamba2,
    short_convolution,
)
from hybrid_connector.core.geometry import Shard

from oracle import Request, num_pages

Order = Literal["HND", "NHD", "LHBNC"]
Placement = Literal["layer", "block", "shared"]
Family = Literal["gdn", "kda", "linear", "mamba1", "mamba2", "short_conv"]

BF16 = ElementType("bfloat16", 2)
FP32 = ElementType("float32", 4)


@dataclass(frozen=True, slots=True)
class Model:
    """``num_attention`` + ``num_recurrent`` layers. ``num_heads`` and ``num_groups`` belong to the recurrent ones:
    value and key heads (GDN), heads and n_groups (Mamba2), heads only (all others). ``family``: its name, or
    the description of one that has none here.
    """

    num_attention: int = 0
    num_kv_heads: int = 1
    content: int = 2
    num_recurrent: int = 0
    family: Family | Recurrent = "gdn"
    num_heads: int = 1
    num_groups: int = 1
    head_dim: int = 2
    state_dim: int = 3
    num_taps: int = 3


@dataclass(frozen=True, slots=True)
class Storage:
    """How an engine stores its state.

    ``order``: memory order of attention pages; LHBNC keeps all pages of a head together.
    ``placement``: pages of a layer together (layer), of a block together (block), or groups in one pool (shared).
    """

    num_ranks: int = 1
    num_stages: int = 1
    page_tokens: int = 16
    pages_per_block: int = 1
    order: Order = "HND"
    placement: Placement = "layer"
    channel_first: bool = True
    page_padding: int = 0
    row_padding: int = 0
    recurrent_first: bool = False
    max_tokens: int = 8

    def __post_init__(self) -> None:
        if self.order == "LHBNC" and self.placement != "layer":
            raise ValueError("LHBNC is a layer-outermost order")

    @property
    def num_blocks(self) -> int:
        """Enough for one request, its state, and two blocks that are somebody else's."""
        return -(-self.max_tokens // (self.page_tokens * self.pages_per_block)) + 3


@dataclass(frozen=True, slots=True)
class _Page:
    """One layer before it is placed: its shards, the bytes between its pages if dense, and all its bytes."""

    name: str
    shards: tuple[Shard, ...]
    stride: int
    total: int


@cache
def build_engine(model: Model, storage: Storage) -> tuple[RankLayout, ...]:
    """The layout of every rank; pipeline stages follow each other, and take turns at the layers."""
    return tuple(
        _build_rank(model, storage, stage, rank)
        for stage in range(storage.num_stages)
        for rank in range(storage.num_ranks)
    )


def _build_rank(model: Model, storage: Storage, stage: int, rank: int) -> RankLayout:
    kv = [_attention_page(model, storage, i, rank) for i in range(stage, model.num_attention, storage.num_stages)]
    recurrent = [
        _recurrent_page(model, storage, i, rank) for i in range(stage, model.num_recurrent, storage.num_stages)
    ]
    kv_group = Group(storage.num_blocks, storage.pages_per_block, storage.page_tokens)
    groups = [(kv_group, kv), (Group(storage.num_blocks), recurrent)]
    if storage.recurrent_first:
        groups.reverse()
    layers: list[Layer] = []
    region_bytes = 8  # something that is not ours comes first
    if storage.placement == "shared":
        ratio = storage.pages_per_block
        kv_stride = max([page.stride for page in kv] + [-(-page.stride // ratio) for page in recurrent], default=1)
        block_bytes = (kv_stride + storage.page_padding) * ratio
        for number, (group, pages) in enumerate(groups):
            for i, page in enumerate(pages):
                offset = region_bytes + i * storage.num_blocks * block_bytes
                layers.append(Layer(page.name, number, offset, block_bytes // group.pages_per_block, page.shards))
        region_bytes += max(len(kv), len(recurrent)) * storage.num_blocks * block_bytes
    else:
        for number, (group, pages) in enumerate(groups):
            num_pages = group.num_blocks * group.pages_per_block
            padding = storage.page_padding
            if storage.placement == "block":
                stride = sum(page.stride + padding for page in pages)
                offset = region_bytes
                for page in pages:
                    layers.append(Layer(page.name, number, offset, stride, page.shards))
                    offset += page.stride + padding
                region_bytes += num_pages * stride
            else:
                for page in pages:
                    # LHBNC pads inside its own strides, which span all pages
                    stride = page.stride if page.total else page.stride + padding
                    layers.append(Layer(page.name, number, region_bytes, stride, page.shards))
                    region_bytes += page.total or num_pages * stride
    number = stage * storage.num_ranks + rank
    return RankLayout(number, region_bytes + 8, tuple(group for group, _ in groups), tuple(layers))


def _attention_page(model: Model, storage: Storage, layer: int, rank: int) -> _Page:
    name = f"layers.{layer}.attn"
    family = Attention(model.num_kv_heads, model.content, BF16)
    item, tokens = BF16.num_bytes, storage.page_tokens
    row = model.content * item + storage.row_padding
    heads = -(-model.num_kv_heads // storage.num_ranks)
    if storage.order == "LHBNC":
        page = tokens * row + storage.page_padding
        all_pages = page * storage.num_blocks * storage.pages_per_block
        place = TokenPage(tokens, (all_pages, row, item))
        return _Page(name, family.shards(name, place, rank=rank, num_ranks=storage.num_ranks), page, heads * all_pages)
    strides = (tokens * row, row) if storage.order == "HND" else (row, heads * row)
    place = TokenPage(tokens, (*strides, item))
    shards = family.shards(name, place, rank=rank, num_ranks=storage.num_ranks)
    return _Page(name, shards, heads * tokens * row, 0)


def _recurrent_page(model: Model, storage: Storage, layer: int, rank: int) -> _Page:
    name = f"layers.{layer}.{model.family if isinstance(model.family, str) else 'other'}"
    family = recurrent(model)
    shards = family.shards(name, StatePage(storage.channel_first), rank=rank, num_ranks=storage.num_ranks)
    return _Page(name, shards, sum(shard.num_bytes for shard in shards), 0)


def recurrent(model: Model) -> Recurrent:
    """What a recurrent layer of the model holds, all ranks together."""
    if isinstance(model.family, Recurrent):
        return model.family
    heads, dim, taps = model.num_heads, model.head_dim, model.num_taps
    elements = {"conv_element": BF16, "temporal_element": FP32}
    match model.family:
        case "gdn":
            return delta_net(
                num_key_heads=model.num_groups,
                num_value_heads=heads,
                key_dim=model.state_dim,
                value_dim=dim,
                num_taps=taps,
                **elements,
            )
        case "kda":
            return kda(num_heads=heads, head_dim=dim, num_taps=taps, **elements)
        case "linear":
            return linear_attention(num_heads=heads, head_dim=dim, element=FP32)
        case "mamba1":
            return mamba1(num_channels=heads * dim, state_dim=model.state_dim, num_taps=taps, **elements)
        case "mamba2":
            return mamba2(
                num_heads=heads,
                head_dim=dim,
                num_groups=model.num_groups,
                state_dim=model.state_dim,
                num_taps=taps,
                **elements,
            )
        case "short_conv":
            return short_convolution(num_channels=heads * dim, num_taps=taps, element=BF16)


def place(
    srcs: Sequence[RankLayout], dsts: Sequence[RankLayout], num_tokens: int, cached_tokens: int = 0, seed: int = 0
) -> Request:
    """A request whose blocks are drawn at random on both sides; groups never share one, as they may share memory."""
    rng = random.Random(seed)

    def draw(layout: RankLayout) -> tuple[tuple[int, ...], ...]:
        free = rng.sample(range(layout.groups[0].num_blocks), layout.groups[0].num_blocks)
        needed = [num_pages(group, num_tokens) for group in layout.groups]
        return tuple(
            tuple(free.pop() for _ in range(-(-pages // group.pages_per_block)))
            for pages, group in zip(needed, layout.groups, strict=True)
        )

    return Request(num_tokens, draw(srcs[0]), draw(dsts[0]), cached_tokens)


def edited(layout: RankLayout, tensor: str, **changes: object) -> RankLayout:
    """``layout`` with fields of one cache tensor changed: ``edited(rank, "layers.0.attn.kv", dtype="float16")``."""

    def edit(shard: Shard) -> Shard:
        if shard.tensor.name != tensor:
            return shard
        return dataclasses.replace(shard, tensor=dataclasses.replace(shard.tensor, **changes))  # type: ignore[arg-type]

    layers = tuple(dataclasses.replace(layer, shards=tuple(map(edit, layer.shards))) for layer in layout.layers)
    return dataclasses.replace(layout, layers=layers)
