"""Did D end up with the bytes P had? Compares two sides' captures as whole tensors, whatever the ranks.

1. ``read_captures``: the capture files of a directory, by request.
2. ``assemble``: the ranks' parts of a request joined to global tensors, by the model's config alone.
3. ``compare``: byte for byte, tensor by tensor.

It knows the model's shapes from its config and nothing of layouts, plans or transports, so it can prove them wrong.
"""

import glob
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ByteArray = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Capture:
    """One rank's view of one request's state; see ``engine.capture``."""

    meta: Mapping[str, Any]
    arrays: Mapping[str, ByteArray]


@dataclass(frozen=True, slots=True)
class Captured:
    """Both sides of one transferred request, each by rank."""

    request_id: str
    produced: tuple[Capture, ...]
    loaded: tuple[Capture, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many tensors and bytes were compared, and which tensors differ (``name: first differing index``)."""

    num_tensors: int
    num_bytes: int
    differing: tuple[str, ...]


Section = tuple[int, int]
"""Units (heads, groups, channels) of a part of a conv state, and channels per unit."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """The model's numbers that say how its state is split over ranks.

    ``conv_sections``: the independently split parts of a conv state, in order; empty where there is no conv state.
    """

    num_kv_heads: int
    conv_sections: tuple[Section, ...]

    @classmethod
    def from_model(cls, directory: Path) -> "Shapes":
        """Read ``config.json``; raises ``ValueError`` for a type of model that is not known here."""
        config = json.loads((directory / "config.json").read_text())
        config = config.get("text_config", config)
        model_type = config["model_type"]
        if model_type not in _CONV_SECTIONS:
            raise ValueError(
                f"{directory}: cannot compare models of type {model_type}, only {', '.join(_CONV_SECTIONS)}"
            )
        latent = "kv_lora_rank" in config
        num_kv_heads = 1 if latent else config.get("num_key_value_heads") or config.get("num_attention_heads", 1)
        return cls(num_kv_heads, _CONV_SECTIONS[model_type](config))


def _delta_net(config: Mapping[str, Any]) -> tuple[Section, ...]:
    keys = (config["linear_num_key_heads"], config["linear_key_head_dim"])
    return keys, keys, (config["linear_num_value_heads"], config["linear_value_head_dim"])


def _kda(config: Mapping[str, Any]) -> tuple[Section, ...]:
    linear = config["linear_attn_config"]
    return ((linear["num_heads"], linear["head_dim"]),) * 3


def _mamba2(heads: str, head_dim: str, groups: str, state: str) -> Callable[[Mapping[str, Any]], tuple[Section, ...]]:
    def read(config: Mapping[str, Any]) -> tuple[Section, ...]:
        group = (config[groups], config[state])
        return (config[heads], config[head_dim]), group, group

    return read


def _mamba1(config: Mapping[str, Any]) -> tuple[Section, ...]:
    if "mamba_expand" in config:
        return ((config["mamba_expand"] * config["hidden_size"], 1),)
    return ((config.get("intermediate_size", config.get("expand", 2) * config["hidden_size"]), 1),)


def _short_convolution(config: Mapping[str, Any]) -> tuple[Section, ...]:
    return ((config["hidden_size"], 1),)


def _no_conv(config: Mapping[str, Any]) -> tuple[Section, ...]:
    return ()


_CONV_SECTIONS: Mapping[str, Callable[[Mapping[str, Any]], tuple[Section, ...]]] = {
    "qwen3_5_text": _delta_net,
    "qwen3_5": _delta_net,
    "qwen3_next": _delta_net,
    "kimi_linear": _kda,
    "granitemoehybrid": _mamba2("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state"),
    "falcon_h1": _mamba2("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state"),
    "bamba": _mamba2("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state"),
    "nemotron_h": _mamba2("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size"),
    "mamba2": _mamba2("num_heads", "head_dim", "n_groups", "state_size"),
    "jamba": _mamba1,
    "mamba": _mamba1,
    "lfm2": _short_convolution,
    "qwen3": _no_conv,
    "gemma3_text": _no_conv,
    "deepseek_v2": _no_conv,
}


def read_captures(directory: Path, request_id: str | None = None) -> tuple[Captured, ...]:
    """Every request that both sides captured, or one of them, in the order in which D loaded them."""
    sides: dict[str, dict[str, list[Capture]]] = defaultdict(lambda: {"produced": [], "loaded": []})
    pattern = "*.npz" if request_id is None else f"*.{glob.escape(request_id)}.rank*.npz"
    for path in sorted(directory.glob(pattern), key=lambda path: path.stat().st_mtime_ns):
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        meta = json.loads(arrays.pop("meta").tobytes())
        sides[meta["request_id"]][path.name.partition(".")[0]].append(Capture(meta, arrays))

    def by_rank(captures: list[Capture]) -> tuple[Capture, ...]:
        return tuple(sorted(captures, key=lambda capture: int(capture.meta["rank"])))

    return tuple(
        Captured(request_id, by_rank(side["produced"]), by_rank(side["loaded"]))
        for request_id, side in sides.items()
        if side["produced"] and side["loaded"]
    )


def assemble(captures: Sequence[Capture], shapes: Shapes) -> dict[str, ByteArray]:
    """Global tensors from the parts of all ranks. Raises ``ValueError`` where ranks are missing or replicas differ."""
    tp_size, pp_size = captures[0].meta["tp_size"], captures[0].meta["pp_size"]
    ranks = [capture.meta["rank"] for capture in captures]
    if ranks != list(range(tp_size * pp_size)):
        raise ValueError(f"expected captures of ranks 0 to {tp_size * pp_size - 1}, got {ranks}")
    tensors: dict[str, ByteArray] = {}
    for stage in range(pp_size):
        tensors |= _assemble_stage(captures[stage * tp_size : (stage + 1) * tp_size], shapes)
    return tensors


def _assemble_stage(captures: Sequence[Capture], shapes: Shapes) -> dict[str, ByteArray]:
    """The tensors of one pipeline stage from its tensor-parallel ranks."""
    tensors: dict[str, ByteArray] = {}
    for name in captures[0].arrays:
        parts = [capture.arrays[name] for capture in captures]
        if name.endswith("|kv"):
            tensors[name] = _join_units(name, parts, shapes.num_kv_heads)
        elif name.endswith("|state0") and shapes.conv_sections:
            if not captures[0].meta["conv_channel_first"]:
                parts = [part.swapaxes(0, 1) for part in parts]
            tensors |= _join_sections(name, parts, shapes.conv_sections)
        else:
            tensors[name] = np.concatenate(parts)
    return tensors


def compare(captured: Captured, shapes: Shapes) -> Comparison:
    """Compare all state of a request, every page of K/V and the whole recurrent state."""
    ours, theirs = assemble(captured.loaded, shapes), assemble(captured.produced, shapes)
    differing = [f"{name}: only on one side" for name in sorted(set(ours) ^ set(theirs))]
    for name in sorted(set(ours) & set(theirs)):
        have, want = ours[name], theirs[name]
        if have.shape != want.shape:
            # Pages of different length: what both hold are the tokens themselves.
            num_tokens = captured.produced[0].meta["num_tokens"]
            have, want = have[:, :num_tokens], want[:, :num_tokens]
        if have.shape != want.shape:
            differing.append(f"{name}: {have.shape} on D, {want.shape} on P")
        elif not np.array_equal(have, want):
            differing.append(f"{name}: first at {tuple(int(i) for i in np.argwhere(have != want)[0])}")
    return Comparison(len(ours), sum(tensor.nbytes for tensor in ours.values()), tuple(differing))


def _join_units(name: str, parts: Sequence[ByteArray], num_units: int) -> ByteArray:
    """Units in order; where there are more ranks than units, consecutive ranks hold the same one."""
    if len(parts) <= num_units:
        return np.concatenate(parts)
    copies = len(parts) // num_units
    for rank, part in enumerate(parts):
        if not np.array_equal(part, parts[rank - rank % copies]):
            raise ValueError(f"{name}: rank {rank} differs from its replica {rank - rank % copies}")
    return np.concatenate(parts[::copies])


def _join_sections(name: str, parts: Sequence[ByteArray], sections: Sequence[Section]) -> dict[str, ByteArray]:
    """Each rank holds its part of every section, one after the other along the channels."""
    shares = [max(1, num_units // len(parts)) * unit for num_units, unit in sections]
    if any(part.shape[0] != sum(shares) for part in parts):
        raise ValueError(f"{name}: expected {sum(shares)} channels per rank, got {[part.shape[0] for part in parts]}")
    joined = {}
    for index, ((num_units, _), share, end) in enumerate(zip(sections, shares, np.cumsum(shares), strict=True)):
        held = [part[end - share : end] for part in parts]
        joined[f"{name}.{index}"] = _join_units(f"{name}.{index}", held, num_units)
    return joined
