"""Do the runs of a copy name the same addresses as the formula, element by element, and as few as possible?"""

import itertools

import pytest

from hybrid_connector.core.geometry import Box, CacheTensor, Shard, StateKind, dense_shard
from hybrid_connector.core.lowering import Copy, Loop, Run, expand, lower, merge

from oracle import elements
from refusals import refused

TENSOR = CacheTensor("t", StateKind.TEMPORAL, ("a", "b", "c"), (4, 3, 5), "float32", 4)
WHOLE = Box.of((0, 4), (0, 3), (0, 5))
ORDERS = list(itertools.permutations(range(3)))


def moved(runs: tuple[Run, ...]) -> dict[int, int]:
    """D byte to P byte."""
    pairs = [(run.dst_offset + i, run.src_offset + i) for run in runs for i in range(run.num_bytes)]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def wanted(src: Shard, dst: Shard, box: Box) -> dict[int, int]:
    origin = {place: address for address, place in elements(src)}
    inside = {place for _, place in elements(dense_shard(TENSOR, box))}
    return {address + i: origin[place] + i for address, place in elements(dst) if place in inside for i in range(4)}


def steps(pairs: dict[int, int]) -> int:
    """Ranges in which both sides go on byte by byte."""
    return sum(dst - 1 not in pairs or pairs[dst - 1] != src - 1 for dst, src in pairs.items())


@pytest.mark.parametrize("src_order", ORDERS)
@pytest.mark.parametrize("dst_order", ORDERS)
def test_runs_are_right_and_fewest(src_order: tuple[int, ...], dst_order: tuple[int, ...]) -> None:
    src = dense_shard(TENSOR, WHOLE, 12, src_order)
    for dst_box in (WHOLE, Box.of((1, 3), (0, 3), (0, 5)), Box.of((3, 4), (0, 3), (1, 5))):
        dst = dense_shard(TENSOR, dst_box, 8, dst_order)
        for box in (dst_box, Box.of((3, 4), (1, 2), (1, 4)), Box.of((1, 3), (0, 3), (2, 3))):
            if any(b.start < d.start or b.stop > d.stop for b, d in zip(box.intervals, dst_box.intervals, strict=True)):
                continue
            runs = merge(expand(lower(src, box, dst, box), 0, 0))
            assert moved(runs) == wanted(src, dst, box)
            assert len(runs) == steps(moved(runs))


def test_padding_between_rows_is_not_folded() -> None:
    padded = Shard(TENSOR, WHOLE, 0, (96, 32, 4))
    dense = dense_shard(TENSOR, WHOLE)
    copy = lower(padded, WHOLE, dense, WHOLE)
    assert copy == Copy(0, 0, 20, (Loop(4, 96, 60), Loop(3, 32, 20)))
    # equal padding on both sides: still not ours to copy
    assert lower(padded, WHOLE, padded, WHOLE).run_bytes == 20


def test_equal_strides_fold_to_one_run() -> None:
    shard = dense_shard(TENSOR, WHOLE, 4)
    assert lower(shard, WHOLE, shard, WHOLE) == Copy(4, 4, 240)
    part = Box.of((1, 3), (0, 3), (0, 5))
    assert lower(shard, part, shard, part) == Copy(64, 64, 120)


def test_an_axis_of_one_element_does_not_break_a_run() -> None:
    box = Box.of((1, 2), (0, 3), (0, 5))
    odd = Shard(TENSOR, box, 0, (7, 20, 4))
    assert lower(dense_shard(TENSOR, WHOLE), box, odd, box) == Copy(60, 0, 60)


def test_lower_refuses_boxes_of_different_shape() -> None:
    shard = dense_shard(TENSOR, WHOLE)
    with refused("t: boxes of different shape: [0, 1) x [0, 3) x [0, 5); [0, 4) x [0, 3) x [0, 5)"):
        lower(shard, Box.of((0, 1), (0, 3), (0, 5)), shard, WHOLE)


def test_expand_lists_loops_outermost_first() -> None:
    copy = Copy(100, 10, 4, (Loop(2, 50, 20), Loop(2, 8, 4)))
    assert list(expand(copy, 3, 1)) == [
        Run(1, 10, 3, 100, 4),
        Run(1, 14, 3, 108, 4),
        Run(1, 30, 3, 150, 4),
        Run(1, 34, 3, 158, 4),
    ]


def test_merge_joins_what_touches_on_both_sides_of_one_page_pair() -> None:
    assert merge([Run(0, 4, 0, 14, 4), Run(0, 0, 0, 10, 4)]) == (Run(0, 0, 0, 10, 8),)
    apart = (
        Run(0, 0, 0, 10, 4),
        Run(0, 4, 0, 20, 4),  # touches on D only
        Run(0, 12, 0, 24, 4),  # touches on P only
        Run(0, 16, 1, 28, 4),  # another P page
        Run(1, 20, 1, 32, 4),  # another D page
    )
    assert merge(reversed(apart)) == apart
    assert merge([]) == ()
