"""Which tiny models hold the state of gated delta nets? Qwen3.5, Qwen3-Next and Kimi-Linear, beside attention."""

from __future__ import annotations

import torch

from hybrid_connector.tools.tiny_models.attention import latent_attention_config, latent_attention_weights
from hybrid_connector.tools.tiny_models.parts import (
    attention_config,
    constant,
    decay_rates,
    decoder_weights,
    matrix,
    mlp_weights,
    norm_weights,
    normal,
    normed_attention_weights,
    rope,
)
from hybrid_connector.tools.tiny_models.recipe import Family, Json, TinyModel, Weights

_NUM_EXPERTS = 2
_EXPERT_SIZE = 64


def _qwen_config(model: TinyModel) -> dict[str, object]:
    return attention_config(model) | {
        "layer_types": list(model.layer_types),
        "rope_parameters": rope(partial_rotary_factor=0.25),
        "linear_conv_kernel_dim": model.conv_kernel,
        "linear_key_head_dim": model.linear_head_dim,
        "linear_value_head_dim": model.linear_head_dim,
        "linear_num_key_heads": model.num_key_heads,
        "linear_num_value_heads": model.num_value_heads,
    }


def _qwen3_5_config(model: TinyModel) -> Json:
    return _qwen_config(model) | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}


def _qwen3_next_config(model: TinyModel) -> Json:
    """Every token takes all experts: a choice would turn a rounding into another answer."""
    return _qwen_config(model) | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "partial_rotary_factor": 0.25,
        "decoder_sparse_step": 1,
        "num_experts": _NUM_EXPERTS,
        "num_experts_per_tok": _NUM_EXPERTS,
        "norm_topk_prob": True,
        "moe_intermediate_size": _EXPERT_SIZE,
        "shared_expert_intermediate_size": _EXPERT_SIZE,
    }


def _delta_net_weights(model: TinyModel, generator: torch.Generator, prefix: str, *, fused: bool) -> Weights:
    """`fused` is how Qwen3-Next stores q, k, v, z and b, a; drawn at random, the order within does not matter."""
    hidden, value_heads = model.hidden_size, model.num_value_heads
    key_dim = model.num_key_heads * model.linear_head_dim
    value_dim = value_heads * model.linear_head_dim
    conv_dim = 2 * key_dim + value_dim
    if fused:
        yield f"{prefix}.in_proj_qkvz.weight", matrix(generator, conv_dim + value_dim, hidden)
        yield f"{prefix}.in_proj_ba.weight", matrix(generator, 2 * value_heads, hidden)
    else:
        yield f"{prefix}.in_proj_qkv.weight", matrix(generator, conv_dim, hidden)
        yield f"{prefix}.in_proj_z.weight", matrix(generator, value_dim, hidden)
        yield f"{prefix}.in_proj_b.weight", matrix(generator, value_heads, hidden)
        yield f"{prefix}.in_proj_a.weight", matrix(generator, value_heads, hidden)
    yield f"{prefix}.conv1d.weight", normal(generator, conv_dim, 1, model.conv_kernel, std=0.5)
    yield f"{prefix}.dt_bias", constant(value_heads, 1.0)
    yield f"{prefix}.A_log", decay_rates(value_heads)
    yield f"{prefix}.norm.weight", constant(model.linear_head_dim, 1.0)
    yield f"{prefix}.out_proj.weight", matrix(generator, hidden, value_dim)


def _experts_weights(model: TinyModel, generator: torch.Generator, prefix: str) -> Weights:
    hidden = model.hidden_size
    yield f"{prefix}.gate.weight", matrix(generator, _NUM_EXPERTS, hidden)
    for expert in range(_NUM_EXPERTS):
        yield from mlp_weights(model, generator, f"{prefix}.experts.{expert}", inner=_EXPERT_SIZE)
    yield from mlp_weights(model, generator, f"{prefix}.shared_expert", inner=_EXPERT_SIZE)
    yield f"{prefix}.shared_expert_gate.weight", matrix(generator, 1, hidden)


def _qwen_weights(model: TinyModel, generator: torch.Generator, *, next_: bool) -> Weights:
    """Qwen3.5 and Qwen3-Next store norm weights minus one, except those within a delta net."""
    feed_forward = _experts_weights if next_ else mlp_weights

    def layer(prefix: str, layer_type: str) -> Weights:
        yield from norm_weights(model, prefix, "input_layernorm", "post_attention_layernorm", value=0.0)
        if layer_type == "full_attention":
            yield from normed_attention_weights(model, generator, f"{prefix}.self_attn", gated=True, norm_offset=1.0)
        else:
            yield from _delta_net_weights(model, generator, f"{prefix}.linear_attn", fused=next_)
        yield from feed_forward(model, generator, f"{prefix}.mlp")

    return decoder_weights(model, generator, layer, norm=0.0)


def _qwen3_5_weights(model: TinyModel, generator: torch.Generator) -> Weights:
    return _qwen_weights(model, generator, next_=False)


def _qwen3_next_weights(model: TinyModel, generator: torch.Generator) -> Weights:
    return _qwen_weights(model, generator, next_=True)


def _kimi_config(model: TinyModel) -> Json:
    layers = {
        "kda_layers": [i for i, name in enumerate(model.layer_types, start=1) if name == "linear_attention"],
        "full_attn_layers": [i for i, name in enumerate(model.layer_types, start=1) if name == "full_attention"],
    }
    return (
        attention_config(model)
        | latent_attention_config()
        | {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            "num_key_value_heads": model.num_attention_heads,
            "mla_use_nope": True,
            "num_experts": None,
            "linear_attn_config": {
                **layers,
                "num_heads": model.num_value_heads,
                "head_dim": model.linear_head_dim,
                "short_conv_kernel_size": model.conv_kernel,
            },
        }
    )


def _kimi_delta_attention_weights(model: TinyModel, generator: torch.Generator, prefix: str) -> Weights:
    """As many key heads as value heads, a convolution each for q, k and v, and a decay per channel."""
    hidden, heads, head_dim = model.hidden_size, model.num_value_heads, model.linear_head_dim
    inner = heads * head_dim
    for name in "qkv":
        yield f"{prefix}.{name}_proj.weight", matrix(generator, inner, hidden)
        yield f"{prefix}.{name}_conv1d.weight", normal(generator, inner, 1, model.conv_kernel, std=0.5)
    yield f"{prefix}.b_proj.weight", matrix(generator, heads, hidden)
    for name in "fg":
        yield f"{prefix}.{name}_a_proj.weight", matrix(generator, head_dim, hidden)
        yield f"{prefix}.{name}_b_proj.weight", matrix(generator, inner, head_dim)
    yield f"{prefix}.dt_bias", constant(inner, 1.0)
    yield f"{prefix}.A_log", decay_rates(heads)
    yield f"{prefix}.o_norm.weight", constant(head_dim, 1.0)
    yield f"{prefix}.o_proj.weight", matrix(generator, hidden, inner)


def _kimi_weights(model: TinyModel, generator: torch.Generator) -> Weights:
    def layer(prefix: str, layer_type: str) -> Weights:
        yield from norm_weights(model, prefix, "input_layernorm", "post_attention_layernorm")
        is_attention = layer_type == "full_attention"
        mixer_weights = latent_attention_weights if is_attention else _kimi_delta_attention_weights
        yield from mixer_weights(model, generator, f"{prefix}.self_attn")
        yield from mlp_weights(model, generator, f"{prefix}.mlp")

    return decoder_weights(model, generator, layer)


QWEN3_5 = Family(_qwen3_5_config, _qwen3_5_weights)
QWEN3_NEXT = Family(_qwen3_next_config, _qwen3_next_weights)
KIMI_LINEAR = Family(_kimi_config, _kimi_weights)
