"""How many blocks and pages does a request take, and which layouts are refused?"""

import pytest

from hybrid_connector.core.blocks import Group, Layer, RankLayout
from hybrid_connector.core.geometry import Box, CacheTensor, Shard, StateKind, dense_shard

from refusals import refused

KV = CacheTensor("kv", StateKind.ATTENTION, ("H", "N", "C"), (4, None, 2), "bfloat16", 2)
CONV = CacheTensor("conv", StateKind.CONV, ("channel", "tap"), (8, 3), "bfloat16", 2)
PAGE = dense_shard(KV, Box.of((0, 2), (0, 16), (0, 2)))  # 128 bytes
STATE = dense_shard(CONV, Box.of((0, 8), (0, 3)))  # 48 bytes
ATTENTION, RECURRENT = Group(4, 3, 16), Group(4)


@pytest.mark.parametrize(
    ("num_tokens", "blocks", "pages"),
    [(0, 0, 0), (1, 1, 1), (16, 1, 1), (17, 1, 2), (48, 1, 3), (49, 2, 4), (96, 2, 6), (97, 3, 7)],
)
def test_request_blocks_and_pages(num_tokens: int, blocks: int, pages: int) -> None:
    assert ATTENTION.block_tokens == 48
    assert ATTENTION.num_request_blocks(num_tokens) == blocks
    assert ATTENTION.num_request_pages(num_tokens) == pages


@pytest.mark.parametrize("num_tokens", [0, 1, 10_000])
def test_a_recurrent_state_is_one_page(num_tokens: int) -> None:
    assert RECURRENT.block_tokens is None
    assert RECURRENT.num_request_blocks(num_tokens) == 1
    assert RECURRENT.num_request_pages(num_tokens) == 1


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (
            (0, 1, 16),
            "expected positive num_blocks and pages_per_block, "
            "got Group(num_blocks=0, pages_per_block=1, page_tokens=16)",
        ),
        (
            (4, 0, 16),
            "expected positive num_blocks and pages_per_block, "
            "got Group(num_blocks=4, pages_per_block=0, page_tokens=16)",
        ),
        ((4, 2, None), "a recurrent state lies in one page, got 2 pages per block"),
        ((4, 1, 0), "expected page_tokens > 0, got 0"),
    ],
)
def test_group_refuses(numbers: tuple[int, int, int | None], message: str) -> None:
    with refused(message):
        Group(*numbers)


@pytest.mark.parametrize(
    ("offset", "page_stride", "shards", "message"),
    [
        (-1, 128, (PAGE,), "a: expected offset >= 0 and page_stride > 0, got -1, 128"),
        (0, 0, (PAGE,), "a: expected offset >= 0 and page_stride > 0, got 0, 0"),
        (0, 128, (), "a: a layer holds at least one tensor"),
    ],
)
def test_layer_refuses(offset: int, page_stride: int, shards: tuple[Shard, ...], message: str) -> None:
    with refused(message):
        Layer("a", 0, offset, page_stride, shards)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([Layer("a", 2, 0, 128, (PAGE,))], "a: group 2 of 2"),
        ([Layer("a", -1, 0, 128, (PAGE,))], "a: group -1 of 2"),
        ([Layer("a", 1, 0, 48, (STATE,)), Layer("b", 1, 0, 48, (STATE,))], "conv: held twice by rank 3"),
        ([Layer("a", 1, 0, 48, (STATE, STATE))], "conv: held twice by rank 3"),
        ([Layer("a", 0, 0, 48, (STATE,))], "conv: a page holds 1 tokens, its group says 16"),
        ([Layer("a", 1, 0, 128, (PAGE,))], "kv: a page holds 16 tokens, its group says None"),
        (
            [Layer("a", 0, 0, 256, (dense_shard(KV, Box.of((0, 2), (0, 8), (0, 2))),))],
            "kv: a page holds 8 tokens, its group says 16",
        ),
        ([Layer("a", 0, 0, 127, (PAGE,))], "kv: pages 127 bytes apart overlap"),
        ([Layer("a", 0, 1, 128, (PAGE,))], "kv: the last page ends at byte 1537, the region has 1536"),
        ([Layer("a", 0, 0, 140, (PAGE,))], "kv: the last page ends at byte 1668, the region has 1536"),
    ],
)
def test_rank_layout_refuses(layers: list[Layer], message: str) -> None:
    with refused(message):
        RankLayout(3, 1536, (ATTENTION, RECURRENT), tuple(layers))


def test_pages_may_fill_the_region_interleave_and_share_memory() -> None:
    head_outermost = Shard(KV, Box.of((0, 2), (0, 16), (0, 2)), 0, (12 * 64, 4, 2))
    RankLayout(0, 1536, (ATTENTION, RECURRENT), (Layer("a", 0, 0, 64, (head_outermost,)),))
    RankLayout(0, 1536, (ATTENTION, RECURRENT), (Layer("a", 0, 0, 128, (PAGE,)), Layer("b", 1, 0, 384, (STATE,))))
    with pytest.raises(ValueError, match="pages 65 bytes apart overlap"):
        RankLayout(0, 4096, (ATTENTION, RECURRENT), (Layer("a", 0, 0, 65, (head_outermost,)),))
