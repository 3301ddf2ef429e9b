"""How does a GPU digest runs of words in one pass over memory? Needs Triton; ``transport.digest`` does without.

One program per row: find its place in its run, load its words, weigh them by column, add them up, and add the sum times
the row's weight to the digest. All sums wrap, so their order does not matter.
"""

import numpy as np
import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from hybrid_connector.transport.digest import ROW_WORDS, Runs, to_device

_NUM_WARPS = 8


@triton.jit
def _odd_weight(number):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    """As ``transport.digest._odd_weights``."""
    z = (number.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return ((z ^ (z >> 31)) | 1).to(tl.int64, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _add_up(words, runs, of_rows, columns, digest, row_words: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    row = tl.program_id(0)
    run = tl.load(of_rows + row)
    done = (row - tl.load(runs + 3 * run + 2)) * row_words
    length = tl.load(runs + 3 * run + 1) - done
    column = tl.arange(0, row_words)
    word = tl.load(words + tl.load(runs + 3 * run) + done + column, mask=column < length, other=0).to(tl.int64)
    row_sum = tl.sum(word * tl.load(columns + column), axis=0)
    tl.atomic_add(digest, row_sum * _odd_weight(row), sem="relaxed")


def add_up(words: torch.Tensor, runs: Runs, columns: torch.Tensor) -> torch.Tensor:
    """See ``transport.digest.torch_add_up``."""
    counts = runs.num_rows
    table = to_device(np.stack((runs.starts, runs.num_words, np.cumsum(counts) - counts), axis=1), words.device)
    of_rows = to_device(np.repeat(np.arange(len(counts), dtype=np.int32), counts), words.device)
    digest = torch.zeros((), dtype=torch.int64, device=words.device)
    _add_up[(len(of_rows),)](words, table, of_rows, columns, digest, row_words=ROW_WORDS, num_warps=_NUM_WARPS)
    return digest
