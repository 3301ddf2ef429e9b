"""Which bytes do P and D compare in verification mode?

A ``RunList``: contiguous ranges of one rank's region, in an order that both sides share. It is a plain value of bytes,
so that it can be sent as it is; ``transport.digest`` computes its digest.
"""

import struct
from dataclasses import dataclass

MAX_RUNS = 3500
"""Of one list. As a message it then fits into what one request may hold; longer ones are cut."""

_ITEM_BYTES = 8


@dataclass(frozen=True, slots=True)
class RunList:
    """Run ``i`` is ``num_bytes[i]`` bytes from ``offsets[i]`` of the rank's region on.

    Both are packed as little-endian uint64. ``word_bytes`` (1, 2 or 4) divides the address and the length of every run,
    on both sides.
    """

    word_bytes: int
    offsets: bytes
    num_bytes: bytes

    def __post_init__(self) -> None:
        if self.word_bytes not in (1, 2, 4):
            raise ValueError(f"expected words of 1, 2 or 4 bytes, got {self.word_bytes}")
        if not (0 < len(self.offsets) <= MAX_RUNS * _ITEM_BYTES and len(self.offsets) % _ITEM_BYTES == 0):
            raise ValueError(f"expected 1 to {MAX_RUNS} offsets of {_ITEM_BYTES} bytes, got {len(self.offsets)} bytes")
        if len(self.num_bytes) != len(self.offsets):
            raise ValueError(f"expected {len(self)} lengths of {_ITEM_BYTES} bytes, got {len(self.num_bytes)} bytes")

    def __len__(self) -> int:
        return len(self.offsets) // _ITEM_BYTES

    @property
    def total_bytes(self) -> int:
        return sum(struct.unpack(f"<{len(self)}Q", self.num_bytes))
