"""Are a family's shapes and channels those of vLLM's own layers?

``MambaStateShapeCalculator`` says how large each rank's state is; the weight loaders say which channels it belongs to.
"""

import warnings
from collections.abc import Iterator

import pytest
import torch

from hybrid_connector.core import families
from hybrid_connector.core.families import ElementType, Recurrent, StatePage
from hybrid_connector.tools import nursery

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what vLLM's dependencies think of each other
    nursery.import_vllm()
    from vllm.model_executor.layers.mamba import mamba_utils
    from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader

CALCULATOR = mamba_utils.MambaStateShapeCalculator
ELEMENTS = {"conv_element": ElementType("bfloat16", 2), "temporal_element": ElementType("float32", 4)}
POWERS = (1, 2, 4, 8, 16)
HEADS, HEAD_DIM, STATE, TAPS = 16, 8, 4, 3

Case = tuple[str, Recurrent, int, tuple[tuple[int, ...], ...]]


def shapes_of_vllm() -> Iterator[Case]:
    """Each family and TP size, and vLLM's shapes for them."""
    for tp in POWERS:
        channels = HEADS * HEAD_DIM
        yield (
            "mamba1",
            families.mamba1(num_channels=channels, state_dim=STATE, num_taps=TAPS, **ELEMENTS),
            tp,
            CALCULATOR.mamba1_state_shape(tp, channels, STATE, TAPS + 1),
        )
        for groups in (1, 2, 8, 16):
            if groups % tp and groups != 1:
                continue
            for speculative in (0, 2):
                mamba2 = families.mamba2(
                    num_heads=HEADS,
                    head_dim=HEAD_DIM,
                    num_groups=groups,
                    state_dim=STATE,
                    num_taps=TAPS + speculative,
                    **ELEMENTS,
                )
                shapes = CALCULATOR.mamba2_state_shape(
                    tp, channels, groups, HEADS, HEAD_DIM, STATE, TAPS + 1, speculative
                )
                yield f"mamba2, {groups} groups", mamba2, tp, shapes
        yield (
            "gated delta net",
            families.delta_net(
                num_key_heads=16, num_value_heads=32, key_dim=HEAD_DIM, value_dim=STATE, num_taps=TAPS, **ELEMENTS
            ),
            tp,
            CALCULATOR.gated_delta_net_state_shape(tp, 16, 32, HEAD_DIM, STATE, TAPS + 1),
        )
        yield (
            "KDA",
            families.kda(num_heads=HEADS, head_dim=HEAD_DIM, num_taps=TAPS, **ELEMENTS),
            tp,
            CALCULATOR.kda_state_shape(tp, HEADS, HEAD_DIM, conv_kernel_size=TAPS + 1),
        )
        yield (
            "short convolution",
            families.short_convolution(num_channels=channels, num_taps=TAPS, element=ELEMENTS["conv_element"]),
            tp,
            CALCULATOR.short_conv_state_shape(tp, channels, TAPS + 1),
        )
        yield (
            "linear attention",
            families.linear_attention(num_heads=HEADS, head_dim=HEAD_DIM, element=ELEMENTS["temporal_element"]),
            tp,
            CALCULATOR.linear_attention_state_shape(HEADS, tp, HEAD_DIM),
        )


@pytest.mark.parametrize("channel_first", [True, False])
def test_shapes(channel_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mamba_utils, "is_conv_state_dim_first", lambda: channel_first)
    for name, family, tp, shapes in shapes_of_vllm():
        for rank in range(tp):
            assert family.shapes(StatePage(channel_first), rank=rank, num_ranks=tp) == shapes, (name, tp, rank)


def channels(family: Recurrent, rank: int, num_ranks: int) -> list[tuple[str, int]]:
    """The conv channels of a rank in order: section and number of the channel in the whole model."""
    shards = family.shards("l", StatePage(channel_first=True), rank=rank, num_ranks=num_ranks)
    return [
        (shard.tensor.name.removeprefix("l.conv."), channel)
        for shard in shards
        if ".conv." in shard.tensor.name
        for channel in range(shard.box.intervals[0].start, shard.box.intervals[0].stop)
    ]


@pytest.mark.parametrize("num_groups", [1, 2, 8, 16])
def test_mamba2_channels_are_those_that_the_weight_loader_takes(num_groups: int) -> None:
    family = families.mamba2(
        num_heads=HEADS, head_dim=HEAD_DIM, num_groups=num_groups, state_dim=STATE, num_taps=TAPS, **ELEMENTS
    )
    whole = channels(family, 0, 1)
    for tp in POWERS:
        extra = CALCULATOR.extra_groups_for_head_shards(num_groups, tp)
        if extra and num_groups != 1:
            continue  # the mixer does not start
        group = ((num_groups + extra) * STATE, extra * STATE, num_groups == 1)
        for rank in range(tp):
            mine = channels(family, rank, tp)
            loaded = torch.full((len(mine),), -1)
            loader = mamba_v2_sharded_weight_loader([(HEADS * HEAD_DIM, 0, False), group, group], tp, rank)
            loader(torch.nn.Parameter(loaded, requires_grad=False), torch.arange(len(whole)))
            assert [whole[channel] for channel in loaded.tolist()] == mine, (tp, rank)
