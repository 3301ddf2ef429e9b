"""Do the ranks of an engine hold the whole model between them, each the part that its rank number says?"""

import itertools
from collections import Counter
from typing import get_args

import pytest

from hybrid_connector.core.families import (
    Attention,
    Conv,
    ConvSection,
    ElementType,
    Recurrent,
    StatePage,
    Temporal,
    TokenPage,
    delta_net,
    kda,
    latent_attention,
    linear_attention,
    mamba1,
    mamba2,
    short_convolution,
    split,
)
from hybrid_connector.core.geometry import Box, CacheTensor, Interval, Shard, StateKind

from layouts import BF16, FP32, Family, Model, Storage, build_engine
from oracle import elements
from refusals import refused


def test_split_shares_evenly_or_replicates() -> None:
    for extent, num_ranks in itertools.product(range(1, 17), repeat=2):
        if extent % num_ranks and num_ranks % extent:
            continue
        parts = [split(extent, rank, num_ranks, "heads") for rank in range(num_ranks)]
        counts = Counter(unit for part in parts for unit in range(part.start, part.stop))
        assert set(counts) == set(range(extent))
        assert set(counts.values()) == {max(1, num_ranks // extent)}
        assert parts == sorted(parts)  # replicas are neighbours


@pytest.mark.parametrize(
    ("extent", "rank", "num_ranks", "message"),
    [
        (3, 0, 2, "3 heads cannot be split over 2 ranks, nor the ranks over them"),
        (4, 0, 6, "4 heads cannot be split over 6 ranks, nor the ranks over them"),
        (4, 2, 2, "rank 2 of 2"),
        (4, -1, 2, "rank -1 of 2"),
    ],
)
def test_split_refuses(extent: int, rank: int, num_ranks: int, message: str) -> None:
    with refused(message):
        split(extent, rank, num_ranks, "heads")


def test_attention_has_heads_tokens_and_content() -> None:
    page = TokenPage(16, (4096, 256, 2), offset=8)
    (shard,) = Attention(2, 128, BF16).shards("l", page, rank=3, num_ranks=4)
    assert shard.tensor == CacheTensor("l.kv", StateKind.ATTENTION, ("H", "N", "C"), (2, None, 128), "bfloat16", 2)
    assert (shard.box, shard.offset, shard.strides) == (Box.of((1, 2), (0, 16), (0, 128)), 8, (4096, 256, 2))


def test_eight_bit_attention_is_another_element_type() -> None:
    element = ElementType("float8_e4m3fn", 1)
    (shard,) = Attention(2, 128, element).shards("l", TokenPage(16, (2048, 128, 1)), rank=0, num_ranks=1)
    assert (shard.tensor.dtype, shard.num_bytes) == ("float8_e4m3fn", 2 * 16 * 128)


def test_every_rank_holds_the_latent_vectors() -> None:
    family = latent_attention(latent=576, element=BF16)
    boxes = {family.shards("l", TokenPage(16, (0, 1152, 2)), rank=rank, num_ranks=3)[0].box for rank in range(3)}
    assert boxes == {Box.of((0, 1), (0, 16), (0, 576))}


def test_element_type_refuses() -> None:
    with refused("int4: expected num_bytes > 0, got 0"):
        ElementType("int4", 0)


def test_conv_section_names_itself_when_it_cannot_be_split() -> None:
    with refused("3 units of conv section B cannot be split over 2 ranks, nor the ranks over them"):
        ConvSection("B", 3, 8).channels(0, 2)


def conv(channel_first: bool, rank: int, num_ranks: int) -> dict[str, Shard]:
    sections = ConvSection("x", 4, 2), ConvSection("B", 1, 3), ConvSection("C", 1, 3)
    page = StatePage(channel_first, offset=10)
    shards = Recurrent((Conv(sections, 2, BF16),)).shards("l", page, rank=rank, num_ranks=num_ranks)
    return {shard.tensor.name: shard for shard in shards}


def test_conv_sections_lie_side_by_side() -> None:
    """At TP 2 a rank holds 4 channels of x, and all 3 of B and of C: rows of 10 channels (SD) or 2 taps (DS)."""
    ds, sd = conv(True, 1, 2), conv(False, 1, 2)
    assert list(ds) == ["l.conv.x", "l.conv.B", "l.conv.C"]
    assert [shard.box.intervals[0] for shard in ds.values()] == [Interval(4, 8), Interval(0, 3), Interval(0, 3)]
    assert [(shard.offset, shard.strides) for shard in ds.values()] == [(10, (4, 2)), (26, (4, 2)), (38, (4, 2))]
    assert [(shard.offset, shard.strides) for shard in sd.values()] == [(10, (2, 20)), (18, (2, 20)), (24, (2, 20))]
    assert {name: shard.tensor for name, shard in ds.items()} == {name: shard.tensor for name, shard in sd.items()}


@pytest.mark.parametrize("channel_first", [True, False])
@pytest.mark.parametrize("family", get_args(Family))
def test_a_recurrent_page_is_dense_and_the_ranks_hold_all(family: Family, channel_first: bool) -> None:
    model = Model(num_recurrent=1, family=family, num_heads=8, num_groups=2)
    for num_ranks in (1, 2, 4, 8):
        held: Counter[tuple[str, int]] = Counter()
        for rank in build_engine(model, Storage(num_ranks, channel_first=channel_first)):
            (layer,) = rank.layers
            bytes_used = sorted(
                address + i
                for shard in layer.shards
                for address, _ in elements(shard)
                for i in range(shard.tensor.item_bytes)
            )
            assert bytes_used == list(range(len(bytes_used)))
            held.update((shard.tensor.name, place) for shard in layer.shards for _, place in elements(shard))
        everything = {
            (shard.tensor.name, place)
            for shard in build_engine(model, Storage(1))[0].layers[0].shards
            for _, place in elements(shard)
        }
        assert set(held) == everything


ELEMENTS = {"conv_element": BF16, "temporal_element": FP32}

Placed = tuple[str, tuple[int | None, ...], str, int]
"""A shard: its tensor's name and shape, its box, and where it starts in the page."""

TENSORS: dict[str, tuple[Recurrent, list[Placed]]] = {
    "mamba1": (
        mamba1(num_channels=8, state_dim=3, num_taps=2, **ELEMENTS),
        [("l.conv.x", (8, 2), "[4, 8) x [0, 2)", 0), ("l.temporal", (8, 3), "[4, 8) x [0, 3)", 16)],
    ),
    "mamba2": (
        mamba2(num_heads=4, head_dim=5, num_groups=1, state_dim=3, num_taps=2, **ELEMENTS),
        [
            ("l.conv.x", (20, 2), "[10, 20) x [0, 2)", 0),
            ("l.conv.B", (3, 2), "[0, 3) x [0, 2)", 40),
            ("l.conv.C", (3, 2), "[0, 3) x [0, 2)", 52),
            ("l.temporal", (4, 5, 3), "[2, 4) x [0, 5) x [0, 3)", 64),
        ],
    ),
    "gated delta net": (
        delta_net(num_key_heads=2, num_value_heads=4, key_dim=3, value_dim=5, num_taps=2, **ELEMENTS),
        [
            ("l.conv.q", (6, 2), "[3, 6) x [0, 2)", 0),
            ("l.conv.k", (6, 2), "[3, 6) x [0, 2)", 12),
            ("l.conv.v", (20, 2), "[10, 20) x [0, 2)", 24),
            ("l.temporal", (4, 5, 3), "[2, 4) x [0, 5) x [0, 3)", 64),
        ],
    ),
    "KDA": (
        kda(num_heads=2, head_dim=4, num_taps=2, **ELEMENTS),
        [
            ("l.conv.q", (8, 2), "[4, 8) x [0, 2)", 0),
            ("l.conv.k", (8, 2), "[4, 8) x [0, 2)", 16),
            ("l.conv.v", (8, 2), "[4, 8) x [0, 2)", 32),
            ("l.temporal", (2, 4, 4), "[1, 2) x [0, 4) x [0, 4)", 48),
        ],
    ),
    "short convolution": (
        short_convolution(num_channels=8, num_taps=2, element=BF16),
        [("l.conv.x", (8, 2), "[4, 8) x [0, 2)", 0)],
    ),
    "linear attention": (
        linear_attention(num_heads=2, head_dim=3, element=FP32),
        [("l.temporal", (2, 3, 3), "[1, 2) x [0, 3) x [0, 3)", 0)],
    ),
}


@pytest.mark.parametrize("family", TENSORS)
def test_tensors_of_the_second_of_two_ranks(family: str) -> None:
    description, placed = TENSORS[family]
    shards = description.shards("l", StatePage(channel_first=True), rank=1, num_ranks=2)
    assert [(shard.tensor.name, shard.tensor.shape, str(shard.box), shard.offset) for shard in shards] == placed


# What vllm 0.32's MambaStateShapeCalculator gives for the same numbers: (family, ranks, DS shapes).
SHAPES = [
    (mamba1(num_channels=8, state_dim=3, num_taps=2, **ELEMENTS), 4, ((2, 2), (2, 3))),
    (
        mamba2(num_heads=8, head_dim=64, num_groups=1, state_dim=128, num_taps=3, **ELEMENTS),
        2,
        ((512, 3), (4, 64, 128)),
    ),
    (mamba2(num_heads=8, head_dim=64, num_groups=8, state_dim=16, num_taps=3, **ELEMENTS), 4, ((192, 3), (2, 64, 16))),
    (
        delta_net(num_key_heads=2, num_value_heads=4, key_dim=3, value_dim=5, num_taps=5, **ELEMENTS),
        2,
        ((16, 5), (2, 5, 3)),
    ),
    (kda(num_heads=4, head_dim=4, num_taps=3, **ELEMENTS), 2, ((24, 3), (2, 4, 4))),
    (short_convolution(num_channels=8, num_taps=2, element=BF16), 2, ((4, 2),)),
    (linear_attention(num_heads=2, head_dim=3, element=FP32), 2, ((1, 3, 3),)),
]


@pytest.mark.parametrize(("family", "num_ranks", "shapes"), SHAPES)
def test_shapes_of_the_parts(family: Recurrent, num_ranks: int, shapes: tuple[tuple[int, ...], ...]) -> None:
    for rank in range(num_ranks):
        assert family.shapes(StatePage(channel_first=True), rank=rank, num_ranks=num_ranks) == shapes
        sd = family.shapes(StatePage(channel_first=False), rank=rank, num_ranks=num_ranks)
        assert sd == tuple(shape[::-1] if len(shape) == 2 and i == 0 else shape for i, shape in enumerate(shapes))


@pytest.mark.parametrize(("num_groups", "groups"), [(1, [0, 0, 0, 0]), (2, [0, 0, 1, 1]), (4, [0, 1, 2, 3])])
def test_a_rank_holds_the_group_that_its_heads_need(num_groups: int, groups: list[int]) -> None:
    """Head h of 8 belongs to group h // (8 / num_groups)."""
    family = mamba2(num_heads=8, head_dim=2, num_groups=num_groups, state_dim=5, num_taps=3, **ELEMENTS)
    for rank, group in enumerate(groups):
        held = {
            shard.tensor.name: shard.box.intervals[0]
            for shard in family.shards("l", StatePage(channel_first=True), rank=rank, num_ranks=4)
        }
        assert held["l.conv.B"] == held["l.conv.C"] == Interval(5 * group, 5 * group + 5)
        heads = held["l.temporal"]
        assert {head * num_groups // 8 for head in range(heads.start, heads.stop)} == {group}


def test_states_that_cannot_be_shared_out_name_themselves() -> None:
    with refused("3 temporal heads cannot be split over 2 ranks, nor the ranks over them"):
        linear_attention(num_heads=3, head_dim=2, element=FP32).shards("l", StatePage(True), rank=0, num_ranks=2)


def test_several_states_of_one_layer_have_names_of_their_own() -> None:
    """Rings and records that some kernels keep beside the state are further parts."""
    parts = Temporal(("head", "dim"), (4, 2), FP32), Temporal(("head", "slot", "dim"), (4, 5, 2), BF16, name="ring")
    shards = Recurrent(parts).shards("l", StatePage(channel_first=True), rank=0, num_ranks=2)
    assert [(shard.tensor.name, shard.offset) for shard in shards] == [("l.temporal", 0), ("l.ring", 16)]
