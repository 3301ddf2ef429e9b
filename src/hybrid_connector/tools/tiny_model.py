"""Which model can a laptop serve so that a wrong byte of cache state shows up in the answer?

`make_tiny_model` writes a directory that vLLM loads like any other:

1. `config.json`: one of the families of `tools.tiny_models`, about a million weights each;
2. `model.safetensors`: seeded random weights, scaled so that the greedy answer depends on the whole prompt;
3. a byte-level tokenizer: token id = byte value, so an ASCII prompt of n characters is n tokens.

Answers consist of eight letters, so text and tokens say the same.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from hybrid_connector.tools.tiny_models import attention, delta_nets, state_space
from hybrid_connector.tools.tiny_models.recipe import ANSWER_LETTERS, END_TOKEN_ID, KINDS, Family, Kind, TinyModel

__all__ = ["ANSWER_LETTERS", "END_TOKEN_ID", "KINDS", "RECIPE_VERSION", "Kind", "TinyModel", "make_tiny_model"]

RECIPE_VERSION = 2
"""Raised whenever the same parameters would give other weights."""

_STAMP = "tiny_model.json"
_FAMILIES: Mapping[Kind, Family] = {
    "hybrid": delta_nets.QWEN3_5,
    "qwen3_next": delta_nets.QWEN3_NEXT,
    "kimi_linear": delta_nets.KIMI_LINEAR,
    "granite_h": state_space.GRANITE_H,
    "falcon_h1": state_space.FALCON_H1,
    "nemotron_h": state_space.NEMOTRON_H,
    "jamba": state_space.JAMBA,
    "lfm2": state_space.LFM2,
    "recurrent": state_space.MAMBA2,
    "mamba1": state_space.MAMBA1,
    "attention": attention.QWEN3,
    "sliding": attention.GEMMA3,
    "mla": attention.DEEPSEEK_V2,
}


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

    family = _FAMILIES[model.kind]
    generator = torch.Generator().manual_seed(model.seed)
    (directory / "config.json").write_text(json.dumps(family.config(model), indent=1))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": END_TOKEN_ID}))
    weights = {name: weight.contiguous() for name, weight in family.weights(model, generator)}
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    _write_tokenizer(directory, model)


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
