"""Does the sweep find what is wrong, and nothing else? A small part of what ``tools.sweep_geometry`` runs."""

import dataclasses
import itertools
from collections.abc import Sequence

import pytest

from hybrid_connector.tools import sweep_geometry
from hybrid_connector.tools.byte_oracle import Ranges
from hybrid_connector.tools.sweep_geometry import Engine, Tally, exit_status, read_planned, sweep
from hybrid_connector.tools.sweep_grid import CASE_1, FAMILIES, ORDER_PAIRS, STATE_PAIRS, Model, Row, StoragePairs

SIZES = (1, 2, 4, 8)


def small(family: str, pairs: StoragePairs) -> Row:
    """The first model of a family at few TP sizes."""
    model = FAMILIES[family][0][0]
    return [(dataclasses.replace(model, sizes=tuple(size for size in SIZES if size in model.sizes)), pairs)]


# In a cell TP 1 -> 2 there are two pairs: one for each rank of D.
PAIRS_PER_STORAGE = sum(SIZES) * len(SIZES)
BOTH_WAYS = {src: {dst for dst in SIZES if dst != src} for src in SIZES}


@pytest.mark.parametrize("family", [name for name in FAMILIES if not FAMILIES[name][0][0].latent])
def test_no_byte_is_wrong(family: str) -> None:
    attention = family.startswith("attention")
    row = small(family, ORDER_PAIRS if attention else STATE_PAIRS[::3])
    tally = sweep(row)
    pairs = len(row[0][1]) * PAIRS_PER_STORAGE
    assert (tally.tried, tally.impossible) == (pairs, 0)
    assert (tally.wrong_bytes, tally.outside_bytes) == (0, 0)
    assert tally.accepted + tally.refused + tally.not_modelled == pairs
    assert exit_status([tally]) == 0


def test_latent_vectors_come_from_any_rank() -> None:
    tally = sweep(small("MLA", ORDER_PAIRS[:2]))
    assert (tally.tried, tally.wrong_bytes, tally.outside_bytes) == (2 * PAIRS_PER_STORAGE, 0, 0)


@pytest.mark.parametrize("model", [CASE_1, FAMILIES["mamba2, 1 group"][0][0]], ids=lambda model: model.name)
def test_in_tree_a_single_group_is_wrong_wherever_tp_differs(model: Model) -> None:
    """CASES.md, case 1 (vllm#55208): every cell of two different TP sizes, and none of equal ones."""
    sizes = tuple(size for size in SIZES if size in model.sizes)
    tally = sweep([(dataclasses.replace(model, sizes=sizes), STATE_PAIRS[:1])])
    assert (tally.wrong_bytes, tally.refused) == (0, 0)
    assert {src: dsts for (_, src), dsts in tally.wrong_cells.items()} == {
        src: {dst for dst in sizes if dst != src} for src in sizes
    }


def test_in_tree_case_1_mistakes_b_and_c() -> None:
    """P TP 1 -> D TP 2: rank 1's B comes from C, both ranks' C from behind the conv state."""
    srcs, dsts = (
        sweep_geometry.build(CASE_1, STATE_PAIRS[0][0], num_ranks, turn) for num_ranks, turn in ((1, 0), (2, 1))
    )
    mistaken = []
    for rank in range(2):
        tally = Tally()
        sweep_geometry.compare(srcs, dsts, rank, tally)
        mistaken.append(dict(tally.mistaken))
    section = 128 * 3 * 2
    assert mistaken == [
        {("conv.C", "temporal"): section},
        {("conv.B", "conv.C"): section, ("conv.C", "temporal"): section},
    ]


def test_in_tree_attention_is_wrong_where_p_has_replicas_and_d_several_heads_token_first() -> None:
    """The check that should refuse LBNHC for different TP is left out where P's TP exceeds the number of heads."""
    tally = sweep(small("attention", ORDER_PAIRS))
    assert tally.wrong_cells == {("2 KV heads, LBNHC", 4): {1}, ("2 KV heads, LBNHC", 8): {1}}


@pytest.mark.parametrize("family", ["mamba1", "mamba2, TP <= groups", "gated delta net", "KDA", "MLA"])
def test_in_tree_all_else_is_right(family: str) -> None:
    pairs = ORDER_PAIRS[:1] if family == "MLA" else STATE_PAIRS[:1]
    tally = sweep(small(family, pairs))
    assert (tally.accepted, tally.in_tree_wrong) == (PAIRS_PER_STORAGE, 0)


def test_in_tree_refuses_what_we_serve() -> None:
    sd = [pair for pair in STATE_PAIRS if not (pair[0].channel_first and pair[1].channel_first)]
    tally = sweep(small("gated delta net", sd))
    assert tally.refused == tally.tried == len(sd) * PAIRS_PER_STORAGE
    for family in ("short convolution", "linear attention"):
        tally = sweep(small(family, STATE_PAIRS[:1]))
        assert tally.refused == tally.tried == PAIRS_PER_STORAGE


# Can the sweep fail?


def shifted(src: Engine, dst: Engine, rank: int) -> list[Ranges]:
    return [dataclasses.replace(ranges, src=ranges.src + 1) for ranges in read_planned(src, dst, rank)]


def twice(src: Engine, dst: Engine, rank: int) -> list[Ranges]:
    return 2 * read_planned(src, dst, rank)


def nothing(src: Engine, dst: Engine, rank: int) -> list[Ranges]:
    return []


def too_long(src: Engine, dst: Engine, rank: int) -> list[Ranges]:
    return [dataclasses.replace(ranges, num_bytes=ranges.num_bytes + 1) for ranges in read_planned(src, dst, rank)]


@pytest.mark.parametrize("read", [shifted, twice, nothing, too_long])
def test_the_sweep_detects(read: sweep_geometry.Reader) -> None:
    tally = sweep(small("mamba1", STATE_PAIRS[:1]), read)
    assert tally.wrong_bytes > 0
    assert exit_status([tally]) == 1


def test_the_sweep_detects_a_byte_of_somebody_else() -> None:
    padded: Sequence = [pair for pair in STATE_PAIRS if pair[1].padding][:1]
    tally = sweep(small("short convolution", padded), too_long)
    assert tally.outside_bytes > 0


def test_the_sweep_has_not_shrunk() -> None:
    """Pairs of all rows, counted without planning: sizes that do not fit included."""
    all_pairs = sum(
        len(pairs) * len(model.sizes) * sum(model.sizes) for row in FAMILIES.values() for model, pairs in row
    )
    assert all_pairs > 900_000
    assert len(list(itertools.chain.from_iterable(FAMILIES.values()))) >= 25
