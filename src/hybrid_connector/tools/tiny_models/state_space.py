"""Which tiny models hold the state of Mamba, or of a short convolution alone?

Mamba2 by itself, in Granite-4-H, Falcon-H1 and Nemotron-H; Mamba1 by itself and in Jamba; the convolution in LFM2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hybrid_connector.tools.tiny_models.parts import (
    attention_config,
    common_config,
    constant,
    decay_rates,
    decoder_weights,
    dividing,
    embedding,
    matrix,
    mlp_weights,
    norm_weights,
    normal,
    normed_attention_weights,
    plain_attention_weights,
    rope,
)
from hybrid_connector.tools.tiny_models.recipe import ANSWER_LETTERS, Family, Json, TinyModel, Weights

_STATE_SIZE = 64
_MAMBA1_STATE_SIZE = 16
_BACKBONE = ("backbone", "embeddings", "norm_f")
_FINAL_LAYERNORM = ("model", "embed_tokens", "final_layernorm")


@dataclass(frozen=True, slots=True)
class _Mamba2:
    """Sizes of a Mamba2 layer; B and C have `groups * _STATE_SIZE` channels each."""

    inner: int
    num_heads: int
    groups: int

    @classmethod
    def of(cls, model: TinyModel) -> _Mamba2:
        inner = 2 * model.hidden_size
        return cls(inner, max(inner // 64, model.groups), model.groups)

    @property
    def head_dim(self) -> int:
        return self.inner // self.num_heads

    @property
    def conv_dim(self) -> int:
        return self.inner + 2 * self.groups * _STATE_SIZE


def _mamba2_mixer_weights(model: TinyModel, generator: torch.Generator, prefix: str) -> Weights:
    size = _Mamba2.of(model)
    in_size = size.inner + size.conv_dim + size.num_heads
    yield f"{prefix}.in_proj.weight", matrix(generator, in_size, model.hidden_size)
    yield f"{prefix}.conv1d.weight", normal(generator, size.conv_dim, 1, model.conv_kernel, std=0.5)
    yield f"{prefix}.conv1d.bias", constant(size.conv_dim, 0.0)
    yield f"{prefix}.dt_bias", constant(size.num_heads, 1.0)
    yield f"{prefix}.A_log", decay_rates(size.num_heads)
    yield f"{prefix}.D", constant(size.num_heads, 1.0)
    yield f"{prefix}.norm.weight", constant(size.inner, 1.0)
    yield f"{prefix}.out_proj.weight", matrix(generator, model.hidden_size, size.inner)


def _mamba2_config(model: TinyModel) -> Json:
    size = _Mamba2.of(model)
    return common_config(model) | {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "num_heads": size.num_heads,
        "head_dim": size.head_dim,
        "expand": 2,
        "n_groups": size.groups,
        "state_size": _STATE_SIZE,
        "conv_kernel": model.conv_kernel,
        "chunk_size": 256,
        "use_bias": False,
        "use_conv_bias": True,
        "hidden_act": "silu",
        "layer_norm_epsilon": 1e-6,
        "rms_norm": True,
        "max_position_embeddings": model.max_positions,
    }


def _mamba2_weights(model: TinyModel, generator: torch.Generator) -> Weights:
    def layer(prefix: str, layer_type: str) -> Weights:
        yield from norm_weights(model, prefix, "norm")
        yield from _mamba2_mixer_weights(model, generator, f"{prefix}.mixer")

    return decoder_weights(model, generator, layer, names=_BACKBONE)


def _mamba2_sizes_config(model: TinyModel) -> dict[str, object]:
    """As Granite-4-H and Falcon-H1 spell them."""
    size = _Mamba2.of(model)
    return {
        "mamba_n_heads": size.num_heads,
        "mamba_n_groups": size.groups,
        "mamba_d_state": _STATE_SIZE,
        "mamba_d_head": size.head_dim,
        "mamba_d_conv": model.conv_kernel,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    }


def _granite_config(model: TinyModel) -> Json:
    model = dividing(model)
    return (
        attention_config(model)
        | _mamba2_sizes_config(model)
        | {
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "model_type": "granitemoehybrid",
            "layer_types": list(model.layer_types),
            "attention_multiplier": 1 / math.sqrt(model.head_dim),
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 2 * model.hidden_size,
        }
    )


def _granite_weights(model: TinyModel, generator: torch.Generator) -> Weights:
    hidden = model.hidden_size

    def layer(prefix: str, layer_type: str) -> Weights:
        yield from norm_weights(model, prefix, "input_layernorm", "post_attention_layernorm")
        if layer_type == "full_attention":
            yield from plain_attention_weights(dividing(model), generator, f"{prefix}.self_attn")
        else:
            yield from _mamba2_mixer_weights(model, generator, f"{prefix}.mamba")
        yield f"{prefix}.shared_mlp.input_linear.weight", matrix(generator, 4 * hidden, hidden)
        yield f"{prefix}.shared_mlp.output_linear.weight", matrix(generator, hidden, 2 * hidden)

    return decoder_weights(model, generator, layer)


def _falcon_config(model: TinyModel) -> Json:
    return (
        attention_config(model)
        | _mamba2_sizes_config(model)
        | {
            "architectures": ["FalconH1ForCausalLM"],
            "model_type": "falcon_h1",
            "mamba_d_ssm": 2 * model.hidden_size,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "rope_parameters": rope(),
        }
    )


def _falcon_weights(model: TinyModel, generator: torch.Generator) -> Weights:
    def layer(prefix: str, layer_type: str) -> Weights:
        yield from norm_weights(model, prefix, "input_layernorm", "pre_ff_layernorm")
        yield from plain_attention_weights(model, generator, f"{prefix}.self_attn")
        yield from _mamba2_mixer_weights(model, generator, f"{prefix}.mamba")
        yield from mlp_weights(model, generator, f"{prefix}.feed_forward")

    return decoder_weights(model, generator, layer, names=_FINAL_LAYERNORM)


def _nemotron_layers(model: TinyModel) -> tuple[str, ...]:
    """Nemotron-H counts every MLP as a layer of its own."""
    return tuple(name for layer_type in model.layer_types for name in (layer_type, "mlp"))


def _nemotron_config(model: TinyModel) -> Json:
    size = _Mamba2.of(model)
    layers = _nemotron_layers(model)
    return attention_config(model) | {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "num_hidden_layers": len(layers),
        "layers_block_type": list(layers),
        "layer_norm_epsilon": 1e-6,
        "mamba_num_heads": size.num_heads,
        "mamba_head_dim": size.head_dim,
        "n_groups": size.groups,
        "ssm_state_size": _STATE_SIZE,
        "conv_kernel": model.conv_kernel,
        "expand": 2,
        "chunk_size": 256,
        "use_conv_bias": True,
        "use_bias": False,
        "mlp_hidden_act": "relu2",
        "mlp_bias": False,
    }


def _nemotron_weights(model: TinyModel, generator: torch.Generator) -> Weights:
    hidden = model.hidden_size

    def layer(prefix: str, layer_type: str) -> Weights:
        mixer = f"{prefix}.mixer"
        yield from norm_weights(model, prefix, "norm")
        if layer_type == "full_attention":
            yield from plain_attention_weights(model, generator, mixer)
        elif layer_type == "linear_attention":
            yield from _mamba2_mixer_weights(model, generator, mixer)
        else:
            yield f"{mixer}.up_proj.weight", matrix(generator, 2 * hidden, hidden)
            yield f"{mixer}.down_proj.weight", matrix(generator, hidden, 2 * hidden)

    return decoder_weights(model, generator, layer, layer_types=_nemotron_layers(model), names=_BACKBONE)


def _mamba1_mixer_weights(model: TinyModel, generator: torch.Generator, prefix: str, *, normed: bool) -> Weights:
    """`normed` is Jamba's: norms of the time step, B and C."""
    hidden, inner, rank, state = model.hidden_size, 2 * model.hidden_size, _time_step_rank(model), _MAMBA1_STATE_SIZE
    yield f"{prefix}.in_proj.weight", matrix(generator, 2 * inner, hidden)
    yield f"{prefix}.conv1d.weight", normal(generator, inner, 1, model.conv_kernel, std=0.5)
    yield f"{prefix}.conv1d.bias", constant(inner, 0.0)
    yield f"{prefix}.x_proj.weight", matrix(generator, rank + 2 * state, inner)
    yield f"{prefix}.dt_proj.weight", matrix(generator, inner, rank)
    yield f"{prefix}.dt_proj.bias", constant(inner, -2.0)
    yield f"{prefix}.A_log", decay_rates(inner)[:, None].repeat(1, state)
    yield f"{prefix}.D", constant(inner, 1.0)
    if normed:
        yield f"{prefix}.dt_layernorm.weight", constant(rank, 1.0)
        yield f"{prefix}.b_layernorm.weight", constant(state, 0.25)
        yield f"{prefix}.c_layernorm.weight", constant(state, 0.25)
    yield f"{prefix}.out_proj.weight", matrix(generator, hidden, inner)


def _time_step_rank(model: TinyModel) -> int:
    return -(-model.hidden_size // 16)


def _mamba1_config(model: TinyModel) -> Json:
    return common_config(model) | {
        "architectures": ["MambaForCausalLM"],
        "model_type": "mamba",
        "state_size": _MAMBA1_STATE_SIZE,
        "conv_kernel": model.conv_kernel,
        "expand": 2,
        "time_step_rank": _time_step_rank(model),
        "use_bias": False,
        "use_conv_bias": True,
        "hidden_act": "silu",
        "layer_norm_epsilon": 1e-6,
        "max_position_embeddings": model.max_positions,
    }


def _mamba1_weights(model: TinyModel, generator: torch.Generator) -> Weights:
    def layer(prefix: str, layer_type: str) -> Weights:
        yield from norm_weights(model, prefix, "norm")
        yield from _mamba1_mixer_weights(model, generator, f"{prefix}.mixer", normed=False)

    return decoder_weights(model, generator, layer, names=_BACKBONE)


def _jamba_config(model: TinyModel) -> Json:
    return attention_config(dividing(model)) | {
        "architectures": ["JambaForCausalLM"],
        "model_type": "jamba",
        "attn_layer_period": 4,
        "attn_layer_offset": 3,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "mamba_d_state": _MAMBA1_STATE_SIZE,
        "mamba_d_conv": model.conv_kernel,
        "mamba_expand": 2,
        "mamba_dt_rank": _time_step_rank(model),
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    }


def _jamba_weights(model: TinyModel, generator: torch.Generator) -> Weights:
    def layer(prefix: str, layer_type: str) -> Weights:
        yield from norm_weights(model, prefix, "input_layernorm", "pre_ff_layernorm")
        if layer_type == "full_attention":
            yield from plain_attention_weights(dividing(model), generator, f"{prefix}.self_attn")
        else:
            yield from _mamba1_mixer_weights(model, generator, f"{prefix}.mamba", normed=True)
        yield from mlp_weights(model, generator, f"{prefix}.feed_forward")

    return decoder_weights(model, generator, layer, names=_FINAL_LAYERNORM)


def _lfm2_config(model: TinyModel) -> Json:
    names = {"linear_attention": "conv", "full_attention": "full_attention"}
    return attention_config(dividing(model)) | {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "tie_word_embeddings": True,
        "layer_types": [names[layer_type] for layer_type in model.layer_types],
        "norm_eps": 1e-6,
        "rope_parameters": rope(),
        "conv_dim": model.hidden_size,
        "conv_L_cache": model.conv_kernel,
        "conv_bias": False,
        "block_dim": model.hidden_size,
        "block_multiple_of": 1,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    }


def _tied_embedding(model: TinyModel, generator: torch.Generator) -> torch.Tensor:
    """Also the output head: `ANSWER_LETTERS`, pairs of opposites, outweigh the other tokens thirty to one.

    Layers see it normed; in the sum of all layers it is small, so an answer does not just repeat its last letter.
    """
    rows = embedding(model, generator, std=0.003)
    letters = embedding(model, generator, std=0.1)[: len(ANSWER_LETTERS) // 2]
    rows[list(ANSWER_LETTERS)] = torch.cat([letters, -letters])
    return rows


def _lfm2_weights(model: TinyModel, generator: torch.Generator) -> Weights:
    hidden = model.hidden_size
    attention_names = {"o_proj": "out_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm"}
    yield "model.embed_tokens.weight", _tied_embedding(model, generator)
    for index, layer_type in enumerate(model.layer_types):
        layer = f"model.layers.{index}"
        yield from norm_weights(model, layer, "operator_norm", "ffn_norm")
        if layer_type == "full_attention":
            for name, weight in normed_attention_weights(dividing(model), generator, "self_attn"):
                _, part, kind = name.split(".")
                yield f"{layer}.self_attn.{attention_names.get(part, part)}.{kind}", weight
        else:
            yield f"{layer}.conv.in_proj.weight", matrix(generator, 3 * hidden, hidden)
            yield f"{layer}.conv.conv.weight", normal(generator, hidden, 1, model.conv_kernel, std=0.5)
            yield f"{layer}.conv.out_proj.weight", matrix(generator, hidden, hidden)
        yield from mlp_weights(model, generator, f"{layer}.feed_forward", names=("w1", "w3", "w2"))
    yield from norm_weights(model, "model", "embedding_norm")


MAMBA2 = Family(_mamba2_config, _mamba2_weights)
GRANITE_H = Family(_granite_config, _granite_weights)
FALCON_H1 = Family(_falcon_config, _falcon_weights)
NEMOTRON_H = Family(_nemotron_config, _nemotron_weights)
MAMBA1 = Family(_mamba1_config, _mamba1_weights)
JAMBA = Family(_jamba_config, _jamba_weights)
LFM2 = Family(_lfm2_config, _lfm2_weights)
