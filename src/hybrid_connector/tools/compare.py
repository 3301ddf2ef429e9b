"""Did D end up with the bytes P had? Compares two sides' captures as whole tensors, whatever the ranks.

1. ``read_captures``: the capture files of a directory, by request.
2. ``assemble``: the ranks' parts of a request joined to global tensors, by the model's config alone.
3. ``compare``: byte for byte, tensor by tensor.

It knows the model's shapes from its config and nothing of layouts, plans or transports, so it can prove them wrong.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True, slots=True)
class Shapes:
    """The model's numbers that say how its state is split over ranks.

    ``conv_sections``: channels of each independently sharded part of a conv state.
    """

    num_kv_heads: int
    conv_sections: tuple[int, ...]

    @classmethod
    def from_model(cls, directory: Path) -> "Shapes":
        """Read ``config.json`` of a model with attention and gated-delta-net layers."""
        config = json.loads((directory / "config.json").read_text())
        config = config.get("text_config", config)
        keys = config.get("linear_num_key_heads", 0) * config.get("linear_key_head_dim", 0)
        values = config.get("linear_num_value_heads", 0) * config.get("linear_value_head_dim", 0)
        return cls(config.get("num_key_value_heads", config.get("num_attention_heads", 1)), (keys, keys, values))


def read_captures(directory: Path) -> tuple[Captured, ...]:
    """Every request that both sides captured, in the order in which D loaded them."""
    sides: dict[str, dict[str, list[Capture]]] = defaultdict(lambda: {"produced": [], "loaded": []})
    for path in sorted(directory.glob("*.npz"), key=lambda path: path.stat().st_mtime_ns):
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
            tensors[name] = _join_heads(name, parts, shapes.num_kv_heads)
        elif name.endswith("|state0"):
            if not captures[0].meta["conv_channel_first"]:
                parts = [part.swapaxes(0, 1) for part in parts]
            for index, section in enumerate(_split_sections(name, parts, shapes.conv_sections)):
                tensors[f"{name}.{index}"] = section
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


def _join_heads(name: str, parts: Sequence[ByteArray], num_heads: int) -> ByteArray:
    """Heads in order; where there are more ranks than heads, consecutive ranks hold the same one."""
    if len(parts) <= num_heads:
        return np.concatenate(parts)
    copies = len(parts) // num_heads
    for rank, part in enumerate(parts):
        if not np.array_equal(part, parts[rank - rank % copies]):
            raise ValueError(f"{name}: rank {rank} differs from its replica {rank - rank % copies}")
    return np.concatenate(parts[::copies])


def _split_sections(name: str, parts: Sequence[ByteArray], sections: Sequence[int]) -> list[ByteArray]:
    """Each rank holds its share of every section, one after the other."""
    shares = [channels // len(parts) for channels in sections]
    if any(part.shape[0] != sum(shares) for part in parts):
        raise ValueError(f"{name}: expected {sum(shares)} channels per rank, got {[part.shape[0] for part in parts]}")
    ends = np.cumsum(shares)
    return [
        np.concatenate([part[end - share : end] for part in parts]) for share, end in zip(shares, ends, strict=True)
    ]
