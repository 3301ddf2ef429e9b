"""Which layers has a model, and how large are its weights?

1. ``read_config`` reads a ``config.json`` of transformers: hybrids of full attention and gated delta nets, and models
   of full attention alone.
2. ``read_weights`` sums up the headers of the ``*.safetensors`` files beside it.
3. ``Preset`` is a model or GPU from ``presets.toml``, where every number has its source.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from hybrid_connector.core.families import Attention, ElementType, Recurrent, delta_net
from hybrid_connector.tools.sizing.capacity import ModelShape, Topology, Weights

GIB = 2**30

_ELEMENT_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}

_UNSUPPORTED = {
    "kv_lora_rank": "latent attention",
    "sliding_window": "sliding windows",
    "attention_chunk_size": "chunked attention",
    "mamba_d_state": "Mamba layers",
    "ssm_state_size": "Mamba layers",
    "hybrid_override_pattern": "Mamba layers",
    "conv_L_cache": "short convolutions",
    "linear_attn_config": "KDA layers",
}
"""Keys of a config that stand for what is not sized yet. ``None`` and ``use_sliding_window: false`` switch them off."""


def element_type(name: str) -> ElementType:
    """Raises ``ValueError`` for a name that vLLM has no cache type of one size for."""
    if name not in _ELEMENT_BYTES:
        raise ValueError(f"element type: expected one of {', '.join(_ELEMENT_BYTES)}, got {name}")
    return ElementType(name, _ELEMENT_BYTES[name])


class _Config:
    """The text part of a ``config.json``; a missing or wrong key raises ``ValueError`` with the key's name."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        text = values.get("text_config", values)
        if not isinstance(text, Mapping):
            raise ValueError(f"{where}: text_config: expected an object, got {text!r}")
        self.values = text
        self.where = where

    def count(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if value is None:
            raise ValueError(f"{self.where}: {key} is missing")
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"{self.where}: {key}: expected a whole number, got {value!r}")
        return value

    def element(self, *keys: str, default: str) -> ElementType:
        name = next((self.values[key] for key in keys if self.values.get(key)), default)
        try:
            return element_type(str(name).removeprefix("torch."))
        except ValueError as error:
            raise ValueError(f"{self.where}: {keys[0]}: {error}") from error


def read_config(values: Mapping[str, Any], where: str) -> ModelShape:
    """The shape of a model. Raises ``ValueError`` for a key that is missing or wrong, and for layers not sized yet."""
    config = _Config(values, where)
    _refuse_unsupported(config)
    num_layers = config.count("num_hidden_layers")
    num_recurrent = _count_recurrent(config, num_layers)
    model_type = config.element("dtype", "torch_dtype", default="bfloat16")
    num_heads = config.count("num_key_value_heads", config.values.get("num_attention_heads"))
    if config.values.get("head_dim") is not None:
        head_dim = config.count("head_dim")
    else:
        head_dim = config.count("hidden_size") // max(1, config.count("num_attention_heads"))
    return ModelShape(
        where,
        num_layers - num_recurrent,
        Attention(num_heads, 2 * head_dim, model_type) if num_recurrent < num_layers else None,
        num_recurrent,
        _delta_net(config, model_type) if num_recurrent else None,
        config.count("mtp_num_hidden_layers", 1 if num_recurrent else 0),
    )


def _refuse_unsupported(config: _Config) -> None:
    for key, what in _UNSUPPORTED.items():
        if key == "sliding_window" and not config.values.get("use_sliding_window", True):
            continue
        if config.values.get(key):
            raise ValueError(f"{config.where}: {key}: {what} are not sized yet, only full attention and delta nets")


def _count_recurrent(config: _Config, num_layers: int) -> int:
    layer_types = config.values.get("layer_types")
    if layer_types is None:
        if "linear_num_value_heads" not in config.values:
            return 0
        interval = config.count("full_attention_interval", 4)
        return num_layers - num_layers // max(1, interval)
    if not isinstance(layer_types, list):
        raise ValueError(f"{config.where}: layer_types: expected a list, got {layer_types!r}")
    unknown = {str(kind) for kind in layer_types} - {"full_attention", "linear_attention"}
    if unknown or len(layer_types) != num_layers:
        raise ValueError(
            f"{config.where}: layer_types: expected full_attention or linear_attention for each of {num_layers} "
            f"layers, got {len(layer_types)} with {', '.join(sorted(unknown)) or 'those'}"
        )
    return sum(kind == "linear_attention" for kind in layer_types)


def _delta_net(config: _Config, model_type: ElementType) -> Recurrent:
    return delta_net(
        num_key_heads=config.count("linear_num_key_heads"),
        num_value_heads=config.count("linear_num_value_heads"),
        key_dim=config.count("linear_key_head_dim"),
        value_dim=config.count("linear_value_head_dim"),
        num_taps=config.count("linear_conv_kernel_dim") - 1,
        conv_element=model_type,
        temporal_element=config.element("mamba_ssm_dtype", default=model_type.name),
    )


def read_config_file(path: Path) -> ModelShape:
    """``path``: a ``config.json``, or the directory that holds it. Raises ``ValueError``."""
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"{path}: expected a config.json or a directory with one: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{file}: expected JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file}: expected an object, got {type(values).__name__}")
    return read_config(values, str(path))


def read_weights(directory: Path) -> Weights | None:
    """Bytes of the weights in a directory by the headers of its files; ``None`` where there are none.

    A tensor whose name has a part ``experts`` belongs to the experts. Raises ``ValueError`` for a damaged header.
    """
    dense, experts, found = 0, 0, False
    for file in sorted(directory.glob("*.safetensors")):
        found = True
        try:
            with file.open("rb") as stream:
                header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
            sizes = {
                name: tensor["data_offsets"][1] - tensor["data_offsets"][0]
                for name, tensor in header.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, IndexError, MemoryError, OverflowError) as error:
            raise ValueError(f"{file}: expected a header of safetensors: {error!r}") from error
        held = sum(size for name, size in sizes.items() if "experts" in name.split("."))
        experts += held
        dense += sum(sizes.values()) - held
    return Weights(dense, experts) if found else None


@dataclass(frozen=True, slots=True)
class Preset:
    """A model with the numbers that its config does not have. Peaks of activations were measured per topology."""

    model: ModelShape
    weights: Weights
    gpu: str
    num_gpus: int
    spec_tokens: int
    activations: Mapping[Topology, int]


@cache
def _presets() -> Mapping[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath("presets.toml").read_text())


def preset_names() -> tuple[str, ...]:
    return tuple(_presets()["model"])


def gpu_names() -> tuple[str, ...]:
    return tuple(_presets()["gpu"])


def gpu_bytes(name: str) -> int:
    """Bytes of a GPU's memory as CUDA reports them. Raises ``ValueError`` for an unknown GPU."""
    gpus = _presets()["gpu"]
    if name not in gpus:
        raise ValueError(f"GPU: expected one of {', '.join(gpus)}, got {name}")
    return int(gpus[name] * GIB)


def preset_values(name: str) -> Mapping[str, Any]:
    """A model as ``presets.toml`` has it. Raises ``ValueError`` for an unknown name."""
    if name not in preset_names():
        raise ValueError(f"preset: expected one of {', '.join(preset_names())}, got {name}")
    values: Mapping[str, Any] = _presets()["model"][name]
    return values


def read_preset(name: str) -> Preset:
    """Raises ``ValueError`` for an unknown name."""
    values = preset_values(name)
    return Preset(
        read_config(values["config"], name),
        Weights(int(values["weights_gib"] * GIB), int(values["expert_gib"] * GIB)),
        values["gpu"],
        values["gpus"],
        values["spec_tokens"],
        {Topology.parse(text): int(gib * GIB) for text, gib in values["activation_gib"].items()},
    )
