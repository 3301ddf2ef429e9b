"""Do boxes behave like the sets of coordinates they stand for, and are impossible values refused?"""

import itertools
import math
import random

import pytest

from hybrid_connector.core.geometry import (
    Box,
    CacheTensor,
    Interval,
    Shard,
    StateKind,
    dense_shard,
    intersect,
    nest,
    subtract,
    subtract_all,
)

from oracle import elements
from refusals import refused

KV = CacheTensor("kv", StateKind.ATTENTION, ("H", "N", "C"), (4, None, 2), "bfloat16", 2)
CONV = CacheTensor("conv", StateKind.CONV, ("channel", "tap"), (8, 3), "bfloat16", 2)


def coordinates(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(interval.start, interval.stop) for interval in box.intervals)))


def boxes(extent: int, num_axes: int) -> list[Box]:
    """Every box inside ``extent`` on each axis."""
    intervals = list(itertools.combinations(range(extent + 1), 2))
    return [Box.of(*bounds) for bounds in itertools.product(intervals, repeat=num_axes)]


@pytest.mark.parametrize(("extent", "num_axes"), [(5, 1), (3, 2)])
def test_intersect_and_subtract_are_set_operations(extent: int, num_axes: int) -> None:
    for a, b in itertools.product(boxes(extent, num_axes), repeat=2):
        common = intersect(a, b)
        assert (coordinates(common) if common else set()) == coordinates(a) & coordinates(b)
        rest = subtract(a, b)
        assert len(rest) <= 2 * num_axes
        assert sum(part.volume for part in rest) == len(coordinates(a) - coordinates(b))
        assert set().union(*map(coordinates, rest)) == coordinates(a) - coordinates(b)


def test_subtract_all_random_holes() -> None:
    rng = random.Random(1)
    choices = boxes(4, 3)
    for _ in range(50):
        whole, *holes = rng.sample(choices, 5)
        rest: tuple[Box, ...] = (whole,)
        for hole in holes:
            rest = subtract_all(rest, hole)
        left = coordinates(whole).difference(*map(coordinates, holes))
        assert sum(part.volume for part in rest) == len(left)
        assert set().union(*map(coordinates, rest)) == left


def test_box_shape_volume_shift_and_text() -> None:
    box = Box.of((0, 2), (4, 8))
    assert box.shape == (2, 4)
    assert box.volume == 8
    assert box.shift(1, -4) == Box.of((0, 2), (0, 4))
    assert box.shift(0, 3) == Box.of((3, 5), (4, 8))
    assert str(box) == "[0, 2) x [4, 8)"


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_locate_agrees_with_the_formula(order: tuple[int, ...]) -> None:
    shard = dense_shard(KV, Box.of((1, 4), (0, 4), (0, 2)), offset=6, order=order)
    addresses = [address for address, _ in elements(shard)]
    located = [shard.locate(Box.of(*((x, x + 1) for x in coordinate))) for coordinate in sorted(coordinates(shard.box))]
    assert located == addresses
    assert sorted(located) == list(range(6, 6 + shard.num_bytes, 2))  # dense


def test_pages_follow_each_other_along_the_paged_axis() -> None:
    shard = dense_shard(KV, Box.of((0, 1), (0, 16), (0, 2)))
    assert shard.page_extent == 16
    assert shard.num_bytes == 64
    assert shard.box_at(3) == Box.of((0, 1), (48, 64), (0, 2))
    state = dense_shard(CONV, Box.of((4, 8), (0, 3)))
    assert state.page_extent == 1
    assert state.box_at(3) == state.box


def test_nest_agrees_with_counting_addresses_where_strides_divide() -> None:
    """Of strides that are multiples of each other it accepts those, and only those, that keep elements apart."""
    for strides in itertools.product((1, 2, 4, 8, 16), repeat=3):
        for extents in itertools.product((1, 2, 3), repeat=3):
            addresses = {
                sum(map(math.prod, zip(index, strides, strict=True)))
                for index in itertools.product(*map(range, extents))
            }
            accepted = nest(zip(strides, extents, strict=True), 1)
            assert not accepted or len(addresses) == math.prod(extents)
            if max(extents) == 2:
                assert accepted == (len(addresses) == math.prod(extents))


def test_padding_behind_the_last_element_may_be_used() -> None:
    assert nest([(4, 2), (6, 2)], 2)
    assert not nest([(4, 2), (5, 2)], 2)


@pytest.mark.parametrize("bounds", [(0, 0), (2, 1), (-1, 3)])
def test_interval_refuses(bounds: tuple[int, int]) -> None:
    with refused(f"interval [{bounds[0]}, {bounds[1]}): expected 0 <= start < stop"):
        Interval(*bounds)


def test_boxes_of_different_rank_do_not_compare() -> None:
    with refused("boxes of 1 and 2 axes do not compare: [0, 1); [0, 1) x [2, 3)"):
        intersect(Box.of((0, 1)), Box.of((0, 1), (2, 3)))


@pytest.mark.parametrize(
    ("axes", "shape", "item_bytes", "message"),
    [
        (("H",), (2, 3), 2, "t: 1 axes ('H',), 2 extents (2, 3)"),
        ((), (), 2, "t: 0 axes (), 0 extents ()"),
        (("H", "N"), (None, None), 2, "t: expected positive extents, at most one None, got (None, None)"),
        (("H", "N"), (0, None), 2, "t: expected positive extents, at most one None, got (0, None)"),
        (("H",), (2,), 0, "t: expected item_bytes > 0, got 0"),
    ],
)
def test_cache_tensor_refuses(
    axes: tuple[str, ...], shape: tuple[int | None, ...], item_bytes: int, message: str
) -> None:
    with refused(message):
        CacheTensor("t", StateKind.CONV, axes, shape, "bfloat16", item_bytes)


@pytest.mark.parametrize(
    ("tensor", "box", "offset", "strides", "message"),
    [
        (
            CONV,
            Box.of((0, 8)),
            0,
            (6, 2),
            "conv: axes ('channel', 'tap'), box [0, 8) and strides (6, 2) differ in rank",
        ),
        (
            CONV,
            Box.of((0, 8), (0, 3)),
            0,
            (6,),
            "conv: axes ('channel', 'tap'), box [0, 8) x [0, 3) and strides (6,) differ in rank",
        ),
        (CONV, Box.of((4, 9), (0, 3)), 0, (6, 2), "conv: axis channel has 8 elements, the shard holds [4, 9)"),
        (
            KV,
            Box.of((0, 1), (16, 32), (0, 2)),
            0,
            (64, 4, 2),
            "kv: a page starts at 0 on axis N, got [0, 1) x [16, 32) x [0, 2)",
        ),
        (CONV, Box.of((0, 8), (0, 3)), -2, (6, 2), "conv: expected offset >= 0, got -2"),
        (
            CONV,
            Box.of((0, 8), (0, 3)),
            0,
            (4, 2),
            "conv: strides (4, 2) make elements of [0, 8) x [0, 3) overlap",
        ),
        (
            CONV,
            Box.of((0, 8), (0, 3)),
            0,
            (6, 1),
            "conv: strides (6, 1) make elements of [0, 8) x [0, 3) overlap",
        ),
        (
            CONV,
            Box.of((0, 8), (0, 3)),
            0,
            (-6, 2),
            "conv: strides (-6, 2) make elements of [0, 8) x [0, 3) overlap",
        ),
    ],
)
def test_shard_refuses(tensor: CacheTensor, box: Box, offset: int, strides: tuple[int, ...], message: str) -> None:
    with refused(message):
        Shard(tensor, box, offset, strides)


def test_the_stride_of_an_axis_of_one_element_is_free() -> None:
    assert Shard(CONV, Box.of((3, 4), (0, 3)), 0, (0, 2)).num_bytes == 6
