"""Which engines and requests do the benchmarks measure?

1. ``CONFIGS``: the parts of three models' config.json that say what a request leaves behind.
2. ``Pair``: a P and a D engine of one of them, laid out by vLLM's rules (``tools.models``), and a request.
3. ``sections``, ``one_by_one``: the same bytes as vLLM's own connector describes them, a descriptor per kernel block
   and section.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybrid_connector.core.blocks import BlockIds, RankLayout
from hybrid_connector.core.lowering import expand
from hybrid_connector.core.planning import trace_transfer
from hybrid_connector.tools.models.config import read_config
from hybrid_connector.tools.models.engine import Blocks, Engine, describe_engine, parse_serve
from hybrid_connector.transport.binding import BoundCopies, request_pages

QWEN = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 64,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
    "dtype": "bfloat16",
}
NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "dtype": "bfloat16",
}
NEMOTRON_PATTERN = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
"""As published with Nemotron-H-8B: 24 Mamba2 layers, 4 of attention."""

MODELS: Mapping[str, tuple[dict[str, Any], int]] = {
    "qwen3.5-397b": (QWEN, 60),
    "qwen3.8-2.4t": (QWEN, 92),
    "nemotron-h-8b": (NEMOTRON, len(NEMOTRON_PATTERN)),
}
"""Config and number of layers. The second is inferred from published sums (tools/sizing/presets.toml)."""


def config_of(model: str, scale: int) -> dict[str, Any]:
    """A model with one layer in ``scale``, at least one period of its pattern."""
    config, num_layers = MODELS[model]
    if config is NEMOTRON:
        return {**config, "hybrid_override_pattern": NEMOTRON_PATTERN[: max(8, num_layers // scale)]}
    return {**config, "num_hidden_layers": max(4, num_layers // scale // 4 * 4)}


@dataclass(frozen=True, slots=True)
class Pair:
    """Layouts of all ranks of P, and of D's first rank; blocks of a request of ``num_tokens`` on both sides."""

    srcs: tuple[RankLayout, ...]
    dst: RankLayout
    src_blocks: BlockIds
    dst_blocks: BlockIds
    num_tokens: int


def make_pair(
    model: str, tp: tuple[int, int], num_tokens: int, fragmented: int, *, scale: int = 1, backend: str = "FLASHINFER"
) -> Pair:
    """P and D of these tensor-parallel sizes; D recomputes the last token, so one less moves.

    ``backend``: of attention; FLASHINFER stores pages of 16 tokens, FLASH_ATTN whole blocks.
    """
    config = read_config(config_of(model, scale), model)
    lines = [f"--attention-backend {backend} --tensor-parallel-size {size}" for size in tp]
    engines = [describe_engine(config, parse_serve(line, "cuda")) for line in lines]
    blocks = [engine.block_ids(num_tokens - 1, Blocks(fragmented)) for engine in engines]
    layouts = [_layouts(engine, ids) for engine, ids in zip(engines, blocks, strict=True)]
    return Pair(layouts[0], layouts[1][0], blocks[0], blocks[1], num_tokens - 1)


def _layouts(engine: Engine, ids: BlockIds) -> tuple[RankLayout, ...]:
    last = max(block for group in ids for block in group if block is not None)
    return engine.layouts(last + 1)


@dataclass(frozen=True, slots=True)
class Section:
    """A run of every page of a layer: as vLLM's own connector describes state, each is a descriptor.

    Page ``i`` of a request's wanted ones has it at ``*_start + pages[*_first + i * *_step] * *_stride``, where
    ``pages`` are those of the group, and ``num_*`` is how many there are at most.
    """

    src_rank: int
    src_group: int
    dst_group: int
    src_start: int
    dst_start: int
    src_stride: int
    dst_stride: int
    src_first: int
    dst_first: int
    src_step: int
    dst_step: int
    num_src: int
    num_dst: int
    num_bytes: int


def sections(pair: Pair, dst_base: int, src_bases: Sequence[int]) -> tuple[Section, ...]:
    """What D's rank reads: every kernel block of every layer, every section of every state on its own."""
    layouts = {layout.rank: layout for layout in pair.srcs}
    layers = {rank: {layer.name: layer for layer in layout.layers} for rank, layout in layouts.items()}
    mine = {layer.name: layer for layer in pair.dst.layers}
    origins = trace_transfer(pair.dst, pair.srcs)
    periods: dict[str, tuple[int, int]] = {}
    for origin in origins:
        src, dst = periods.get(origin.tensor, (1, 1))
        periods[origin.tensor] = max(src, origin.src_page + 1), max(dst, origin.dst_page + 1)
    found = []
    for origin in origins:
        src, dst = layers[origin.src_rank][origin.layer], mine[origin.layer]
        src_group, dst_group = layouts[origin.src_rank].groups[src.group], pair.dst.groups[dst.group]
        found += [
            Section(
                origin.src_rank,
                src.group,
                dst.group,
                src_bases[origin.src_rank] + src.offset + run.src_offset,
                dst_base + dst.offset + run.dst_offset,
                src.page_stride,
                dst.page_stride,
                origin.src_page,
                origin.dst_page,
                *periods[origin.tensor],
                src_group.num_blocks * src_group.pages_per_block,
                dst_group.num_blocks * dst_group.pages_per_block,
                run.num_bytes,
            )
            for run in expand(origin.copy, 0, 0)
        ]
    return tuple(found)


def one_by_one(pair: Pair, dst_base: int, src_bases: Sequence[int]) -> tuple[BoundCopies, ...]:
    """The sections of a pair's request, per P rank."""
    dst_pages = request_pages("D", pair.dst.groups, pair.dst_blocks, pair.num_tokens)
    src_pages = request_pages("P", pair.srcs[0].groups, pair.src_blocks, pair.num_tokens)
    lists: dict[int, list[tuple[Any, Any, Any]]] = {}
    for section in sections(pair, dst_base, src_bases):
        of_src = src_pages[section.src_group][section.src_first :: section.src_step]
        of_dst = dst_pages[section.dst_group][section.dst_first :: section.dst_step]
        number = min(len(of_src), len(of_dst))
        src = section.src_start + of_src[:number] * section.src_stride
        dst = section.dst_start + of_dst[:number] * section.dst_stride
        lists.setdefault(section.src_rank, []).append((src, dst, np.full(number, section.num_bytes)))
    return tuple(
        BoundCopies(rank, *(np.concatenate(column).astype(np.uint64) for column in zip(*found, strict=True)))
        for rank, found in sorted(lists.items())
    )
