"""Which tiny models hold keys and values only? Qwen3, Gemma3 (sliding windows) and DeepSeek-V2 (latent attention)."""

from __future__ import annotations

import math

import torch

from hybrid_connector.tools.tiny_models.parts import (
    attention_config,
    constant,
    decoder_weights,
    matrix,
    mlp_weights,
    norm_weights,
    normed_attention_weights,
    rope,
)
from hybrid_connector.tools.tiny_models.recipe import Family, Json, TinyModel, Weights

_LATENT_SIZE, _ROPE_SIZE, _NOPE_SIZE, _VALUE_SIZE = 512, 64, 64, 64
"""vLLM's CPU kernel for latent attention exists for a latent of 512 and a rotary part of 64 alone."""


def _qwen3_config(model: TinyModel) -> Json:
    return attention_config(model) | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "layer_types": list(model.layer_types),
        "rope_parameters": rope(),
    }


def _qwen3_weights(model: TinyModel, generator: torch.Generator) -> Weights:
    def layer(prefix: str, layer_type: str) -> Weights:
        yield from norm_weights(model, prefix, "input_layernorm", "post_attention_layernorm")
        yield from normed_attention_weights(model, generator, f"{prefix}.self_attn")
        yield from mlp_weights(model, generator, f"{prefix}.mlp")

    return decoder_weights(model, generator, layer)


def _gemma3_config(model: TinyModel) -> Json:
    return attention_config(model) | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": list(model.layer_types),
        "sliding_window": model.sliding_window,
        "query_pre_attn_scalar": model.head_dim,
        "rope_parameters": {"sliding_attention": rope(), "full_attention": rope()},
    }


def _gemma3_weights(model: TinyModel, generator: torch.Generator) -> Weights:
    """Gemma stores norm weights minus one, and multiplies embeddings by the root of their size."""

    def layer(prefix: str, layer_type: str) -> Weights:
        places = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        yield from norm_weights(model, prefix, *(f"{place}_layernorm" for place in places), value=0.0)
        yield from normed_attention_weights(model, generator, f"{prefix}.self_attn", norm_offset=1.0)
        yield from mlp_weights(model, generator, f"{prefix}.mlp")

    return decoder_weights(model, generator, layer, norm=0.0, embedding_std=1 / math.sqrt(model.hidden_size))


def latent_attention_config() -> dict[str, object]:
    return {
        "q_lora_rank": None,
        "kv_lora_rank": _LATENT_SIZE,
        "qk_nope_head_dim": _NOPE_SIZE,
        "qk_rope_head_dim": _ROPE_SIZE,
        "v_head_dim": _VALUE_SIZE,
    }


def latent_attention_weights(model: TinyModel, generator: torch.Generator, prefix: str) -> Weights:
    hidden, heads = model.hidden_size, model.num_attention_heads
    yield f"{prefix}.q_proj.weight", matrix(generator, heads * (_NOPE_SIZE + _ROPE_SIZE), hidden, gain=3.0)
    yield f"{prefix}.kv_a_proj_with_mqa.weight", matrix(generator, _LATENT_SIZE + _ROPE_SIZE, hidden)
    yield f"{prefix}.kv_a_layernorm.weight", constant(_LATENT_SIZE, 1.0)
    yield f"{prefix}.kv_b_proj.weight", matrix(generator, heads * (_NOPE_SIZE + _VALUE_SIZE), _LATENT_SIZE)
    yield f"{prefix}.o_proj.weight", matrix(generator, hidden, heads * _VALUE_SIZE)


def _deepseek_config(model: TinyModel) -> Json:
    return (
        attention_config(model)
        | latent_attention_config()
        | {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "num_key_value_heads": model.num_attention_heads,
            "head_dim": _ROPE_SIZE,
            "first_k_dense_replace": model.num_layers,  # no mixture of experts
            "rope_parameters": rope(),
        }
    )


def _deepseek_weights(model: TinyModel, generator: torch.Generator) -> Weights:
    def layer(prefix: str, layer_type: str) -> Weights:
        yield from norm_weights(model, prefix, "input_layernorm", "post_attention_layernorm")
        yield from latent_attention_weights(model, generator, f"{prefix}.self_attn")
        yield from mlp_weights(model, generator, f"{prefix}.mlp")

    return decoder_weights(model, generator, layer)


QWEN3 = Family(_qwen3_config, _qwen3_weights)
GEMMA3 = Family(_gemma3_config, _gemma3_weights)
DEEPSEEK_V2 = Family(_deepseek_config, _deepseek_weights)
