"""Which caches have the two engines of a loopback? Small ones with every kind of state, in different orders.

P keeps a layer's pages together, D a block's, so that a transfer is a plan and no plain copy.
"""

from dataclasses import dataclass

from hybrid_connector.core.blocks import BlockIds, Group, Layer, RankLayout
from hybrid_connector.core.families import Attention, ElementType, StatePage, TokenPage, delta_net

PAGE_TOKENS = 64
_NUM_LAYERS = 3  # of each of the two groups
_NUM_BLOCKS = 6
_BF16, _FP32 = ElementType("bfloat16", 2), ElementType("float32", 4)
_ATTENTION = Attention(num_kv_heads=2, content=128, element=_BF16)
_RECURRENT = delta_net(
    num_key_heads=2,
    num_value_heads=4,
    key_dim=64,
    value_dim=64,
    num_taps=3,
    conv_element=_BF16,
    temporal_element=_FP32,
)


@dataclass(frozen=True, slots=True)
class MadeUp:
    """A rank's caches, and the blocks in them of a request that has one block in each group."""

    layout: RankLayout
    block_ids: BlockIds


def made_up_prefill() -> MadeUp:
    return MadeUp(_layout(layers_apart=True), ((4,), (2,)))


def made_up_decode() -> MadeUp:
    return MadeUp(_layout(layers_apart=False), ((1,), (5,)))


def _layout(*, layers_apart: bool) -> RankLayout:
    """Layer ``l`` of block ``b`` begins at ``l * layer_stride + b * page_stride``, in both groups."""
    item = _ATTENTION.element.num_bytes
    token = _ATTENTION.content * item
    page = TokenPage(PAGE_TOKENS, (PAGE_TOKENS * token, token, item))
    state, numbers = StatePage(channel_first=True), range(_NUM_LAYERS)
    shards = (
        [_ATTENTION.shards(f"layers.{number}.attention", page, rank=0, num_ranks=1) for number in numbers],
        [_RECURRENT.shards(f"layers.{number}.recurrent", state, rank=0, num_ranks=1) for number in numbers],
    )
    page_bytes = max(sum(shard.num_bytes for shard in layers[0]) for layers in shards)
    layer_stride = page_bytes * (_NUM_BLOCKS if layers_apart else 1)
    page_stride = page_bytes * (1 if layers_apart else _NUM_LAYERS)
    layers = tuple(
        Layer(f"groups.{group}.layers.{number}", group, number * layer_stride, page_stride, held)
        for group, of_group in enumerate(shards)
        for number, held in enumerate(of_group)
    )
    groups = Group(_NUM_BLOCKS, 1, PAGE_TOKENS), Group(_NUM_BLOCKS, 1, None)
    return RankLayout(0, page_bytes * _NUM_LAYERS * _NUM_BLOCKS, groups, layers)
