"""What did the model itself see, on P before a lease was sealed and on D after a load? (debugging)

A capture is one ``.npz`` per rank and request, read through the views that the model's layers use, so it owes nothing
to the layout, the planner or the transport: comparing P's and D's proves all three.

Arrays of uint8: ``<layer>|kv`` is (H, tokens, content bytes), whole pages; ``<layer>|state<i>`` is state ``i`` of a
recurrent layer as the layer shapes it, with an axis for the bytes of an element added. ``meta`` holds a JSON object.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybrid_connector.core.blocks import BlockIds

ByteArray = np.ndarray[Any, np.dtype[np.uint8]]


def _as_bytes(tensor: torch.Tensor) -> ByteArray:
    """The tensor on the host, each element of the last axis spelled out in bytes."""
    array: ByteArray = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    return array


def gather(
    layer_caches: Mapping[str, Any],
    groups: Mapping[str, int],
    pages_per_block: Sequence[int],
    block_ids: BlockIds,
    num_tokens: int,
) -> dict[str, ByteArray]:
    """The state of one request's first ``num_tokens`` tokens.

    ``layer_caches``: what each layer was bound to; ``groups``: each layer's cache group.
    """
    arrays = {}
    for name, cache in layer_caches.items():
        group = groups[name]
        ids = block_ids[group]
        if isinstance(cache, torch.Tensor):
            per_block = pages_per_block[group]
            num_pages = -(-num_tokens // cache.shape[2])
            held = [block * per_block + page for block in ids if block is not None for page in range(per_block)]
            # What a sliding window has left behind stands before what it still holds.
            left_behind = per_block * sum(block is None for block in ids)
            rows = cache[held[: num_pages - left_behind]].transpose(0, 1)
            arrays[f"{name}|kv"] = _as_bytes(rows.reshape(rows.shape[0], -1, rows.shape[-1]))
        else:
            for index, state in enumerate(cache):
                arrays[f"{name}|state{index}"] = _as_bytes(state[ids[0]].unsqueeze(-1))
    return arrays


def write(path: Path, arrays: Mapping[str, ByteArray], meta: Mapping[str, Any]) -> None:
    """Write a capture so that a reader never sees half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        named: dict[str, Any] = {"meta": np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8), **arrays}
        np.savez(file, **named)
    os.replace(partial, path)
