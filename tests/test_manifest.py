"""What an engine publishes: validation, factors, and the golden bytes."""

import dataclasses
from pathlib import Path

import msgspec
import pytest

from hybrid_connector.core.blocks import Group, Layer, RankLayout
from hybrid_connector.core.errors import IncompatibleError
from hybrid_connector.core.geometry import Box, CacheTensor, StateKind, dense_shard
from hybrid_connector.wire.manifest import EngineManifest, Factors, RankManifest, refuse_difference

GOLDEN = Path(__file__).parent / "golden" / "v1" / "manifest.hex"


def example_layout(rank: int) -> RankLayout:
    kv = CacheTensor("layers.0.attn.k", StateKind.ATTENTION, ("H", "N", "C"), (2, None, 4), "bfloat16", 2)
    temporal = CacheTensor("layers.1.temporal", StateKind.TEMPORAL, ("heads", "dim", "state"), (4, 2, 4), "float32", 4)
    half = Box.of((2 * rank, 2 * rank + 2), (0, 2), (0, 4))
    return RankLayout(
        rank=rank,
        region_bytes=8192,
        groups=(Group(8, pages_per_block=2, page_tokens=16), Group(4)),
        layers=(
            Layer("layers.0", 0, 0, 256, (dense_shard(kv, Box.of((rank, rank + 1), (0, 16), (0, 4))),)),
            Layer("layers.1", 1, 4096, 256, (dense_shard(temporal, half),)),
        ),
    )


def example_rank(rank: int) -> RankManifest:
    return RankManifest(rank, example_layout(rank), 0x7F00_0000_0000, "VRAM", rank, "nixl", b"agent %d" % rank)


def example_manifest() -> EngineManifest:
    return EngineManifest(
        protocol_version=1,
        engine_id="prefill-0",
        incarnation="c0ffee",
        tp_size=2,
        factors=Factors.of({"model": "Hybrid:5eed", "number of layers": 2, "dtype of temporal state": "float32"}),
        vllm_version="0.33.0",
        connector_version="0.1.0",
        lease_s=30.0,
        ranks=(example_rank(0), example_rank(1)),
    )


def round_trip(value: EngineManifest, **changes: object) -> EngineManifest:
    """Decode ``value`` after replacing entries; a key like ``ranks.0.layout.rank`` is a path."""
    tree = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
    for path, change in changes.items():
        *parents, last = [int(step) if step.isdigit() else step for step in path.split(".")]
        node = tree
        for step in parents:
            node = node[step]
        node[last] = change
    return msgspec.msgpack.decode(msgspec.msgpack.encode(tree), type=EngineManifest)


def test_golden_bytes_both_ways() -> None:
    golden = bytes.fromhex(GOLDEN.read_text())
    assert msgspec.msgpack.encode(example_manifest()) == golden
    assert msgspec.msgpack.decode(golden, type=EngineManifest) == example_manifest()


def test_unknown_fields_are_ignored() -> None:
    changes = {"a field of tomorrow": [1, {"x": None}], "ranks.0.layout.groups.0.new": 3, "factors.new": "x"}
    assert round_trip(example_manifest(), **changes) == example_manifest()


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("ranks", [], "length >= 1"),
        ("ranks.0.rank", 1, "rank 1: its layout says rank 0"),
        ("ranks.1.rank", -1, "`int` >= 0"),
        ("ranks.0.memory", "HBM", "'HBM'"),
        ("ranks.0.region_address", 2**63 - 4096, "below 2\\*\\*63"),
        ("ranks.0.region_address", 0, "`int` >= 1"),
        ("ranks.0.identity", b"", "length >= 1"),
        ("ranks.0.layout.region_bytes", 100, "the last page ends at byte"),
        ("ranks.0.layout.groups.0.num_blocks", 0, "positive num_blocks"),
        ("ranks.0.layout.layers.0.group", 7, "group 7 of 2"),
        ("ranks.0.layout.layers.0.shards.0.strides", [0, 0, 0], "overlap"),
        ("ranks.0.layout.layers.0.shards.0.box.intervals", [], "differ in rank"),
        ("ranks.0.layout.layers.0.shards.0.box.intervals.0", {"start": 3, "stop": 3}, "expected 0 <= start < stop"),
        ("ranks.0.layout.layers.0.shards.0.tensor.kind", "dream", "Invalid enum value"),
        ("tp_size", 3, "whole pipeline stages, got 2 ranks, tp_size 3"),
        ("tp_size", 0, "`int` >= 1"),
        ("lease_s", 0.0, "> 0"),
        ("lease_s", float("nan"), "> 0"),
        ("lease_s", float("inf"), "<= "),
        ("engine_id", "", "length >= 1"),
        ("engine_id", "x" * 513, "length <= 512"),
        ("factors.items", [["b", "1"], ["a", "1"]], "sorted by name"),
        ("factors.items", [["a", "1"], ["a", "1"]], "each once"),
        ("factors.items", [["a", "1\x1b[2J"]], "printable"),
    ],
)
def test_bad_fields_are_validation_errors(path: str, value: object, expected: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=expected):
        round_trip(example_manifest(), **{path: value})


def test_ranks_must_be_complete_and_in_order() -> None:
    for ranks in ((), (example_rank(1), example_rank(0)), (example_rank(0), example_rank(0)), (example_rank(1),)):
        with pytest.raises(ValueError, match="expected ranks 0, 1"):
            msgspec.structs.replace(example_manifest(), ranks=ranks, tp_size=1)


def test_ranks_must_agree_on_the_number_of_groups() -> None:
    rank = example_rank(1)
    layout = dataclasses.replace(rank.layout, groups=(*rank.layout.groups, Group(4)))
    ranks = (example_rank(0), msgspec.structs.replace(rank, layout=layout))
    with pytest.raises(ValueError, match=r"the ranks have \[2, 3\] groups"):
        msgspec.structs.replace(example_manifest(), ranks=ranks)


def test_pipeline_stages() -> None:
    assert example_manifest().pp_size == 1
    assert msgspec.structs.replace(example_manifest(), tp_size=1).pp_size == 2


def test_equal_factors_have_equal_fingerprints() -> None:
    a = Factors.of({"x": 1, "y": "2"})
    b = Factors.of({"y": 2, "x": "1"})
    assert a == b
    assert a.fingerprint == b.fingerprint
    assert len(a.fingerprint) == 64
    refuse_difference(a, b)
    assert a.fingerprint != Factors.of({"x": "1y", "": "2"}).fingerprint


def test_fingerprint_is_stable() -> None:
    fingerprint = example_manifest().factors.fingerprint
    assert fingerprint == "7eeee4d6036ac66c71851c3b99d4cd8a1b8273778bfed22ac15c75617ec8ae26"


def test_every_difference_is_named_with_both_values() -> None:
    d = Factors.of({"dtype of temporal state": "bfloat16", "model": "A", "speculative decoding": "eagle", "same": 1})
    p = Factors.of({"dtype of temporal state": "float32", "model": "A", "revision": "abc", "same": 1})
    with pytest.raises(IncompatibleError) as caught:
        refuse_difference(d, p)
    assert str(caught.value) == (
        "dtype of temporal state: float32 on P, bfloat16 on D; "
        "revision: abc on P, not stated on D; "
        "speculative decoding: not stated on P, eagle on D"
    )


def test_versions_of_vllm_are_not_compared() -> None:
    newer = msgspec.structs.replace(example_manifest(), vllm_version="0.34.1")
    refuse_difference(example_manifest().factors, newer.factors)
