"""Do the ranks of an engine hold the whole model between them, each the part that its rank number says?"""

import itertools
from collections import Counter

import pytest

from hybrid_connector.core.families import ConvSection, ElementType, attention, conv_state, gated_delta_net, split
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
    tensor, box = attention("l", num_kv_heads=2, content_bytes=256, element=BF16, page_tokens=16, rank=3, num_ranks=4)
    assert tensor == CacheTensor("l.kv", StateKind.ATTENTION, ("H", "N", "C"), (2, None, 128), "bfloat16", 2)
    assert box == Box.of((1, 2), (0, 16), (0, 128))


def test_attention_refuses_a_broken_element() -> None:
    with refused("l: 7 bytes per token and head are no multiple of ElementType(name='bfloat16', num_bytes=2)"):
        attention("l", num_kv_heads=2, content_bytes=7, element=BF16, page_tokens=16, rank=0, num_ranks=1)


def test_element_type_refuses() -> None:
    with refused("int4: expected num_bytes > 0, got 0"):
        ElementType("int4", 0)


def test_conv_section_names_itself_when_it_cannot_be_split() -> None:
    with refused("3 units of conv section B cannot be split over 2 ranks, nor the ranks over them"):
        ConvSection("B", 3, 8).channels(0, 2)


def conv(channel_first: bool, rank: int, num_ranks: int) -> dict[str, Shard]:
    sections = ConvSection("x", 4, 2), ConvSection("B", 1, 3), ConvSection("C", 1, 3)
    shards = conv_state(
        "l",
        sections,
        num_taps=2,
        element=BF16,
        offset=10,
        channel_first=channel_first,
        rank=rank,
        num_ranks=num_ranks,
    )
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
@pytest.mark.parametrize("family", ["gdn", "kda", "mamba1", "mamba2"])
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


def test_gated_delta_net_tensors() -> None:
    shards = gated_delta_net(
        "l",
        num_key_heads=2,
        num_value_heads=4,
        key_dim=3,
        value_dim=5,
        num_taps=2,
        conv_element=BF16,
        temporal_element=FP32,
        channel_first=True,
        rank=1,
        num_ranks=2,
    )
    assert [(shard.tensor.name, shard.tensor.shape, str(shard.box), shard.offset) for shard in shards] == [
        ("l.conv.q", (6, 2), "[3, 6) x [0, 2)", 0),
        ("l.conv.k", (6, 2), "[3, 6) x [0, 2)", 12),
        ("l.conv.v", (20, 2), "[10, 20) x [0, 2)", 24),
        ("l.temporal", (4, 5, 3), "[2, 4) x [0, 5) x [0, 3)", 64),
    ]
    assert shards[-1].strides == (60, 12, 4)
