"""Is exactly a request's state inside its ranges, however a rank stores it?"""

import itertools

import numpy as np
import pytest

from hybrid_connector.core.digests import RunList
from hybrid_connector.core.errors import TransferError
from hybrid_connector.tools.byte_oracle import NO_STATE, identities
from hybrid_connector.transport.ranges import Ranges, StateMap

from layouts import Model, Storage, build_engine, place
from refusals import refused

MODELS = {
    "hybrid": Model(num_attention=2, num_kv_heads=4, num_recurrent=2, family="gdn", num_heads=4, num_groups=4),
    "mamba2": Model(num_attention=1, num_kv_heads=2, num_recurrent=2, family="mamba2", num_heads=4, num_groups=2),
    "attention": Model(num_attention=2, num_kv_heads=2),
}
STORAGES = {
    f"{order} {placement} {num_ranks}": Storage(
        num_ranks,
        1,
        4,
        2,
        order=order,
        placement=placement,
        page_padding=8,
        channel_first=num_ranks == 1,
        max_tokens=30,
    )
    for order, placement, num_ranks in itertools.product(("HND", "NHD", "LHBNC"), ("layer", "block", "shared"), (1, 2))
    if order != "LHBNC" or placement == "layer"
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("num_tokens", [1, 17, 30])
def test_the_ranges_are_the_state_of_the_request(model: str, storage: str, num_tokens: int) -> None:
    for layout in build_engine(MODELS[model], STORAGES[storage]):
        blocks = place([layout], [layout], num_tokens).src_blocks
        numbers = {shard.tensor.name: i for i, shard in enumerate(s for x in layout.layers for s in x.shards)}
        pages = [group.num_request_pages(num_tokens) for group in layout.groups]
        is_state = identities(layout, numbers, blocks, pages) != NO_STATE
        ranges = StateMap(layout).ranges(blocks, num_tokens)
        held = np.zeros(layout.region_bytes, int)
        for start, stop in zip(ranges.starts, ranges.stops, strict=True):
            held[start:stop] += 1
        assert (held == is_state).all()
        assert (ranges.starts[1:] > ranges.stops[:-1]).all()


def test_blocks_outside_a_window_are_not_state() -> None:
    (layout,) = build_engine(MODELS["attention"], Storage(1, 1, 4, 2, max_tokens=30))
    blocks = place([layout], [layout], 30).src_blocks
    whole = StateMap(layout).ranges(blocks, 30)
    attention = (None, None, *blocks[0][2:])
    rest = StateMap(layout).ranges((attention, *blocks[1:]), 30)
    # 8 of 15 tokens' pages, two blocks of two pages, are gone
    assert (rest.stops - rest.starts).sum() * 2 == (whole.stops - whole.starts).sum()


RANGES = Ranges(np.array([8, 64]), np.array([24, 128]))


def runs(*pairs: tuple[int, int], word_bytes: int = 1) -> RunList:
    offsets, num_bytes = (
        b"".join(value.to_bytes(8, "little") for value in column) for column in zip(*pairs, strict=True)
    )
    return RunList(word_bytes, offsets, num_bytes)


@pytest.mark.parametrize(
    "inside",
    [runs((8, 16)), runs((64, 64)), runs((9, 1), (23, 1), (64, 1), (127, 1)), runs((64, 64), (8, 16), word_bytes=4)],
)
def test_runs_inside_are_let_through(inside: RunList) -> None:
    RANGES.refuse_outside(inside)


@pytest.mark.parametrize(
    "outside",
    [
        *((7, 1), (7, 2), (0, 1), (24, 1), (23, 2), (8, 17), (8, 120), (63, 1), (63, 2), (127, 2), (128, 1), (10, 0)),
        *((2**63, 1), (2**64 - 1, 1), (8, 2**64 - 8), (2**64 - 8, 24), (8, 2**63)),
    ],
)
def test_runs_outside_are_refused(outside: tuple[int, int]) -> None:
    start, size = outside
    with refused(f"run 1 of 3: [{start}, {start + size}) is no state of the lease", TransferError):
        RANGES.refuse_outside(runs((8, 1), outside, (9, 1)))


def test_every_byte_is_worked_on_once() -> None:
    RANGES.refuse_outside(runs((64, 64), (8, 15), (8, 1)))
    with refused("expected at most the 80 bytes of the lease, got runs of 81 bytes", TransferError):
        RANGES.refuse_outside(runs((64, 64), (8, 16), (8, 1)))


@pytest.mark.parametrize("bad", [(10, 4), (8, 6)])
def test_words_are_whole(bad: tuple[int, int]) -> None:
    with refused("expected runs of whole words of 4 bytes", TransferError):
        RANGES.refuse_outside(runs((64, 4), bad, word_bytes=4))
