"""Does a plan move every byte of D's state once, from the right place, and nothing else? (I1, CASES.md case 1)

``GRIDS`` lists pairs of engines; each is planned, executed and compared with the oracle for every D rank.
"""

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid_connector.core.blocks import Group, Layer, RankLayout
from hybrid_connector.core.errors import IncompatibleError
from hybrid_connector.core.families import Conv, ConvSection, ElementType, Recurrent, StatePage, Temporal, mamba2
from hybrid_connector.core.geometry import Box, CacheTensor, Shard, StateKind, dense_shard
from hybrid_connector.core.planning import PageCopies, Plan, plan_engine, plan_transfer

from layouts import BF16, FP32, Family, Model, Order, Placement, Storage, build_engine, edited, place
from oracle import Request, differences, execute, expected, fewest_runs, prefilled
from refusals import refused

TP_SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
ORDERS: tuple[Order, ...] = ("HND", "NHD", "LHBNC")
FAMILIES: tuple[Family, ...] = get_args(Family)
PLACEMENTS: tuple[Placement, ...] = ("layer", "block", "shared")

Case = tuple[Model, Storage, Storage, tuple[int, int]]
"""What P and D serve, how each stores it, and a request's tokens: all of them, and those that D already holds."""


def divides(extent: int, num_ranks: int) -> bool:
    return extent % num_ranks == 0 or num_ranks % extent == 0


def attention_cases() -> Iterator[Case]:
    """Every head count, TP both ways, and memory order; pages of two tokens keep it fast."""
    for heads in (1, 2, 3, 4, 6, 8, 12):
        model = Model(num_attention=1, num_kv_heads=heads)
        sizes = [tp for tp in TP_SIZES if divides(heads, tp)]
        for src_tp, dst_tp, src_order, dst_order in itertools.product(sizes, sizes, ORDERS, ORDERS):
            src = Storage(src_tp, order=src_order, page_tokens=2)
            dst = Storage(dst_tp, order=dst_order, page_tokens=2, page_padding=6)
            yield model, src, dst, (5, 0)


def every_tp_cases() -> Iterator[Case]:
    """Every TP size from 1 to 16 that two heads allow, and any size for one head."""
    for heads in (1, 2):
        model = Model(num_attention=1, num_kv_heads=heads)
        sizes = [tp for tp in range(1, 17) if divides(heads, tp)]
        for src_tp, dst_tp in itertools.product(sizes, sizes):
            yield model, Storage(src_tp, page_tokens=2), Storage(dst_tp, page_tokens=2, order="NHD"), (3, 0)


def page_cases() -> Iterator[Case]:
    """Pages of different length, several to a block, requests that end at edges, prefixes that D holds."""
    model = Model(num_attention=2, num_kv_heads=2, content=1)
    requests = [(1, 0), (15, 0), (16, 0), (17, 0), (32, 0), (33, 0), (63, 0), (64, 0), (65, 64), (129, 64), (129, 128)]
    pages = [*itertools.product((16, 32, 64), (1, 2, 3))]
    combinations = itertools.product(pages, pages, ((1, 1), (1, 2), (2, 1)), requests)
    for i, ((src_tokens, src_ratio), (dst_tokens, dst_ratio), (src_tp, dst_tp), request) in enumerate(combinations):
        if i % 3:
            continue  # 3 does not divide the 11 requests: each value of each field stays in
        src = Storage(
            src_tp, page_tokens=src_tokens, pages_per_block=src_ratio, order=ORDERS[i // 3 % 3], max_tokens=129
        )
        dst = Storage(
            dst_tp, page_tokens=dst_tokens, pages_per_block=dst_ratio, order=ORDERS[i // 9 % 3], max_tokens=129
        )
        yield model, src, dst, request


def odd_page_cases() -> Iterator[Case]:
    """Page lengths of which neither divides the other: 1056 against 4176 tokens in the small (case 16)."""
    model = Model(num_attention=1, num_kv_heads=2)
    for src_tokens, dst_tokens in itertools.permutations((4, 6, 7, 10), 2):
        for num_tokens in range(1, 30):
            src = Storage(2, page_tokens=src_tokens, max_tokens=30)
            dst = Storage(1, page_tokens=dst_tokens, max_tokens=30, order="NHD", placement="block")
            yield model, src, dst, (num_tokens, num_tokens // 2 // dst_tokens * dst_tokens)


def recurrent_cases() -> Iterator[Case]:
    """Every family, TP both ways, DS and SD on either side, placements."""
    families: list[tuple[Family, int]] = [("mamba1", 1), ("gdn", 2), ("gdn", 4), ("kda", 8)]
    families += [("mamba2", 1), ("mamba2", 2), ("mamba2", 8), ("short_conv", 1), ("linear", 1)]
    for family, groups in families:
        model = Model(num_recurrent=2, family=family, num_heads=8, num_groups=groups)
        for src_tp, dst_tp, src_ds, dst_ds in itertools.product(
            (1, 2, 4, 8), (1, 2, 4, 8), (True, False), (True, False)
        ):
            src = Storage(src_tp, channel_first=src_ds, page_padding=4)
            dst = Storage(dst_tp, channel_first=dst_ds, placement="block", page_padding=2)
            yield model, src, dst, (1, 0)


GRIDS = {
    "attention": attention_cases,
    "every TP": every_tp_cases,
    "pages": page_cases,
    "odd pages": odd_page_cases,
    "recurrent": recurrent_cases,
}


def wrong_after(
    plans: Sequence[Plan], srcs: Sequence[RankLayout], dsts: Sequence[RankLayout], request: Request
) -> list[str]:
    """What the oracle finds after the plans ran, for all D ranks."""
    regions = [prefilled(src, request) for src in srcs]
    return [
        f"D rank {dst.rank}: {line}"
        for plan, dst in zip(plans, dsts, strict=True)
        for line in differences(execute(plan, dst, srcs, request, regions), expected(dst, srcs, request))
    ]


def kinds_add_up(plan: Plan) -> bool:
    return all(
        sum(num_bytes for _, num_bytes in copies.kind_bytes) == sum(run.num_bytes for run in copies.runs)
        for copies in plan.copies
    )


@pytest.mark.parametrize("grid", GRIDS)
def test_every_byte_of_d_comes_once_from_the_same_coordinate(grid: str) -> None:
    tried = 0
    for seed, (model, src, dst, (num_tokens, cached_tokens)) in enumerate(GRIDS[grid]()):
        srcs, dsts = build_engine(model, src), build_engine(model, dst)
        plans = plan_engine(dsts, srcs)
        request = place(srcs, dsts, num_tokens, cached_tokens, seed)
        assert wrong_after(plans, srcs, dsts, request) == [], (model, src, dst, request)
        assert all(map(kinds_add_up, plans))
        tried += len(plans)
    assert tried == num_pairs(GRIDS[grid])


def num_pairs(cases: Callable[[], Iterator[Case]]) -> int:
    """Pairs of a set of P ranks and a D rank."""
    return sum(dst.num_ranks * dst.num_stages for _, _, dst, _ in cases())


def test_the_grids_have_not_shrunk() -> None:
    assert sum(map(num_pairs, GRIDS.values())) >= 10_000


# Random engines: everything at once.


@st.composite
def storages(draw: st.DrawFn, model: Model) -> Storage:
    placement = draw(st.sampled_from(PLACEMENTS))
    return Storage(
        num_ranks=draw(st.sampled_from((1, 2, 4, 8))),
        num_stages=draw(st.sampled_from((1, 1, 2))),
        page_tokens=draw(st.integers(1, 6)),
        pages_per_block=draw(st.integers(1, 3)),
        order=draw(st.sampled_from(ORDERS if placement == "layer" else ORDERS[:2])),
        placement=placement,
        channel_first=draw(st.booleans()),
        page_padding=draw(st.integers(0, 5)),
        row_padding=draw(st.sampled_from((0, 0, 2))),
        recurrent_first=draw(st.booleans()),
        max_tokens=20,
    )


@st.composite
def engine_pairs(draw: st.DrawFn) -> tuple[Model, Storage, Storage]:
    model = Model(
        num_attention=draw(st.integers(0, 2)),
        num_kv_heads=draw(st.sampled_from((1, 2, 4, 8))),
        content=draw(st.integers(1, 3)),
        num_recurrent=draw(st.integers(0, 3)),
        family=draw(st.sampled_from(FAMILIES)),
        num_heads=8,
        num_groups=draw(st.sampled_from((1, 2, 8))),
        head_dim=draw(st.integers(1, 2)),
        state_dim=draw(st.integers(1, 3)),
        num_taps=draw(st.integers(1, 3)),
    )
    return model, draw(storages(model)), draw(storages(model))


@settings(
    derandomize=True, max_examples=400, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(engine_pairs(), st.integers(1, 20), st.integers(0, 19), st.integers(0, 99))
def test_random_engines(pair: tuple[Model, Storage, Storage], num_tokens: int, cached: int, seed: int) -> None:
    model, src, dst = pair
    srcs, dsts = build_engine(model, src), build_engine(model, dst)
    plans = plan_engine(dsts, srcs)
    request = place(srcs, dsts, num_tokens, min(cached, num_tokens - 1) // dst.page_tokens * dst.page_tokens, seed)
    assert wrong_after(plans, srcs, dsts, request) == []
    assert all(map(kinds_add_up, plans))


@settings(
    derandomize=True, max_examples=100, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(engine_pairs(), st.integers(1, 20))
def test_p_to_d_and_back_gives_the_bytes_back(pair: tuple[Model, Storage, Storage], num_tokens: int) -> None:
    model, here, there = pair
    srcs, dsts = build_engine(model, here), build_engine(model, there)
    way_out = place(srcs, dsts, num_tokens)
    way_back = Request(num_tokens, way_out.dst_blocks, way_out.src_blocks)
    regions = [prefilled(src, way_out) for src in srcs]
    arrived = [
        execute(plan, dst, srcs, way_out, regions).data for plan, dst in zip(plan_engine(dsts, srcs), dsts, strict=True)
    ]
    for plan, src, before in zip(plan_engine(srcs, dsts), srcs, regions, strict=True):
        after = execute(plan, src, dsts, way_back, arrived)
        assert after.counts == expected(src, dsts, way_back).counts
        assert all(a == b for a, b, back in zip(before, after.data, after.counts, strict=True) if back)


# Runs.


def num_runs(plan: Plan, layer: Layer) -> int:
    """Runs that fill one period of D's ``layer``."""
    return sum(
        len(copies.runs)
        for copies in plan.copies
        for pair in copies.layers
        if copies.dst_group == layer.group and pair.dst_offset == layer.offset
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_identical_engines_move_whole_pages(order: Order, num_ranks: int) -> None:
    model = Model(2, num_kv_heads=4, num_recurrent=2, family="gdn", num_heads=8, num_groups=4)
    storage = Storage(num_ranks, order=order, page_padding=8)
    engine = build_engine(model, storage)
    for plan, rank in zip(plan_engine(engine, engine), engine, strict=True):
        assert plan.src_ranks == (rank.rank,)
        for layer in rank.layers:
            heads = layer.shards[0].box.shape[0] if order == "LHBNC" and layer.group == 0 else 1
            assert num_runs(plan, layer) == heads  # LHBNC: the page itself lies in as many places


def distinct_cases() -> Iterator[tuple[Model, Storage, Storage]]:
    """Engines without replicas on P, of every order, page length and family."""
    attention = Model(num_attention=1, num_kv_heads=4)
    for src_tp, dst_tp, src_order, dst_order in itertools.product((1, 2, 4), (1, 2, 4, 8), ORDERS, ORDERS):
        for src_tokens, dst_tokens, padding in ((2, 2, 0), (2, 4, 0), (6, 4, 2)):
            src = Storage(src_tp, page_tokens=src_tokens, order=src_order, row_padding=padding)
            yield attention, src, Storage(dst_tp, page_tokens=dst_tokens, order=dst_order)
    for family in FAMILIES:
        recurrent = Model(num_recurrent=1, family=family, num_heads=8, num_groups=4)
        for src_tp, dst_tp, src_ds, dst_ds in itertools.product((1, 2, 4), (1, 2, 4, 8), (True, False), (True, False)):
            yield recurrent, Storage(src_tp, channel_first=src_ds), Storage(dst_tp, channel_first=dst_ds)


def test_a_plan_has_the_fewest_runs() -> None:
    tried = 0
    for model, src, dst in distinct_cases():
        srcs, dsts = build_engine(model, src), build_engine(model, dst)
        for plan, rank in zip(plan_engine(dsts, srcs), dsts, strict=True):
            for layer in rank.layers:
                dst_pages = max(copies.dst_pages for copies in plan.copies)
                assert num_runs(plan, layer) == fewest_runs(rank, srcs, layer, dst_pages), (model, src, dst)
            tried += 1
    assert tried == 2295


def test_layers_that_look_alike_share_their_runs() -> None:
    model = Model(5, num_kv_heads=2, num_recurrent=7, num_heads=4, num_groups=2)
    srcs, dsts = build_engine(model, Storage(2)), build_engine(model, Storage(1))
    (plan,) = plan_engine(dsts, srcs)
    assert Counter(len(copies.layers) for copies in plan.copies) == {5: 2, 7: 2}


# Replicas.


@pytest.mark.parametrize("heads", [1, 2, 3, 4])
def test_d_ranks_spread_over_replicas(heads: int) -> None:
    """Of replicas none is read by two D ranks more than another."""
    model = Model(num_attention=1, num_kv_heads=heads)
    sizes = [tp for tp in TP_SIZES if divides(heads, tp)]
    for src_tp, dst_tp in itertools.product(sizes, sizes):
        srcs, dsts = build_engine(model, Storage(src_tp)), build_engine(model, Storage(dst_tp))
        readers = Counter(rank for plan in plan_engine(dsts, srcs) for rank in plan.src_ranks)
        replicas: dict[Box, list[int]] = defaultdict(list)
        for src in srcs:
            replicas[src.layers[0].shards[0].box].append(readers[src.rank])
        assert all(max(counts) - min(counts) <= 1 for counts in replicas.values()), (src_tp, dst_tp, readers)


REPLICATED = Model(1, num_kv_heads=1, num_recurrent=2, family="mamba2", num_heads=8, num_groups=1)
"""Every rank holds the attention head and the group of B and C; x and the temporal state are shared out."""


@pytest.mark.parametrize(("src_tp", "dst_tp"), list(itertools.product((1, 2, 4, 8), repeat=2)))
def test_replicas_come_from_ranks_that_are_read_anyway(src_tp: int, dst_tp: int) -> None:
    srcs, dsts = build_engine(REPLICATED, Storage(src_tp)), build_engine(REPLICATED, Storage(dst_tp))
    plans = plan_engine(dsts, srcs)
    share, turns = max(1, src_tp // dst_tp), max(1, dst_tp // src_tp)
    assert [plan.src_ranks for plan in plans] == [
        tuple(range(rank // turns * share, rank // turns * share + share)) for rank in range(dst_tp)
    ]
    assert wrong_after(plans, srcs, dsts, place(srcs, dsts, 8)) == []
    readers = Counter(copies.src_rank for plan in plans for copies in plan.copies if copies.dst_group == 0)
    assert max(readers.values()) == turns  # D's ranks do not gather at one replica


def test_a_rank_with_the_least_choice_goes_first() -> None:
    """Two heads of attention on ranks 0-1 and 2-3, the latent vector of another layer on all four."""
    model = Model(num_attention=1, num_kv_heads=2)
    latent = Model(num_attention=2, num_kv_heads=1)

    def engine(num_ranks: int) -> list[RankLayout]:
        layouts = []
        parts = build_engine(model, Storage(num_ranks)), build_engine(latent, Storage(num_ranks))
        for heads, vectors in zip(*parts, strict=True):
            other = dataclasses.replace(vectors.layers[1], offset=heads.region_bytes)
            group = heads.groups[0]
            size = heads.region_bytes + vectors.region_bytes
            layouts.append(RankLayout(heads.rank, size, (group,), (other, *heads.layers)))
        return layouts

    srcs, dsts = engine(4), engine(2)
    assert [plan.src_ranks for plan in plan_engine(dsts, srcs)] == [(0,), (3,)]
    (dst,) = engine(1)
    assert plan_transfer(dst, srcs).src_ranks == (0, 2)


def test_equal_parallelism_reads_rank_from_rank() -> None:
    """Also where every head has replicas: traffic stays on rails."""
    for heads, tp in itertools.product((1, 2, 3, 4), TP_SIZES):
        if divides(heads, tp):
            engine = build_engine(Model(num_attention=1, num_kv_heads=heads), Storage(tp))
            assert [plan.src_ranks for plan in plan_engine(engine, engine)] == [(rank,) for rank in range(tp)]


# Layers and pipeline stages.

Held = tuple[str, int, int]
"""A layer: its tensors ("a0 a1"), its group, and bytes of padding before them."""


def rank_of(*layers: Held) -> RankLayout:
    """Small layers of two recurrent groups; tensor a1 lies 8 bytes behind a0, in whichever layer."""

    def shard(name: str, padding: int) -> Shard:
        tensor = CacheTensor(name, StateKind.CONV, ("channel",), (4,), "bfloat16", 2)
        return dense_shard(tensor, Box.of((0, 4)), padding + 8 * int(name[1]))

    placed = tuple(
        Layer(names, group, 200 * i, 40, tuple(shard(name, padding) for name in names.split()))
        for i, (names, group, padding) in enumerate(layers)
    )
    return RankLayout(0, 200 * len(layers), (Group(4), Group(4)), placed)


ALIKE: tuple[Held, ...] = (("a0 a1 a2", 0, 0), ("b0 b1 b2", 0, 0))


@pytest.mark.parametrize(
    ("src", "dst", "num_copies"),
    [
        pytest.param(ALIKE, ALIKE, 1, id="alike"),
        pytest.param(ALIKE, (ALIKE[0], ("b0 b1 b2", 0, 4)), 2, id="offset on D"),
        pytest.param((ALIKE[0], ("b0 b1 b2", 0, 4)), ALIKE, 2, id="offset on P"),
        pytest.param(ALIKE, (ALIKE[0], ("b0 b1 b2", 1, 0)), 2, id="group on D"),
        pytest.param((ALIKE[0], ("b0 b1 b2", 1, 0)), ALIKE, 2, id="group on P"),
        pytest.param((("a0 a1", 0, 0), ("a2", 0, 0), ALIKE[1]), ALIKE, 3, id="one of them in two layers of P"),
        pytest.param((("b0 b1", 0, 0), ("b2", 0, 0), ALIKE[0]), ALIKE, 3, id="the other in two layers of P"),
        pytest.param((("a0 a1", 0, 0), ("a2", 0, 0), ("b0", 0, 0), ("b1 b2", 0, 0)), ALIKE, 4, id="both, unlike"),
        pytest.param((("a0 b1", 0, 0), ("b0 a1", 0, 0), ("a2", 0, 0), ("b2", 0, 0)), ALIKE, 3, id="both, alike"),
    ],
)
def test_layers_share_runs_only_where_they_are_alike(
    src: tuple[Held, ...], dst: tuple[Held, ...], num_copies: int
) -> None:
    """Layers whose tensors lay in other layers of P once shared runs, and were read from the wrong place."""
    srcs, dsts = [rank_of(*src)], [rank_of(*dst)]
    plans = plan_engine(dsts, srcs)
    assert wrong_after(plans, srcs, dsts, Request(1, ((2,), (3,)), ((1,), (0,)))) == []
    assert len(plans[0].copies) == num_copies


def test_overlapping_boxes_are_read_once_and_from_few() -> None:
    """No engine we know stores such boxes; the cover holds for them as well, largest part first."""

    def part(rank: int, start: int, stop: int) -> RankLayout:
        tensor = CacheTensor("t", StateKind.CONV, ("channel",), (6,), "bfloat16", 2)
        shard = dense_shard(tensor, Box.of((start, stop)))
        return RankLayout(rank, 64, (Group(4),), (Layer("t", 0, 0, 16, (shard,)),))

    request = Request(1, ((2,),), ((1,),))
    for bounds, ranks in (
        (((0, 3), (3, 6), (0, 6)), (2,)),
        (((0, 4), (1, 6)), (0, 1)),
        (((0, 2), (1, 5), (4, 6)), (0, 1, 2)),
    ):
        srcs = [part(rank, *bound) for rank, bound in enumerate(bounds)]
        for dst in (part(0, 0, 6), part(5, 0, 6)):
            plan = plan_transfer(dst, srcs)
            assert wrong_after([plan], srcs, [dst], request) == []
            assert plan.src_ranks == ranks


def test_layers_with_equal_boxes_but_other_token_axes_do_not_share_runs() -> None:
    """With pages of different length the token axis decides which part of D's page a P page fills."""
    tokens_first = CacheTensor("a", StateKind.ATTENTION, ("N", "H"), (None, 4), "bfloat16", 2)
    heads_first = CacheTensor("b", StateKind.ATTENTION, ("H", "N"), (4, None), "bfloat16", 2)

    def rank(extent: int) -> RankLayout:
        """``extent`` heads and tokens in a page, so that both tensors' boxes and strides are equal."""
        box, strides, page_stride = Box.of((0, extent), (0, extent)), (2 * extent, 2), 2 * extent**2
        layers = (
            Layer("a", 0, 0, page_stride, (Shard(tokens_first, box, 0, strides),)),
            Layer("b", 0, 8 * page_stride, page_stride, (Shard(heads_first, box, 0, strides),)),
        )
        return RankLayout(0, 16 * page_stride, (Group(8, page_tokens=extent),), layers)

    src, dst = rank(4), rank(2)
    request = Request(7, ((5, 1),), ((2, 0, 4, 6),))
    assert wrong_after([plan_transfer(dst, [src])], [src], [dst], request) == []


def test_pipeline_stages_meet_by_tensor_name() -> None:
    model = Model(3, num_kv_heads=2, num_recurrent=3, num_heads=4, num_groups=2)
    srcs = build_engine(model, Storage(1, num_stages=3))
    dsts = build_engine(model, Storage(2, num_stages=2))
    plans = plan_engine(dsts, srcs)
    assert [plan.src_ranks for plan in plans] == [(0, 2), (0, 2), (1,), (1,)]
    assert wrong_after(plans, srcs, dsts, place(srcs, dsts, 8)) == []


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_sharded_x_with_replicated_b_and_c(src_tp: int, dst_tp: int) -> None:
    """CASES.md, case 1: d_inner 1536, n_groups 1, d_state 128, 3 taps, bf16."""
    family = mamba2(
        num_heads=24, head_dim=64, num_groups=1, state_dim=128, num_taps=3, conv_element=BF16, temporal_element=BF16
    )

    def engine(num_ranks: int, channel_first: bool) -> tuple[RankLayout, ...]:
        layouts = []
        for rank in range(num_ranks):
            shards = family.shards("a", StatePage(channel_first), rank=rank, num_ranks=num_ranks)[:3]
            layouts.append(RankLayout(rank, 90_000, (Group(3),), (Layer("a", 0, 64, 16_384, shards),)))
        return tuple(layouts)

    for src_ds, dst_ds in itertools.product((True, False), repeat=2):
        srcs, dsts = engine(src_tp, src_ds), engine(dst_tp, dst_ds)
        plans = plan_engine(dsts, srcs)
        assert wrong_after(plans, srcs, dsts, Request(1, ((2,),), ((1,),))) == []
        if src_ds and dst_ds:
            assert max(sum(len(copies.runs) for copies in plan.copies) for plan in plans) <= 4


def test_a_made_up_family_needs_a_description_and_nothing_else() -> None:
    """A shared gate, a state by head, and a ring with fewer heads than there are ranks."""
    family = Recurrent(
        (
            Conv((ConvSection("u", 8, 2), ConvSection("gate", 1, 5)), 4, BF16),
            Temporal(("head", "row", "column"), (8, 3, 2), FP32),
            Temporal(("head", "slot"), (2, 5), BF16, name="ring"),
        )
    )
    model = Model(num_attention=1, num_recurrent=2, family=family)
    for src_tp, dst_tp, src_ds, dst_ds in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (True, False), (True, False)):
        srcs = build_engine(model, Storage(src_tp, channel_first=src_ds))
        dsts = build_engine(model, Storage(dst_tp, channel_first=dst_ds, order="NHD"))
        assert wrong_after(plan_engine(dsts, srcs), srcs, dsts, place(srcs, dsts, 8)) == []


# Refusals.

KV = "layers.0.attn.kv"
ATTENTION = Model(num_attention=1, num_kv_heads=4)


def test_refuses_a_tensor_that_p_lacks() -> None:
    dsts = build_engine(Model(num_attention=2, num_kv_heads=4), Storage(2))
    srcs = build_engine(ATTENTION, Storage(2))
    with refused("layers.1.attn.kv: D needs it, no rank of P holds it", IncompatibleError):
        plan_engine(dsts, srcs)


def test_refuses_a_tensor_that_d_lacks() -> None:
    dsts = build_engine(ATTENTION, Storage(2))
    srcs = build_engine(Model(num_attention=2, num_kv_heads=4), Storage(2))
    with refused("layers.1.attn.kv: P rank 0 holds it, no rank of D does", IncompatibleError):
        plan_engine(dsts, srcs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float16"}, "element type is float16 on P, bfloat16 on D"),
        ({"item_bytes": 1}, "bytes per element is 1 on P, 2 on D"),
        ({"axes": ("H", "N", "D")}, "axes is ('H', 'N', 'D') on P, ('H', 'N', 'C') on D"),
        ({"shape": (4, None, 3)}, "shape is (4, None, 3) on P, (4, None, 2) on D"),
    ],
)
def test_refuses_a_tensor_that_differs(changes: dict[str, object], message: str) -> None:
    (dst,) = build_engine(ATTENTION, Storage(1))
    srcs = build_engine(ATTENTION, Storage(2))
    srcs = (srcs[0], edited(srcs[1], KV, **changes))
    with refused(f"{KV}: {message}", IncompatibleError):
        plan_transfer(dst, srcs)


def test_refuses_another_temporal_dtype() -> None:
    """CASES.md, case 17."""

    def engine(element: ElementType) -> tuple[RankLayout, ...]:
        temporal = Temporal(("head", "value", "key"), (4, 2, 3), element)
        return build_engine(Model(num_recurrent=1, family=Recurrent((temporal,))), Storage(2))

    name = "layers.0.other.temporal"
    for src, dst in ((FP32, BF16), (BF16, FP32)):
        with refused(f"{name}: element type is {src.name} on P, {dst.name} on D", IncompatibleError):
            plan_engine(engine(dst), engine(src))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_taps": 5}, "layers.0.mamba2.conv.x: shape is (16, 3) on P, (16, 5) on D"),
        ({"num_groups": 4}, "layers.0.mamba2.conv.B: shape is (6, 3) on P, (12, 3) on D"),
        ({"state_dim": 4}, "layers.0.mamba2.conv.B: shape is (6, 3) on P, (8, 3) on D"),
    ],
)
def test_refuses_another_recurrent_geometry(changes: dict[str, int], message: str) -> None:
    """CASES.md, case 14: taps for speculative tokens on one side only; and numbers that change no page's size."""
    model = Model(num_recurrent=1, family="mamba2", num_heads=8, num_groups=2)
    srcs = build_engine(model, Storage(2))
    with refused(message, IncompatibleError):
        plan_engine(build_engine(dataclasses.replace(model, **changes), Storage(4)), srcs)


def test_refuses_a_box_that_p_does_not_hold() -> None:
    (dst,) = build_engine(ATTENTION, Storage(1))
    srcs = build_engine(ATTENTION, Storage(4))
    with refused(
        f"{KV} (H, N, C): P's ranks hold [0, 1) x [0, 16) x [0, 2); [3, 4) x [0, 16) x [0, 2), "
        "D needs [1, 3) x [0, 16) x [0, 2)",
        IncompatibleError,
    ):
        plan_transfer(dst, [srcs[0], srcs[3]])


def test_refuses_p_ranks_with_pages_of_different_length() -> None:
    (dst,) = build_engine(ATTENTION, Storage(1))
    srcs = build_engine(ATTENTION, Storage(2))[0], build_engine(ATTENTION, Storage(2, page_tokens=32))[1]
    with refused(f"{KV}: P's ranks store pages of different lengths: 16, 32 tokens", IncompatibleError):
        plan_transfer(dst, srcs)


def test_refuses_pages_that_almost_never_line_up() -> None:
    """A peer could otherwise keep us busy for hours with one number."""
    (dst,) = build_engine(ATTENTION, Storage(1))
    (src,) = build_engine(ATTENTION, Storage(1, page_tokens=100_003))
    with refused(
        f"{KV}: pages of 100003 tokens on P, 16 on D repeat after 100003 pages, expected at most 1024",
        IncompatibleError,
    ):
        plan_transfer(dst, [src])


def test_the_longest_period_is_planned() -> None:
    srcs, dsts = (build_engine(ATTENTION, Storage(1, page_tokens=tokens, max_tokens=40)) for tokens in (1024, 1))
    assert wrong_after(plan_engine(dsts, srcs), srcs, dsts, place(srcs, dsts, 40)) == []


def test_refuses_two_layouts_of_one_rank() -> None:
    (dst,) = build_engine(ATTENTION, Storage(1))
    first, second = build_engine(ATTENTION, Storage(2))
    with refused("P rank 0: two layouts claim it", IncompatibleError):
        plan_transfer(dst, [first, dataclasses.replace(second, rank=0)])


# Can the oracle fail?


def broken(plan: Plan, change: Callable[[PageCopies], PageCopies]) -> Plan:
    """``plan`` with its first copies changed."""
    return Plan(plan.dst_rank, (change(plan.copies[0]), *plan.copies[1:]))


def swap_sources(copies: PageCopies) -> PageCopies:
    a, b, *rest = copies.runs
    swapped = (
        dataclasses.replace(a, src_page=b.src_page, src_offset=b.src_offset),
        dataclasses.replace(b, src_page=a.src_page, src_offset=a.src_offset),
    )
    return dataclasses.replace(copies, runs=(*swapped, *rest))


def shift(field: str, distance: int, copies: PageCopies) -> PageCopies:
    first, *rest = copies.runs
    moved = dataclasses.replace(first, **{field: getattr(first, field) + distance})
    return dataclasses.replace(copies, runs=(moved, *rest))


BREAKAGES: dict[str, tuple[Callable[[PageCopies], PageCopies], set[str]]] = {
    "two runs swap their sources": (swap_sources, {"not the byte of this coordinate"}),
    "one run dropped": (lambda copies: dataclasses.replace(copies, runs=copies.runs[1:]), {"never written"}),
    "one run twice": (
        lambda copies: dataclasses.replace(copies, runs=copies.runs[:1] + copies.runs),
        {"written more than once"},
    ),
    "read a byte too far": (partial(shift, "src_offset", 1), {"not the byte of this coordinate"}),
    "written a byte too far": (
        partial(shift, "dst_offset", 1),
        {"never written", "written more than once", "not the byte of this coordinate"},
    ),
    "a byte too long": (partial(shift, "num_bytes", 1), {"written more than once"}),
    "a byte too short": (partial(shift, "num_bytes", -1), {"never written"}),
    "another P page": (partial(shift, "src_page", 1), {"not the byte of this coordinate"}),
    "another D page": (partial(shift, "dst_page", 1), {"never written", "not the byte of this coordinate"}),
    "a layer dropped": (lambda copies: dataclasses.replace(copies, layers=copies.layers[1:]), {"never written"}),
    "one layer's pages from another": (
        lambda copies: dataclasses.replace(
            copies,
            layers=(dataclasses.replace(copies.layers[0], src_offset=copies.layers[1].src_offset), *copies.layers[1:]),
        ),
        {"not the byte of this coordinate"},
    ),
    "the last run into the padding": (
        lambda copies: dataclasses.replace(
            copies,
            runs=(*copies.runs[:-1], dataclasses.replace(copies.runs[-1], num_bytes=copies.runs[-1].num_bytes + 1)),
        ),
        {"written, but padding, cached or foreign"},
    ),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_the_oracle_detects(breakage: str) -> None:
    model = Model(num_attention=2, num_kv_heads=2)
    srcs = build_engine(model, Storage(1, order="NHD", max_tokens=40))
    dsts = build_engine(model, Storage(1, page_padding=4, max_tokens=40))
    request = place(srcs, dsts, 40)
    plans = plan_engine(dsts, srcs)
    assert wrong_after(plans, srcs, dsts, request) == []
    change, symptoms = BREAKAGES[breakage]
    found = wrong_after([broken(plans[0], change)], srcs, dsts, request)
    assert symptoms <= {line.split(": ")[1] for line in found}


def test_the_oracle_detects_a_wrong_rank() -> None:
    srcs, dsts = build_engine(ATTENTION, Storage(2)), build_engine(ATTENTION, Storage(2))
    plans = [
        broken(plan, lambda copies: dataclasses.replace(copies, src_rank=1 - copies.src_rank))
        for plan in plan_engine(dsts, srcs)
    ]
    assert len(wrong_after(plans, srcs, dsts, place(srcs, dsts, 8))) == 2


def test_the_oracle_detects_a_wrong_period() -> None:
    srcs, dsts = build_engine(ATTENTION, Storage(1, page_tokens=2)), build_engine(ATTENTION, Storage(1, page_tokens=4))
    (plan,) = plan_engine(dsts, srcs)
    bad = broken(plan, lambda copies: dataclasses.replace(copies, src_pages=copies.src_pages - 1))
    assert wrong_after([bad], srcs, dsts, place(srcs, dsts, 8)) != []
