"""Which model can a laptop serve so that a wrong byte of cache state shows up in the answer?

`make_tiny_model` writes a directory that vLLM loads like any other:

1. `config.json`: a Qwen3.5-style text model (gated delta nets plus full attention), an attention-only Qwen3, or
   a recurrent-only Mamba2, about a million weights each;
2. `model.safetensors`: seeded random weights, scaled so that the greedy answer depends on the whole prompt;
3. a byte-level tokenizer: token id = byte value, so an ASCII prompt of n characters is n tokens.

Answers consist of eight letters, so text and tokens say the same.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import torch

Kind: TypeAlias = Literal["hybrid", "attention", "recurrent"]
Json: TypeAlias = Mapping[str, object]
Weights: TypeAlias = Iterator[tuple[str, torch.Tensor]]

KINDS: tuple[Kind, ...] = ("hybrid", "attention", "recurrent")
RECIPE_VERSION = 2
"""Raised whenever the same parameters would give other weights."""

END_TOKEN_ID = 256
ANSWER_LETTERS = b"aeioklmn"
"""Few, because the fewer candidates, the rarer near ties between the best two."""

_STAMP = "tiny_model.json"


@dataclass(frozen=True, slots=True)
class TinyModel:
    """Everything the written files depend on.

    `kind` picks the layers: "hybrid" repeats three gated delta nets and one attention layer, "attention" has
    attention only (Qwen3), "recurrent" has state only (Mamba2). `conv_kernel` counts taps, the current token's
    included.
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
    conv_kernel: int = 4
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
        if self.kind == "attention":
            return ("full_attention",) * self.num_layers
        if self.kind == "recurrent":
            return ("linear_attention",) * self.num_layers
        return tuple("linear_attention" if (i + 1) % 4 else "full_attention" for i in range(self.num_layers))


def make_tiny_model(directory: Path, *, seed: int = 0, model: TinyModel | None = None) -> Path:
    """Write a model that vLLM can serve into `directory` and return the directory.

    `model` overrides `seed` and every size. A directory that already holds the same model is left alone, another
    tiny model is replaced, and anything else raises `FileExistsError`.
    """
    wanted = TinyModel(seed=seed) if model is None else model
    stamp = json.dumps({"recipe": RECIPE_VERSION, **asdict(wanted)}, indent=1)
    if directory.exists() and any(directory.iterdir()):
        present = directory / _STAMP
        if not present.is_file():
            raise FileExistsError(f"{directory}: expected an empty directory or a tiny model, found other files")
        if present.read_text() == stamp:
            return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    draft = directory.parent / f".{directory.name}.{os.getpid()}"
    draft.mkdir()
    try:
        _write_model(draft, wanted)
        (draft / _STAMP).write_text(stamp)
        if directory.exists():
            shutil.rmtree(directory)
        draft.rename(directory)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return directory


def _write_model(directory: Path, model: TinyModel) -> None:
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(model.seed)
    make_config, make_weights = {
        "hybrid": (_qwen3_5_config, _qwen3_5_weights),
        "attention": (_qwen3_config, _qwen3_weights),
        "recurrent": (_mamba2_config, _mamba2_weights),
    }[model.kind]
    (directory / "config.json").write_text(json.dumps(make_config(model), indent=1))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": END_TOKEN_ID}))
    weights = {name: weight.contiguous() for name, weight in make_weights(model, generator)}
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    _write_tokenizer(directory, model)


def _common_config(model: TinyModel) -> dict[str, object]:
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


def _attention_config(model: TinyModel) -> dict[str, object]:
    return _common_config(model) | {
        "intermediate_size": 2 * model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": model.max_positions,
        "attention_bias": False,
    }


def _qwen3_5_config(model: TinyModel) -> Json:
    return _attention_config(model) | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "layer_types": list(model.layer_types),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "linear_conv_kernel_dim": model.conv_kernel,
        "linear_key_head_dim": model.linear_head_dim,
        "linear_value_head_dim": model.linear_head_dim,
        "linear_num_key_heads": model.num_key_heads,
        "linear_num_value_heads": model.num_value_heads,
    }


def _qwen3_config(model: TinyModel) -> Json:
    return _attention_config(model) | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "layer_types": list(model.layer_types),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }


def _mamba2_config(model: TinyModel) -> Json:
    return _common_config(model) | {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "num_heads": 2 * model.hidden_size // 64,
        "head_dim": 64,
        "expand": 2,
        "n_groups": model.num_key_heads,
        "state_size": 64,
        "conv_kernel": model.conv_kernel,
        "chunk_size": 256,
        "use_bias": False,
        "use_conv_bias": True,
        "hidden_act": "silu",
        "layer_norm_epsilon": 1e-6,
        "rms_norm": True,
        "max_position_embeddings": model.max_positions,
    }


def _normal(generator: torch.Generator, *shape: int, std: float) -> torch.Tensor:
    return (torch.randn(*shape, generator=generator) * std).to(torch.bfloat16)


def _matrix(generator: torch.Generator, rows: int, columns: int) -> torch.Tensor:
    """A projection of std 0.09 at 128 inputs, with the same gain for any other number of inputs.

    With 0.15 the MLPs dominate and double the effect of every bf16 rounding.
    """
    return _normal(generator, rows, columns, std=0.09 * math.sqrt(128 / columns))


def _constant(size: int, value: float, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full((size,), value, dtype=dtype)


def _decay_rates(num_heads: int) -> torch.Tensor:
    """`A_log`: a memory of tens of thousands of tokens for the first head, of tens for the last."""
    return torch.linspace(math.log(3e-5), math.log(0.03), num_heads)


def _output_head(model: TinyModel, generator: torch.Generator) -> torch.Tensor:
    """Rows for `ANSWER_LETTERS`, the other rows are zero (`vocab_size`, `hidden_size`).

    The letters' rows are pairs of opposites, so the best letter is never below zero.
    """
    head = torch.zeros(model.vocab_size, model.hidden_size, dtype=torch.bfloat16)
    rows = _matrix(generator, len(ANSWER_LETTERS) // 2, model.hidden_size)
    head[list(ANSWER_LETTERS)] = torch.cat([rows, -rows])
    return head


def _mlp_weights(model: TinyModel, generator: torch.Generator, prefix: str) -> Weights:
    hidden, inner = model.hidden_size, 2 * model.hidden_size
    yield f"{prefix}.gate_proj.weight", _matrix(generator, inner, hidden)
    yield f"{prefix}.up_proj.weight", _matrix(generator, inner, hidden)
    yield f"{prefix}.down_proj.weight", _matrix(generator, hidden, inner)


def _attention_weights(
    model: TinyModel, generator: torch.Generator, prefix: str, *, gated: bool, norm_offset: float
) -> Weights:
    """Query and key norms of 3 make attention sharp: a single token of a long prompt can win it."""
    hidden, heads, kv_heads, head_dim = (
        model.hidden_size,
        model.num_attention_heads,
        model.num_kv_heads,
        model.head_dim,
    )
    yield f"{prefix}.q_proj.weight", _matrix(generator, heads * head_dim * (2 if gated else 1), hidden)
    yield f"{prefix}.k_proj.weight", _matrix(generator, kv_heads * head_dim, hidden)
    yield f"{prefix}.v_proj.weight", _matrix(generator, kv_heads * head_dim, hidden)
    yield f"{prefix}.o_proj.weight", _matrix(generator, hidden, heads * head_dim)
    yield f"{prefix}.q_norm.weight", _constant(head_dim, 3.0 - norm_offset)
    yield f"{prefix}.k_norm.weight", _constant(head_dim, 3.0 - norm_offset)


def _delta_net_weights(model: TinyModel, generator: torch.Generator, prefix: str) -> Weights:
    hidden, value_heads = model.hidden_size, model.num_value_heads
    key_dim = model.num_key_heads * model.linear_head_dim
    value_dim = value_heads * model.linear_head_dim
    conv_dim = 2 * key_dim + value_dim
    yield f"{prefix}.in_proj_qkv.weight", _matrix(generator, conv_dim, hidden)
    yield f"{prefix}.in_proj_z.weight", _matrix(generator, value_dim, hidden)
    yield f"{prefix}.in_proj_b.weight", _matrix(generator, value_heads, hidden)
    yield f"{prefix}.in_proj_a.weight", _matrix(generator, value_heads, hidden)
    yield f"{prefix}.conv1d.weight", _normal(generator, conv_dim, 1, model.conv_kernel, std=0.5)
    yield f"{prefix}.dt_bias", _constant(value_heads, 1.0)
    yield f"{prefix}.A_log", _decay_rates(value_heads)
    yield f"{prefix}.norm.weight", _constant(model.linear_head_dim, 1.0)
    yield f"{prefix}.out_proj.weight", _matrix(generator, hidden, value_dim)


def _decoder_weights(model: TinyModel, generator: torch.Generator, *, gated: bool, norm_offset: float) -> Weights:
    """Weights under Hugging Face names. Qwen3.5 stores RMS norm weights minus one (`norm_offset` 1), Qwen3 as is."""
    hidden = model.hidden_size
    yield "model.embed_tokens.weight", _normal(generator, model.vocab_size, hidden, std=1.0)
    for index, layer_type in enumerate(model.layer_types):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", _constant(hidden, 1.0 - norm_offset)
        yield f"{layer}.post_attention_layernorm.weight", _constant(hidden, 1.0 - norm_offset)
        if layer_type == "full_attention":
            yield from _attention_weights(model, generator, f"{layer}.self_attn", gated=gated, norm_offset=norm_offset)
        else:
            yield from _delta_net_weights(model, generator, f"{layer}.linear_attn")
        yield from _mlp_weights(model, generator, f"{layer}.mlp")
    yield "model.norm.weight", _constant(hidden, 1.0 - norm_offset)
    yield "lm_head.weight", _output_head(model, generator)


def _qwen3_5_weights(model: TinyModel, generator: torch.Generator) -> Weights:
    yield from _decoder_weights(model, generator, gated=True, norm_offset=1.0)


def _qwen3_weights(model: TinyModel, generator: torch.Generator) -> Weights:
    yield from _decoder_weights(model, generator, gated=False, norm_offset=0.0)


def _mamba2_weights(model: TinyModel, generator: torch.Generator) -> Weights:
    hidden, inner = model.hidden_size, 2 * model.hidden_size
    num_heads = inner // 64
    conv_dim = inner + 2 * model.num_key_heads * 64
    yield "backbone.embeddings.weight", _normal(generator, model.vocab_size, hidden, std=1.0)
    for index in range(model.num_layers):
        mixer = f"backbone.layers.{index}.mixer"
        yield f"backbone.layers.{index}.norm.weight", _constant(hidden, 1.0)
        yield f"{mixer}.in_proj.weight", _matrix(generator, inner + conv_dim + num_heads, hidden)
        yield f"{mixer}.conv1d.weight", _normal(generator, conv_dim, 1, model.conv_kernel, std=0.5)
        yield f"{mixer}.conv1d.bias", _constant(conv_dim, 0.0)
        yield f"{mixer}.dt_bias", _constant(num_heads, 1.0)
        yield f"{mixer}.A_log", _decay_rates(num_heads)
        yield f"{mixer}.D", _constant(num_heads, 1.0)
        yield f"{mixer}.norm.weight", _constant(inner, 1.0)
        yield f"{mixer}.out_proj.weight", _matrix(generator, hidden, inner)
    yield "backbone.norm_f.weight", _constant(hidden, 1.0)
    yield "lm_head.weight", _output_head(model, generator)


def _write_tokenizer(directory: Path, model: TinyModel) -> None:
    """Token id = byte value; `END_TOKEN_ID` ends a text; the rest of the vocabulary is filler."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    fillers = [f"<unused{i}>" for i in range(END_TOKEN_ID + 1, model.vocab_size)]
    vocab = {char: byte for byte, char in enumerate(_byte_chars())} | {
        name: id_ for id_, name in enumerate(["<end>", *fillers], start=END_TOKEN_ID)
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<end>",
        "pad_token": "<end>",
        "model_max_length": model.max_positions,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _byte_chars() -> list[str]:
    """GPT-2's stand-in for each byte: itself where printable in Latin-1, else U+0100 onwards in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256)]
