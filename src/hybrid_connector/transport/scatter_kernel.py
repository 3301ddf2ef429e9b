"""How does a GPU copy rows of words to other places in one pass? Needs Triton; ``transport.scatter`` does without.

One program per row: load its words a step at a time, store them where they belong.
"""

from typing import Any

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

_STEP_BYTES = 1 << 14
_NUM_WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def _copy_rows(staged, caches, table, step: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    row = tl.program_id(0)
    src = tl.load(table + 3 * row)
    dst = tl.load(table + 3 * row + 1)
    length = tl.load(table + 3 * row + 2)
    for first in range(0, length, step):
        column = first + tl.arange(0, step)
        tl.store(caches + dst + column, tl.load(staged + src + column, mask=column < length), mask=column < length)


def copy_rows(staged: Any, caches: Any, table: Any) -> None:
    """See ``transport.scatter.torch_copy_rows``."""
    step = _STEP_BYTES // staged.element_size()
    _copy_rows[(len(table),)](staged, caches, table, step=step, num_warps=_NUM_WARPS)
