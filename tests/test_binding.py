"""Does the binder say the same as plain loops over pages, runs and layers, in as few copies as possible?"""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from hybrid_connector.core.blocks import Group, Layer, RankLayout
from hybrid_connector.core.errors import TransferError
from hybrid_connector.core.families import Attention, ElementType, StatePage, TokenPage, delta_net
from hybrid_connector.core.geometry import Box, CacheTensor, Shard, StateKind
from hybrid_connector.core.lowering import Run
from hybrid_connector.core.planning import LayerPair, PageCopies, Plan, plan_transfer
from hybrid_connector.transport.binding import Binder, BoundCopies, kind_bytes

from transport_suite import BlockIds, Storage, noise, paint

BF16 = ElementType("bfloat16", 2)

Origins = dict[int, tuple[int, int]]  # address on D -> P rank, address on P


def place(layout: RankLayout, group: int, block_ids: BlockIds, page: int) -> int:
    """The request's page, counted from page 0 of a layer."""
    pages_per_block = layout.groups[group].pages_per_block
    return block_ids[group][page // pages_per_block] * pages_per_block + page % pages_per_block


def origins(
    plan: Plan,
    dst: RankLayout,
    srcs: Sequence[RankLayout],
    src_blocks: BlockIds,
    dst_blocks: BlockIds,
    num_tokens: int,
    first_tokens: int = 0,
) -> Origins:
    """Where each byte comes from, by the formulas of ``blocks`` and ``planning`` alone."""
    layouts = {src.rank: src for src in srcs}
    found: Origins = {}
    for copies in plan.copies:
        src = layouts[copies.src_rank]
        dst_group = dst.groups[copies.dst_group]
        num_src = src.groups[copies.src_group].num_request_pages(num_tokens)
        num_dst = dst_group.num_request_pages(num_tokens)
        first = 0 if dst_group.page_tokens is None else first_tokens // dst_group.page_tokens
        for period in range(num_dst):
            for run in copies.runs:
                src_page = period * copies.src_pages + run.src_page
                dst_page = period * copies.dst_pages + run.dst_page
                if src_page >= num_src or not first <= dst_page < num_dst:
                    continue
                src_place = place(src, copies.src_group, src_blocks, src_page)
                dst_place = place(dst, copies.dst_group, dst_blocks, dst_page)
                for pair in copies.layers:
                    start = pair.dst_offset + dst_place * pair.dst_page_stride + run.dst_offset
                    origin = pair.src_offset + src_place * pair.src_page_stride + run.src_offset
                    for byte in range(run.num_bytes):
                        assert start + byte not in found
                        found[start + byte] = (copies.src_rank, origin + byte)
    return found


def spelled_out(bound: Sequence[BoundCopies]) -> Origins:
    found: Origins = {}
    for copies in bound:
        columns = (copies.src.tolist(), copies.dst.tolist(), copies.num_bytes.tolist())
        for src, dst, num_bytes in zip(*columns, strict=True):
            for byte in range(num_bytes):
                assert dst + byte not in found
                found[dst + byte] = (copies.src_rank, src + byte)
    return found


def fewest_copies(found: Origins) -> int:
    return sum(found.get(dst - 1) != (rank, src - 1) for dst, (rank, src) in found.items())


STORAGES = (
    Storage(1),
    Storage(2, padding=8),
    Storage(2, token_first=True, channel_first=False),
    Storage(4, page_tokens=4, pages_per_block=4, padding=24),
    Storage(1, page_tokens=12, pages_per_block=1),
    Storage(2, page_tokens=16, pages_per_block=1, padding=8),
)


@pytest.mark.parametrize("dst_storage", STORAGES)
@pytest.mark.parametrize("src_storage", STORAGES)
def test_same_bytes_as_plain_loops(src_storage: Storage, dst_storage: Storage) -> None:
    srcs = src_storage.layouts()
    dst = dst_storage.layout(dst_storage.num_ranks - 1)
    plan = plan_transfer(dst, srcs)
    binder = Binder(plan, dst, srcs)
    for num_tokens in (1, 4, 13, 48):
        src_blocks, dst_blocks = src_storage.draw_blocks(num_tokens, 1), dst_storage.draw_blocks(num_tokens, 2)
        for first_tokens in range(0, num_tokens + 1, 4 * dst_storage.page_tokens):
            bound = binder.bind(src_blocks, dst_blocks, num_tokens, first_tokens)
            want = origins(plan, dst, srcs, src_blocks, dst_blocks, num_tokens, first_tokens)
            assert spelled_out(bound) == want
            assert sum(map(len, bound)) == fewest_copies(want)
            assert sum(kind_bytes(bound).values()) == len(want)


@pytest.mark.parametrize("seed", range(40))
def test_same_bytes_as_plain_loops_for_random_plans(seed: int) -> None:
    """Plans that no planner would make: any number of runs, layers of any stride, any period."""
    rng = random.Random(seed)
    src_pages, dst_pages = rng.randint(1, 3), rng.randint(1, 3)
    tokens = 12
    page_bytes = 32
    dst_group = Group(8, rng.randint(1, 3), tokens // dst_pages)
    src_group = Group(8, rng.randint(1, 3), tokens // src_pages)
    num_layers = rng.randint(1, 4)
    strides = [page_bytes + 8 * rng.randint(0, 1) for _ in range(num_layers)]
    srcs = [RankLayout(rank, 1 << 20, (src_group,), ()) for rank in range(2)]
    dst = RankLayout(0, 1 << 20, (dst_group,), ())
    layer_bytes = 8 * 3 * 48
    layers = tuple(
        LayerPair(7 + i * layer_bytes, strides[-i], 5 + i * layer_bytes, strides[i]) for i in range(num_layers)
    )
    runs: dict[int, list[Run]] = {0: [], 1: []}
    for dst_page in range(dst_pages):
        for start in range(0, page_bytes, 4):
            if (rank := rng.choice([0, 0, 1, None])) is not None:
                runs[rank].append(Run(dst_page, start, rng.randrange(src_pages), rng.choice([start, start ^ 4]), 4))
    kinds = {rank: ((StateKind.ATTENTION, 4 * len(found)),) for rank, found in runs.items()}
    plan = Plan(
        0,
        tuple(
            PageCopies(rank, 0, 0, src_pages, dst_pages, tuple(found), kinds[rank], layers)
            for rank, found in runs.items()
            if found
        ),
    )
    num_tokens = rng.randint(1, 8 * 4)
    binder = Binder(plan, dst, srcs)
    src_blocks = (tuple(rng.sample(range(8), src_group.num_request_blocks(num_tokens))),)
    dst_blocks = (tuple(rng.sample(range(8), dst_group.num_request_blocks(num_tokens))),)
    first_tokens = rng.randint(0, num_tokens // (tokens // dst_pages)) * (tokens // dst_pages)
    bound = binder.bind(src_blocks, dst_blocks, num_tokens, first_tokens)
    want = origins(plan, dst, srcs, src_blocks, dst_blocks, num_tokens, first_tokens)
    assert spelled_out(bound) == want
    assert sum(map(len, bound)) == fewest_copies(want)
    assert sum(kind_bytes(bound).values()) == len(want)


@pytest.mark.parametrize("dst_storage", STORAGES)
@pytest.mark.parametrize("src_storage", STORAGES)
def test_every_byte_comes_from_its_coordinates(src_storage: Storage, dst_storage: Storage) -> None:
    num_tokens = 45
    first_tokens = dst_storage.page_tokens
    srcs = src_storage.layouts()
    src_blocks, dst_blocks = src_storage.draw_blocks(num_tokens, 3), dst_storage.draw_blocks(num_tokens, 4)
    memory = {src.rank: paint(src, noise(src.region_bytes, src.rank), src_blocks, num_tokens).data for src in srcs}
    for dst in dst_storage.layouts():
        before = noise(dst.region_bytes, 99)
        after = before.copy()
        for copies in Binder(plan_transfer(dst, srcs), dst, srcs).bind(
            src_blocks, dst_blocks, num_tokens, first_tokens
        ):
            columns = (copies.src.tolist(), copies.dst.tolist(), copies.num_bytes.tolist())
            for start, target, size in zip(*columns, strict=True):
                after[target : target + size] = memory[copies.src_rank][start : start + size]
        want = paint(dst, before, dst_blocks, num_tokens, first_tokens)
        assert not np.flatnonzero((after != want.data) & ~want.is_tail).size


def attention_layout(num_layers: int, group: Group, *, block_outermost: bool = False, num_heads: int = 1) -> RankLayout:
    """``num_layers`` layers of one group; tokens of 64 bytes and head."""
    assert group.page_tokens is not None
    page_bytes = num_heads * 64 * group.page_tokens
    num_pages = group.num_blocks * group.pages_per_block
    layers = []
    for i in range(num_layers):
        page = TokenPage(group.page_tokens, (64 * group.page_tokens, 64, 2))
        (shard,) = Attention(num_heads, 32, BF16).shards(f"layers.{i}", page, rank=0, num_ranks=1)
        if block_outermost:
            layers.append(Layer(shard.tensor.name, 0, i * page_bytes, num_layers * page_bytes, (shard,)))
        else:
            layers.append(Layer(shard.tensor.name, 0, i * num_pages * page_bytes, page_bytes, (shard,)))
    return RankLayout(0, num_layers * num_pages * page_bytes, (group,), tuple(layers))


def test_consecutive_blocks_are_one_copy_per_layer() -> None:
    """Case 11: 60 layers, 2,000 blocks in one run."""
    src = attention_layout(60, Group(2001, 1, 16))
    dst = attention_layout(60, Group(2008, 1, 16))
    src_blocks, dst_blocks = list(range(2000)), list(range(5, 2005))
    (copies,) = Binder(plan_transfer(dst, [src]), dst, [src]).bind((src_blocks,), (dst_blocks,), 32_000)
    assert len(copies) == 60
    assert copies.num_bytes.tolist() == [2000 * 16 * 64] * 60
    assert kind_bytes([copies]) == {StateKind.ATTENTION: 60 * 2000 * 16 * 64}


def test_a_block_of_all_layers_is_one_copy_where_blocks_are_outermost() -> None:
    src = attention_layout(60, Group(10, 1, 16), block_outermost=True)
    (copies,) = Binder(plan_transfer(src, [src]), src, [src]).bind(([2, 3, 7],), ([1, 2, 8],), 48)
    assert copies.num_bytes.tolist() == [2 * 60 * 1024, 60 * 1024]


def test_pages_of_a_block_are_joined_but_not_beyond_what_exists() -> None:
    layout = attention_layout(1, Group(8, 4, 16))
    binder = Binder(plan_transfer(layout, [layout]), layout, [layout])
    (copies,) = binder.bind(([3, 1],), ([2, 6],), 100)
    assert copies.num_bytes.tolist() == [4 * 1024, 3 * 1024]
    (copies,) = binder.bind(([3, 1],), ([2, 6],), 100, 48)
    assert copies.dst.tolist() == [(2 * 4 + 3) * 1024, 6 * 4 * 1024]
    assert copies.num_bytes.tolist() == [1024, 3 * 1024]


def test_blocks_that_run_backwards_on_both_sides_are_joined() -> None:
    layout = attention_layout(1, Group(8, 1, 16))
    (copies,) = Binder(plan_transfer(layout, [layout]), layout, [layout]).bind(([3, 2, 1],), ([7, 6, 5],), 48)
    assert (copies.src.tolist(), copies.dst.tolist(), copies.num_bytes.tolist()) == ([1024], [5 * 1024], [3 * 1024])


def test_base_addresses_are_added() -> None:
    layout = attention_layout(1, Group(8, 1, 16))
    plan = plan_transfer(layout, [layout])
    binder = Binder(plan, layout, [layout], dst_base=2**62, src_bases={0: 2**47})
    (copies,) = binder.bind(([3],), ([5],), 16)
    assert (copies.src.tolist(), copies.dst.tolist()) == ([2**47 + 3 * 1024], [2**62 + 5 * 1024])
    for base in (-1, 2**63, 2**64, 2**63 - 1):
        with pytest.raises(TransferError, match="P rank 0: no region of 8192 bytes lies at address"):
            Binder(plan, layout, [layout], src_bases={0: base})
        with pytest.raises(TransferError, match="D rank 0: no region"):
            Binder(plan, layout, [layout], dst_base=base)


def hybrid_layout(num_recurrent: int, num_attention: int, num_ranks: int, rank: int) -> RankLayout:
    """Kernel blocks of 64 tokens, logical blocks of 2,112, conv and temporal state in one page."""
    groups = (Group(4), Group(8, 33, 64))
    layers = []
    offset = 0
    for i in range(num_recurrent):
        family = delta_net(
            num_key_heads=16,
            num_value_heads=64,
            key_dim=128,
            value_dim=128,
            num_taps=3,
            conv_element=BF16,
            temporal_element=ElementType("float32", 4),
        )
        shards = family.shards(f"gdn.{i}", StatePage(channel_first=True), rank=rank, num_ranks=num_ranks)
        page_bytes = sum(shard.num_bytes for shard in shards)
        layers.append(Layer(f"gdn.{i}", 0, offset, page_bytes, shards))
        offset += 4 * page_bytes
    for i in range(num_attention):
        page = TokenPage(64, (64 * 1024, 1024, 2))
        (shard,) = Attention(2, 512, BF16).shards(f"attn.{i}", page, rank=rank, num_ranks=num_ranks)
        layers.append(Layer(f"attn.{i}", 1, offset, shard.num_bytes, (shard,)))
        offset += 8 * 33 * shard.num_bytes
    return RankLayout(rank, offset, groups, tuple(layers))


@pytest.mark.parametrize(
    ("num_src", "num_dst", "num_copies"),
    [
        (1, 1, 69 + 23 * 4),  # a state page per layer; a logical block per layer
        (1, 2, 69 * 4 + 23 * 128),  # q, k, v, temporal per layer; a kernel block of one head per layer
        (2, 1, 2 * (69 * 4 + 23 * 128)),
    ],
)
def test_number_of_copies_of_a_92_layer_request(num_src: int, num_dst: int, num_copies: int) -> None:
    srcs = [hybrid_layout(69, 23, num_src, rank) for rank in range(num_src)]
    dst = hybrid_layout(69, 23, num_dst, 0)
    bound = Binder(plan_transfer(dst, srcs), dst, srcs).bind(((1,), (0, 2, 4, 6)), ((2,), (7, 5, 3, 1)), 8192)
    assert sum(map(len, bound)) == num_copies
    assert kind_bytes(bound) == {
        StateKind.ATTENTION: 23 * 8192 * 2048 // num_dst,
        StateKind.CONV: 69 * (16 * 128 * 2 + 64 * 128) * 3 * 2 // num_dst,
        StateKind.TEMPORAL: 69 * 64 * 128 * 128 * 4 // num_dst,
    }


def test_a_rank_that_has_nothing_to_send_is_left_out() -> None:
    """P rank 1 holds attention only, which D has; P rank 0 sends the state, whatever D has."""
    layout = Storage(1).layout(0)
    recurrent = replace(layout, layers=tuple(layer for layer in layout.layers if layer.group == 0))
    paged = replace(layout, rank=1, layers=tuple(layer for layer in layout.layers if layer.group == 1))
    srcs = [recurrent, paged]
    binder = Binder(plan_transfer(layout, srcs), layout, srcs)
    blocks = ((0,), (0, 1, 2))
    assert [copies.src_rank for copies in binder.bind(blocks, blocks, 48, 40)] == [0, 1]
    (copies,) = binder.bind(blocks, blocks, 48, 48)
    assert copies.src_rank == 0
    assert kind_bytes([copies]).keys() == {StateKind.CONV, StateKind.TEMPORAL}


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (((0,),), "expected block ids for 2 groups, got 1"),
        (((0,), (1, 2, 3), ()), "expected block ids for 2 groups, got 3"),
        (((), (1, 2, 3)), "group 0: 45 tokens need 1 block ids, got 0"),
        (((0,), (1, 2)), "group 1: 45 tokens need 3 block ids, got 2"),
        (((0,), (1, 2, 3, 4)), "group 1: 45 tokens need 3 block ids, got 4"),
        (((12,), (1, 2, 3)), r"group 0: expected block ids in \[0, 12\), got 12 at 0"),
        (((0,), (1, -2, 3)), r"group 1: expected block ids in \[0, 12\), got -2 at 1"),
        (((0,), (1, 2, 2**70)), r"group 1: expected block ids in \[0, 12\), got 1180591620717411303424 at 2"),
        (((0,), (1.0, 2.0, 3.0)), "group 1: expected integer block ids"),
        (((0,), ("1", "2", "3")), "group 1: expected integer block ids"),
        (((0,), (True, False, True)), "group 1: expected integer block ids"),
        (((0,), ((1,), (2,), (3,))), "group 1: expected integer block ids"),
        (((0,), ((1, 2), (3,), 4)), "group 1: expected integer block ids"),
    ],
)
def test_block_ids_that_do_not_fit_are_refused(blocks: BlockIds, message: str) -> None:
    layout = Storage(1).layout(0)
    binder = Binder(plan_transfer(layout, [layout]), layout, [layout])
    good = ((0,), (1, 2, 3))
    with pytest.raises(TransferError, match=f"^P:? {message}"):
        binder.bind(blocks, good, 45)
    with pytest.raises(TransferError, match=f"^D:? {message}"):
        binder.bind(good, blocks, 45)


def test_what_a_window_left_behind_does_not_move() -> None:
    layout = Storage(1).layout(0)
    binder = Binder(plan_transfer(layout, [layout]), layout, [layout])
    whole = binder.bind(((0,), (1, 2, 3)), ((4,), (5, 6, 7)), 45)
    rest = binder.bind(((0,), (None, 2, 3)), ((4,), (None, 6, 7)), 45)
    kinds, left = kind_bytes(whole), kind_bytes(rest)
    assert left[StateKind.ATTENTION] * 3 == kinds[StateKind.ATTENTION] * 2
    assert left[StateKind.TEMPORAL] == kinds[StateKind.TEMPORAL]
    # P may keep more than D needs, not less.
    kept = binder.bind(((0,), (1, 2, 3)), ((4,), (None, 6, 7)), 45)
    assert [list(copies.src) for copies in kept] == [list(copies.src) for copies in rest]
    with pytest.raises(TransferError, match="P group 1: holds no block for pages that D needs"):
        binder.bind(((0,), (None, 2, 3)), ((4,), (5, 6, 7)), 45)
    with pytest.raises(TransferError, match="D group 0: expected the block of the recurrent state, got none"):
        binder.bind(((0,), (1, 2, 3)), ((None,), (5, 6, 7)), 45)


def test_a_block_of_d_used_twice_is_refused() -> None:
    layout = Storage(1).layout(0)
    binder = Binder(plan_transfer(layout, [layout]), layout, [layout])
    with pytest.raises(TransferError, match="D's block ids put two pages at address"):
        binder.bind(((0,), (1, 2, 3)), ((0,), (4, 5, 4)), 45)


def test_token_counts_that_do_not_fit_are_refused() -> None:
    layout = Storage(1, page_tokens=8).layout(0)
    binder = Binder(plan_transfer(layout, [layout]), layout, [layout])
    blocks = ((0,), (1, 2, 3))
    with pytest.raises(ValueError, match="first_tokens 12 is no multiple of D's page of 8 tokens"):
        binder.bind(blocks, blocks, 45, 12)
    for num_tokens, first_tokens in ((40, 48), (0, 0), (-1, 0), (40, -8)):
        with pytest.raises(TransferError, match=f"P holds {num_tokens} tokens, D already has {first_tokens}"):
            binder.bind(blocks, blocks, num_tokens, first_tokens)


def test_pages_of_tokens_hold_one_kind() -> None:
    """Else nobody could say how many bytes of each kind a page holds when the request ends inside a period."""
    group = Group(4, 1, 8)
    shards = tuple(
        Shard(CacheTensor(kind, kind, ("N", "C"), (None, 4), "uint8", 1), Box.of((0, 8), (0, 4)), start, (8, 1))
        for kind, start in ((StateKind.ATTENTION, 0), (StateKind.CONV, 4))
    )
    layout = RankLayout(0, 256, (group,), (Layer("l", 0, 0, 64, shards),))
    with pytest.raises(ValueError, match="pages of tokens hold one kind of state"):
        Binder(plan_transfer(layout, [layout]), layout, [layout])


def test_impossible_copies_cannot_be_built() -> None:
    one, two, signed = np.ones(1, np.uint64), np.ones(2, np.uint64), np.ones(1, np.int64)
    for src, dst, num_bytes in ((one, two, one), (one, one, signed), (one, one, np.zeros(1, np.uint64))):
        with pytest.raises(ValueError, match="expected"):
            BoundCopies(0, src, dst, num_bytes)  # type: ignore[arg-type]
