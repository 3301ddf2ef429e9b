"""How does a GPU digest rows of words in one pass over memory? Needs Triton; ``transport.digest`` does without.

One program per row: load its words, weigh them by column, add them up.
"""

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from hybrid_connector.transport.digest import ROW_WORDS

_NUM_WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def _row_sums(words, starts, num_words, columns, sums, row_words: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    row = tl.program_id(0)
    start = tl.load(starts + row)
    length = tl.load(num_words + row)
    column = tl.arange(0, row_words)
    word = tl.load(words + start + column, mask=column < length, other=0).to(tl.int64)
    tl.store(sums + row, tl.sum(word * tl.load(columns + column), axis=0))


def row_sums(words: Any, starts: Any, num_words: Any, columns: Any) -> torch.Tensor:
    """See ``transport.digest.torch_row_sums``."""
    sums = torch.empty_like(starts)
    _row_sums[(len(starts),)](words, starts, num_words, columns, sums, row_words=ROW_WORDS, num_warps=_NUM_WARPS)
    return sums
