"""How does a GPU digest runs of words in one pass over memory? Needs Triton; ``transport.digest`` does without.

One program per row: find its place in its run, load its words, weigh them by column, add them up, and add the sum times
the row's weight to the digest. All sums wrap, so their order does not matter.
"""

from typing import Any

import numpy as np
import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from hybrid_connector.transport.digest import ROW_WORDS, Runs

_NUM_WARPS = 8


@triton.jit
def _odd_weight(number):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    """As ``transport.digest._odd_weights``."""
    z = (number.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return ((z ^ (z >> 31)) | 1).to(tl.int64, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _add_up(words, runs, num_runs, of_rows, columns, digest, row_words: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    row = tl.program_id(0)
    run = tl.load(of_rows + row)
    done = (row - tl.load(runs + 2 * num_runs + run)) * row_words
    length = tl.load(runs + num_runs + run) - done
    column = tl.arange(0, row_words)
    word = tl.load(words + tl.load(runs + run) + done + column, mask=column < length, other=0).to(tl.int64)
    row_sum = tl.sum(word * tl.load(columns + column), axis=0)
    tl.atomic_add(digest, row_sum * _odd_weight(row), sem="relaxed")


def add_up(words: torch.Tensor, runs: Runs, columns: torch.Tensor) -> torch.Tensor:
    """See ``transport.digest.torch_add_up``."""
    table = _to_device((runs.starts, runs.num_words, runs.first_rows), torch.int64, words.device)
    of_rows = _to_device((runs.of_rows(),), torch.int32, words.device)
    digest = torch.zeros((), dtype=torch.int64, device=words.device)
    _add_up[(runs.num_rows,)](
        words, table, len(runs.starts), of_rows, columns, digest, row_words=ROW_WORDS, num_warps=_NUM_WARPS
    )
    return digest


def _to_device(arrays: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One after the other, through pinned memory: a copy of pageable memory would wait for what is queued before."""
    length = sum(map(len, arrays))
    on_host = torch.empty(length, dtype=dtype, pin_memory=device.type == "cuda")
    np.concatenate(arrays, out=on_host.numpy())
    return on_host.to(device, non_blocking=True)
