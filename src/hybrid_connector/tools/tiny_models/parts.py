"""Which configuration and which layers do several families share, and how are weights drawn?

Matrices keep the size of their input, so that every layer counts; norms are ones; nothing is zero but biases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from hybrid_connector.tools.tiny_models.recipe import ANSWER_LETTERS, END_TOKEN_ID, TinyModel, Weights


def common_config(model: TinyModel) -> dict[str, object]:
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": END_TOKEN_ID,
        "pad_token_id": END_TOKEN_ID,
    }


def attention_config(model: TinyModel) -> dict[str, object]:
    return common_config(model) | {
        "intermediate_size": 2 * model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": model.max_positions,
        "attention_bias": False,
    }


def dividing(model: TinyModel) -> TinyModel:
    """The same for a family without a head size of its own: the heads share the hidden size."""
    return replace(model, head_dim=model.hidden_size // model.num_attention_heads)


def rope(**extra: object) -> dict[str, object]:
    return {"rope_type": "default", "rope_theta": 10000.0, **extra}


def normal(generator: torch.Generator, *shape: int, std: float) -> torch.Tensor:
    return (torch.randn(*shape, generator=generator) * std).to(torch.bfloat16)


def matrix(generator: torch.Generator, rows: int, columns: int, *, gain: float = 1.0) -> torch.Tensor:
    """A projection of std 0.09 at 128 inputs, with the same gain for any other number of inputs.

    With 0.15 the MLPs dominate and double the effect of every bf16 rounding.
    """
    return normal(generator, rows, columns, std=gain * 0.09 * math.sqrt(128 / columns))


def constant(size: int, value: float, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full((size,), value, dtype=dtype)


def decay_rates(num_heads: int) -> torch.Tensor:
    """`A_log`: a memory of tens of thousands of tokens for the first head, of tens for the last."""
    return torch.linspace(math.log(3e-5), math.log(0.03), num_heads)


def embedding(model: TinyModel, generator: torch.Generator, *, std: float = 1.0) -> torch.Tensor:
    return normal(generator, model.vocab_size, model.hidden_size, std=std)


def output_head(model: TinyModel, generator: torch.Generator) -> torch.Tensor:
    """Rows for `ANSWER_LETTERS`, the other rows are zero (`vocab_size`, `hidden_size`).

    The letters' rows are pairs of opposites, so the best letter is never below zero.
    """
    head = torch.zeros(model.vocab_size, model.hidden_size, dtype=torch.bfloat16)
    rows = matrix(generator, len(ANSWER_LETTERS) // 2, model.hidden_size)
    head[list(ANSWER_LETTERS)] = torch.cat([rows, -rows])
    return head


def norm_weights(model: TinyModel, prefix: str, *names: str, value: float = 1.0) -> Weights:
    for name in names:
        yield f"{prefix}.{name}.weight", constant(model.hidden_size, value)


def decoder_weights(
    model: TinyModel,
    generator: torch.Generator,
    layer_weights: Callable[[str, str], Weights],
    *,
    layer_types: Sequence[str] | None = None,
    names: tuple[str, str, str] = ("model", "embed_tokens", "norm"),
    norm: float = 1.0,
    embedding_std: float = 1.0,
) -> Weights:
    """Embedding, what `layer_weights` gives for the prefix and type of each layer, last norm and output head.

    `names` are those of the whole, of the embedding and of the last norm, whose weights are `norm`.
    """
    root, embed, last_norm = names
    yield f"{root}.{embed}.weight", embedding(model, generator, std=embedding_std)
    for index, layer_type in enumerate(layer_types or model.layer_types):
        yield from layer_weights(f"{root}.layers.{index}", layer_type)
    yield from norm_weights(model, root, last_norm, value=norm)
    yield "lm_head.weight", output_head(model, generator)


def mlp_weights(
    model: TinyModel,
    generator: torch.Generator,
    prefix: str,
    *,
    inner: int | None = None,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Weights:
    hidden, inner = model.hidden_size, inner or 2 * model.hidden_size
    gate, up, down = names
    yield f"{prefix}.{gate}.weight", matrix(generator, inner, hidden)
    yield f"{prefix}.{up}.weight", matrix(generator, inner, hidden)
    yield f"{prefix}.{down}.weight", matrix(generator, hidden, inner)


def normed_attention_weights(
    model: TinyModel, generator: torch.Generator, prefix: str, *, gated: bool = False, norm_offset: float = 0.0
) -> Weights:
    """Query and key norms of 3 make attention sharp: a single token of a long prompt can win it."""
    hidden, heads, kv_heads, head_dim = (
        model.hidden_size,
        model.num_attention_heads,
        model.num_kv_heads,
        model.head_dim,
    )
    yield f"{prefix}.q_proj.weight", matrix(generator, heads * head_dim * (2 if gated else 1), hidden)
    yield f"{prefix}.k_proj.weight", matrix(generator, kv_heads * head_dim, hidden)
    yield f"{prefix}.v_proj.weight", matrix(generator, kv_heads * head_dim, hidden)
    yield f"{prefix}.o_proj.weight", matrix(generator, hidden, heads * head_dim)
    yield f"{prefix}.q_norm.weight", constant(head_dim, 3.0 - norm_offset)
    yield f"{prefix}.k_norm.weight", constant(head_dim, 3.0 - norm_offset)


def plain_attention_weights(model: TinyModel, generator: torch.Generator, prefix: str) -> Weights:
    """Attention without norms; the gain of queries and keys makes it as sharp as the norms of 3 would."""
    hidden, heads, kv_heads, head_dim = (
        model.hidden_size,
        model.num_attention_heads,
        model.num_kv_heads,
        model.head_dim,
    )
    yield f"{prefix}.q_proj.weight", matrix(generator, heads * head_dim, hidden, gain=3.0)
    yield f"{prefix}.k_proj.weight", matrix(generator, kv_heads * head_dim, hidden, gain=3.0)
    yield f"{prefix}.v_proj.weight", matrix(generator, kv_heads * head_dim, hidden)
    yield f"{prefix}.o_proj.weight", matrix(generator, hidden, heads * head_dim)
