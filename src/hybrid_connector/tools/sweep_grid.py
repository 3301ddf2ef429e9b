"""Which families does the sweep try, at which TP sizes, stored in which ways?

1. ``Model``: one layer of a family, a request, and the TP sizes of P and D.
2. ``Storage``: how an engine keeps the layer; pairs of them are tried together.
3. ``FAMILIES``: the rows of the table.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hybrid_connector.core.families import (
    Attention,
    Conv,
    ConvSection,
    ElementType,
    Recurrent,
    Temporal,
    delta_net,
    kda,
    latent_attention,
    linear_attention,
    mamba1,
    mamba2,
    short_convolution,
)
from hybrid_connector.tools.in_tree_model import Order, StateType

Family = Attention | Recurrent

TP_SIZES = tuple(range(1, 17))

BF16, FP32, FP8 = ElementType("bfloat16", 2), ElementType("float32", 4), ElementType("float8_e4m3fn", 1)


@dataclass(frozen=True, slots=True)
class Storage:
    """How an engine stores the layer. ``padding``: bytes of nobody behind each page; with BLHNC, other layers'.

    ``order``, ``page_tokens`` and ``pages_per_block`` are attention's, ``channel_first`` is a recurrent layer's.
    """

    order: Order = "LBHNC"
    page_tokens: int = 16
    pages_per_block: int = 1
    channel_first: bool = True
    padding: int = 0


@dataclass(frozen=True, slots=True)
class Model:
    """One layer, a request of ``num_tokens``, and the TP sizes that are tried.

    ``state_type``: what vLLM's connector takes a recurrent layer for, ``None`` where vLLM has no such engine.
    """

    name: str
    family: Family
    state_type: StateType | None = None
    latent: bool = False
    num_tokens: int = 1
    sizes: tuple[int, ...] = TP_SIZES


StoragePairs = Sequence[tuple[Storage, Storage]]

ORDERS: tuple[Order, ...] = ("LBHNC", "LBNHC", "LHBNC", "BLHNC")


def in_order(order: Order, page_tokens: int = 16, pages_per_block: int = 1) -> Storage:
    """Attention pages in this order; block-outermost pages have other layers' between them."""
    return Storage(order, page_tokens, pages_per_block, padding=48 if order == "BLHNC" else 0)


ORDER_PAIRS: StoragePairs = [(in_order(src), in_order(dst)) for src, dst in itertools.product(ORDERS, ORDERS)]
"""Every memory order on either side."""


def _page_pairs() -> Iterator[tuple[Storage, Storage]]:
    """Every page length on either side, four times, with other logical blocks and orders each time."""
    for i, (src_tokens, dst_tokens, turn) in enumerate(itertools.product((16, 32, 64), (16, 32, 64), range(4))):
        src_order, dst_order = ORDERS[i % 4], ORDERS[(i + turn // 3) % 4]
        yield in_order(src_order, src_tokens, 1 + i % 2), in_order(dst_order, dst_tokens, 1 + i // 2 % 3)
    for order in ("LBHNC", "LBNHC"):
        yield Storage(order, padding=32), Storage(order, padding=16)
        yield in_order("LBHNC", 16), Storage(order, page_tokens=32, padding=16)


PAGE_PAIRS: StoragePairs = list(_page_pairs())

STATE_PAIRS: StoragePairs = [
    (Storage(channel_first=src_ds, padding=src_padding), Storage(channel_first=dst_ds, padding=dst_padding))
    for src_ds, dst_ds, src_padding, dst_padding in itertools.product((True, False), (True, False), (0, 24), (0, 40))
]
"""Both layouts of the conv state on either side, pages with and without padding."""


def _attention(num_kv_heads: int, element: ElementType = BF16, num_tokens: int = 37) -> Model:
    family = Attention(num_kv_heads, 2, element)
    return Model(f"{num_kv_heads} KV heads", family, num_tokens=num_tokens)


def _mamba2(num_groups: int, num_taps: int = 3) -> Model:
    family = mamba2(
        num_heads=48,
        head_dim=2,
        num_groups=num_groups,
        state_dim=3,
        num_taps=num_taps,
        conv_element=BF16,
        temporal_element=FP32,
    )
    return Model(f"n_groups {num_groups}" + (f", {num_taps} taps" if num_taps != 3 else ""), family, "mamba2")


def _delta_net(num_key_heads: int, num_value_heads: int) -> Model:
    family = delta_net(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=3,
        value_dim=2,
        num_taps=3,
        conv_element=BF16,
        temporal_element=FP32,
    )
    return Model(f"{num_key_heads} key, {num_value_heads} value heads", family, "gdn")


CASE_1 = Model(
    "d_inner 1536, n_groups 1, d_state 128, 3 taps",
    mamba2(
        num_heads=24, head_dim=64, num_groups=1, state_dim=128, num_taps=3, conv_element=BF16, temporal_element=BF16
    ),
    "mamba2",
    sizes=(1, 2, 4),
)
"""What users reported (vllm#55208)."""

MADE_UP = Recurrent(
    (
        Conv((ConvSection("u", 48, 2), ConvSection("gate", 1, 5)), 4, BF16),
        Temporal(("head", "row", "column"), (48, 3, 2), FP32),
        Temporal(("head", "slot"), (4, 5), BF16, name="ring"),
    )
)
"""A family that nobody has: a shared gate, and a ring with fewer heads than there may be ranks."""

Row = Sequence[tuple[Model, StoragePairs]]

POWERS = (1, 2, 4, 8, 16)

FAMILIES: dict[str, Row] = {
    "attention": [
        *((_attention(heads), ORDER_PAIRS) for heads in (2, 3, 4, 6, 8, 12)),
        *((_attention(heads, num_tokens=150), PAGE_PAIRS) for heads in (2, 4, 8)),
        (dataclasses.replace(_attention(1), sizes=POWERS), ORDER_PAIRS),
    ],
    "attention, fp8": [(_attention(4, FP8), ORDER_PAIRS), (_attention(8, FP8), ORDER_PAIRS)],
    "MLA": [
        (Model("latent 6", latent_attention(latent=6, element=BF16), latent=True, num_tokens=37), ORDER_PAIRS[:1]),
        (
            Model("latent 6", latent_attention(latent=6, element=BF16), latent=True, num_tokens=150, sizes=POWERS),
            PAGE_PAIRS,
        ),
    ],
    "mamba1": [
        (
            Model(
                "48 channels",
                mamba1(num_channels=48, state_dim=3, num_taps=3, conv_element=BF16, temporal_element=FP32),
                "mamba1",
            ),
            STATE_PAIRS,
        )
    ],
    "mamba2, TP <= groups": [
        (
            dataclasses.replace(_mamba2(groups), sizes=tuple(size for size in TP_SIZES if groups % size == 0)),
            STATE_PAIRS,
        )
        for groups in (8, 12, 16)
    ],
    # also with more ranks than groups, where vLLM's own mixer does not start
    "mamba2, few groups": [
        (dataclasses.replace(_mamba2(groups), state_type=None), STATE_PAIRS) for groups in (2, 4, 8)
    ],
    "mamba2, 1 group": [
        (_mamba2(1), STATE_PAIRS),
        (_mamba2(1, num_taps=5), STATE_PAIRS),
        (CASE_1, STATE_PAIRS[:1]),
    ],
    "gated delta net": [(_delta_net(16, 48), STATE_PAIRS), (_delta_net(48, 48), STATE_PAIRS)],
    "KDA": [
        (
            Model(
                "48 heads",
                kda(num_heads=48, head_dim=2, num_taps=3, conv_element=BF16, temporal_element=FP32),
                "gdn",
            ),
            STATE_PAIRS,
        )
    ],
    "short convolution": [
        (Model("96 channels", short_convolution(num_channels=96, num_taps=2, element=BF16), "short_conv"), STATE_PAIRS)
    ],
    "linear attention": [
        (Model("48 heads", linear_attention(num_heads=48, head_dim=2, element=FP32), "linear"), STATE_PAIRS)
    ],
    "made up": [(Model("u, gate, ring", MADE_UP), STATE_PAIRS)],
}
