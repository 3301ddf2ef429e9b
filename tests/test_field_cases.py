"""Do the planner and the binder serve the engines and requests that users reported? (CASES.md, cases 16 and 18)

Real sizes, so the checks are those of the sweep: identities of bytes in arrays, instead of the bytes themselves.
"""

from collections.abc import Sequence

import numpy as np
import pytest

from hybrid_connector.core.blocks import Group, Layer, RankLayout
from hybrid_connector.core.families import Attention, ElementType, StatePage, TokenPage, delta_net
from hybrid_connector.core.geometry import StateKind
from hybrid_connector.core.planning import plan_transfer
from hybrid_connector.tools.byte_oracle import NO_STATE, Arrival, Ints, Ranges, follow, identities
from hybrid_connector.transport.binding import Binder, BoundCopies, kind_bytes

BF16, FP32 = ElementType("bfloat16", 2), ElementType("float32", 4)

NUM_KV_HEADS, CONTENT = 2, 8
STATE = delta_net(
    num_key_heads=8,
    num_value_heads=32,
    key_dim=128,
    value_dim=128,
    num_taps=3,
    conv_element=BF16,
    temporal_element=FP32,
)
BLOCK_TOKENS = {1: 4176, 4: 1056}
STATE_BYTES = {1: 2_134_016, 4: 533_504}
"""By TP size: tokens of a block, bytes of a state page (case 16)."""

NUMBERS = {"attn.kv": 0, "gdn.conv.q": 1, "gdn.conv.k": 2, "gdn.conv.v": 3, "gdn.temporal": 4}


def engine(num_ranks: int, page_tokens: int, num_blocks: int, *, channel_first: bool = True) -> tuple[RankLayout, ...]:
    """An attention and a gated delta net layer; blocks as long as vLLM makes them for this TP size."""
    block_tokens = BLOCK_TOKENS[num_ranks]
    pages_per_block = block_tokens // page_tokens
    assert pages_per_block * page_tokens == block_tokens
    heads = -(-NUM_KV_HEADS // num_ranks)
    row = CONTENT * BF16.num_bytes
    page = TokenPage(page_tokens, (page_tokens * row, row, BF16.num_bytes))
    page_bytes = heads * page_tokens * row
    state_start = num_blocks * pages_per_block * page_bytes
    layouts = []
    for rank in range(num_ranks):
        kv = Attention(NUM_KV_HEADS, CONTENT, BF16).shards("attn", page, rank=rank, num_ranks=num_ranks)
        state = STATE.shards("gdn", StatePage(channel_first), rank=rank, num_ranks=num_ranks)
        state_bytes = sum(shard.num_bytes for shard in state)
        assert state_bytes == STATE_BYTES[num_ranks]
        layers = Layer("attn", 0, 0, page_bytes, kv), Layer("gdn", 1, state_start, state_bytes, state)
        groups = Group(num_blocks, pages_per_block, page_tokens), Group(2)
        layouts.append(RankLayout(rank, state_start + 2 * state_bytes, groups, layers))
    return tuple(layouts)


def held(layout: RankLayout, blocks: Sequence[Sequence[int]], num_tokens: int) -> Ints:
    return identities(layout, NUMBERS, blocks, [group.num_request_pages(num_tokens) for group in layout.groups])


def arrival(bound: Sequence[BoundCopies], srcs: Sequence[RankLayout], dst: RankLayout, held_by: list[Ints]) -> Arrival:
    ranges = [
        Ranges(copies.src_rank, *(array.astype(np.int64) for array in (copies.src, copies.dst, copies.num_bytes)))
        for copies in bound
    ]
    return follow(ranges, dict(enumerate(held_by)), dst.region_bytes)


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(1, 4), (4, 1)])
@pytest.mark.parametrize("kernel_pages", [True, False])
def test_blocks_of_1056_and_4176_tokens(src_tp: int, dst_tp: int, kernel_pages: bool) -> None:
    """Case 16, with kernel pages of 16 tokens on both sides, and with whole blocks as pages."""
    num_tokens = 5000
    blocks = {1: ((1, 0), (1,)), 4: ((5, 0, 3, 1, 4), (0,))}
    page_tokens = {tp: 16 if kernel_pages else BLOCK_TOKENS[tp] for tp in (1, 4)}
    srcs = engine(src_tp, page_tokens[src_tp], 6, channel_first=True)
    dsts = engine(dst_tp, page_tokens[dst_tp], 6, channel_first=False)
    sources = [held(src, blocks[src_tp], num_tokens) for src in srcs]
    src_tokens = srcs[0].groups[0].num_request_pages(num_tokens) * page_tokens[src_tp]
    for dst in dsts:
        bound = Binder(plan_transfer(dst, srcs), dst, srcs).bind(blocks[src_tp], blocks[dst_tp], num_tokens)
        got, want = arrival(bound, srcs, dst, sources), held(dst, blocks[dst_tp], num_tokens)
        # slots that only D's last page has stay as they are
        kv = want < 1 << 32
        past = kv & (want >= src_tokens * NUM_KV_HEADS * CONTENT * BF16.num_bytes)
        want[past] = NO_STATE
        assert (got.writes == (want != NO_STATE)).all()
        assert (got.identities == want).all()


CACHED_PAGES = (0, 3, 9)


@pytest.mark.parametrize("cached", CACHED_PAGES)
@pytest.mark.parametrize(("src_tp", "dst_tp"), [(1, 1), (1, 4), (4, 1)])
@pytest.mark.parametrize("src_page_tokens", [16, 48])
def test_d_already_holds_part_of_the_prompt(src_tp: int, dst_tp: int, cached: int, src_page_tokens: int) -> None:
    """Case 18: of 10 kernel pages D holds the first few; the rest moves, and the recurrent state once."""
    num_tokens = 160
    srcs, dsts = engine(src_tp, src_page_tokens, 2), engine(dst_tp, 16, 2)
    blocks = (1,), (1,)
    sources = [held(src, blocks, num_tokens) for src in srcs]
    state_bytes = attention_bytes = 0
    for dst in dsts:
        binder = Binder(plan_transfer(dst, srcs), dst, srcs)
        bound = binder.bind(blocks, blocks, num_tokens, first_tokens=16 * cached)
        want = held(dst, blocks, num_tokens)
        first = 16 * cached * NUM_KV_HEADS * CONTENT * BF16.num_bytes
        want[(want >= 0) & (want < first)] = NO_STATE
        got = arrival(bound, srcs, dst, sources)
        assert (got.writes == (want != NO_STATE)).all()
        assert (got.identities == want).all()
        kinds = kind_bytes(bound)
        attention_bytes += kinds[StateKind.ATTENTION]
        state_bytes += kinds[StateKind.CONV] + kinds[StateKind.TEMPORAL]
    assert state_bytes == STATE_BYTES[1]
    copies_of_a_head = max(1, dst_tp // NUM_KV_HEADS)
    page_bytes = 16 * NUM_KV_HEADS * CONTENT * BF16.num_bytes
    assert attention_bytes == (10 - cached) * page_bytes * copies_of_a_head
