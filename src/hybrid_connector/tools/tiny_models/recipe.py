"""What can be chosen about a tiny model, and what a family must supply?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

Kind: TypeAlias = Literal[
    "hybrid",
    "attention",
    "recurrent",
    "qwen3_next",
    "kimi_linear",
    "granite_h",
    "falcon_h1",
    "nemotron_h",
    "mamba1",
    "jamba",
    "lfm2",
    "sliding",
    "mla",
]
Json: TypeAlias = Mapping[str, object]
Weights: TypeAlias = Iterator[tuple[str, torch.Tensor]]

KINDS: tuple[Kind, ...] = get_args(Kind)
END_TOKEN_ID = 256
ANSWER_LETTERS = b"aeioklmn"
"""Few, because the fewer candidates, the rarer near ties between the best two."""

_ATTENTION_ONLY: tuple[Kind, ...] = ("attention", "sliding", "mla")
_STATE_ONLY: tuple[Kind, ...] = ("recurrent", "mamba1")
_NUM_GROUPS: Mapping[Kind, int] = {"recurrent": 2, "granite_h": 1, "falcon_h1": 1, "nemotron_h": 8}


@dataclass(frozen=True, slots=True)
class TinyModel:
    """Everything the written files depend on.

    `kind` picks the family:

    * "hybrid" (Qwen3.5), "qwen3_next" and "kimi_linear" repeat three gated delta nets and one attention layer;
    * "granite_h", "nemotron_h" (both Mamba2), "jamba" (Mamba1) and "lfm2" (short convolution alone) do so with their
      own recurrent layers, and "falcon_h1" has Mamba2 and attention in every layer;
    * "attention" (Qwen3), "sliding" (Gemma3: three windows, then full attention) and "mla" (DeepSeek-V2) have no state;
    * "recurrent" (Mamba2) and "mamba1" have nothing else.

    `conv_kernel` counts taps, the current token's included. `num_groups` is Mamba2's number of B/C groups, by default
    what the family's real models have. Families without a head size of their own divide `hidden_size` by the heads.
    """

    kind: Kind = "hybrid"
    seed: int = 0
    num_layers: int = 4
    hidden_size: int = 128
    num_attention_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 128
    num_key_heads: int = 2
    num_value_heads: int = 4
    linear_head_dim: int = 128
    num_groups: int | None = None
    conv_kernel: int = 4
    sliding_window: int = 192
    vocab_size: int = 320
    max_positions: int = 4096

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.vocab_size <= END_TOKEN_ID:
            raise ValueError(f"vocab_size: expected more than {END_TOKEN_ID} (bytes, end token), got {self.vocab_size}")
        if self.num_layers < 1:
            raise ValueError(f"num_layers: expected at least 1, got {self.num_layers}")
        for name, many, few in (
            ("num_attention_heads", self.num_attention_heads, self.num_kv_heads),
            ("num_value_heads", self.num_value_heads, self.num_key_heads),
        ):
            if few < 1 or many % few:
                raise ValueError(f"{name}: expected a multiple of {few}, got {many}")

    @property
    def layer_types(self) -> tuple[str, ...]:
        """One name per layer, as Hugging Face configs spell them."""
        if self.kind in _ATTENTION_ONLY:
            others = "sliding_attention" if self.kind == "sliding" else "full_attention"
        else:
            others = "linear_attention"
        if self.kind in _STATE_ONLY:
            return (others,) * self.num_layers
        return tuple(others if (i + 1) % 4 else "full_attention" for i in range(self.num_layers))

    @property
    def groups(self) -> int:
        """Mamba2's number of B/C groups."""
        return _NUM_GROUPS.get(self.kind, 1) if self.num_groups is None else self.num_groups


@dataclass(frozen=True, slots=True)
class Family:
    """The two halves of a model directory that differ between families."""

    config: Callable[[TinyModel], Json]
    weights: Callable[[TinyModel, torch.Generator], Weights]
