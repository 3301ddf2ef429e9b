"""How do staged runs get to their places?

1. ``Scatter``: memory beside the caches, and copies from there into them, on the device that holds both.
2. ``HostScatter`` copies before ``begin`` returns. ``CudaScatter`` copies in a stream of its own, which waits for
   nothing: the read has ended, and whoever calls has seen the compute stream pass what was queued before.
"""

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from hybrid_connector.transport.base import Region, host_region
from hybrid_connector.transport.binding import Ints, spread
from hybrid_connector.transport.digest import as_words, to_device

if TYPE_CHECKING:
    import torch

ROW_BYTES = 1 << 16
"""A run is copied in rows of at most so many bytes, each by one program."""
_LONG_RUN_BYTES = 4096
"""From here on a copy of its own is faster on a host than gathering runs of one length."""
_CHUNK_BYTES = 1 << 18
"""Gathered at once on the host: what still fits into a core's cache."""
_TORCH_CHUNK_WORDS = 1 << 21
"""Gathered at once on a GPU without Triton."""


class ScatterJob(Protocol):
    """Copies under way."""

    def has_ended(self) -> bool:
        """Whether every byte has arrived, and the staged ones may be overwritten. Never waits."""
        ...


class Scatter(Protocol):
    """``region``: the staging memory, which lives as long as this does."""

    @property
    def region(self) -> Region: ...

    def begin(self, src: Ints, dst: Ints, num_bytes: Ints) -> ScatterJob:
        """Copy ``num_bytes[i]`` bytes from offset ``src[i]`` of the staging memory to offset ``dst[i]`` of the caches.

        Nobody else writes those bytes of the caches, or these staged ones, until the job has ended.
        """
        ...


class _Ended:
    def has_ended(self) -> bool:
        return True


class HostScatter:
    """Into caches in DRAM, whose memory is ``caches``."""

    def __init__(self, num_bytes: int, caches: Region) -> None:
        self._staged = np.empty(num_bytes, np.uint8)
        self._caches = np.ctypeslib.as_array((ctypes.c_uint8 * caches.num_bytes).from_address(caches.address))
        self._region = host_region(self._staged)
        self._bases = self._region.address | caches.address

    @property
    def region(self) -> Region:
        return self._region

    def begin(self, src: Ints, dst: Ints, num_bytes: Ints) -> ScatterJob:
        size = word_bytes(self._bases, src, dst, num_bytes)
        for length in np.unique(num_bytes).tolist():
            alike = np.flatnonzero(num_bytes == length)
            if length >= _LONG_RUN_BYTES:
                for s, d in zip(src[alike].tolist(), dst[alike].tolist(), strict=True):
                    self._caches[d : d + length] = self._staged[s : s + length]
                continue
            staged, caches = (_windows(memory, size, length) for memory in (self._staged, self._caches))
            step = max(1, _CHUNK_BYTES // length)
            for first in range(0, len(alike), step):
                part = alike[first : first + step]
                caches[dst[part] // size] = staged[src[part] // size]
        return _Ended()


def word_bytes(bases: int, *arrays: Ints) -> int:
    """The longest word, up to 8 bytes, that all of these are multiples of."""
    odd_bits = bases
    for array in arrays:
        odd_bits |= int(np.bitwise_or.reduce(array))
    return next(size for size in (8, 4, 2, 1) if odd_bits % size == 0)


def _windows(memory: NDArray[np.uint8], size: int, length: int) -> NDArray[Any]:
    """Every place of ``memory`` where a run of ``length`` bytes may start, in words of ``size`` bytes."""
    words = memory[: memory.size // size * size].view(f"<i{size}")
    return sliding_window_view(words, length // size, writeable=True)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Runs cut into pieces of at most ``ROW_BYTES``.

    A row of ``table``: offset in the staging memory, offset in the caches, length; in words of ``word_bytes``.
    """

    word_bytes: int
    table: Ints

    @classmethod
    def of(cls, bases: int, src: Ints, dst: Ints, num_bytes: Ints) -> "Rows":
        size = word_bytes(bases, src, dst, num_bytes)
        run, number = spread(-(-num_bytes // ROW_BYTES))
        done = number * ROW_BYTES
        row_bytes = np.minimum(num_bytes[run] - done, ROW_BYTES)
        table = np.empty((len(run), 3), np.int64)
        for place, column in enumerate((src[run] + done, dst[run] + done, row_bytes)):
            table[:, place] = column // size
        return cls(size, table)


class CudaScatter:
    """Into caches on a GPU. ``caches``: their memory as uint8; the staging memory is allocated beside it.

    Without Triton, plain torch does the same in chunks.
    """

    def __init__(self, num_bytes: int, caches: "torch.Tensor") -> None:
        import torch

        self._torch = torch
        self._caches = caches
        self._staged = torch.empty(num_bytes, dtype=torch.uint8, device=caches.device)
        self._bases = self._staged.data_ptr() | caches.data_ptr()
        self._region = Region(self._staged.data_ptr(), num_bytes, "VRAM", caches.device.index or 0)
        self._stream = torch.cuda.Stream(caches.device)  # type: ignore[no-untyped-call]
        self._copy_rows = _triton_copy_rows() or torch_copy_rows
        for size in (8, 4, 2, 1):  # compiles now, not while requests wait; a copy of nothing
            self._start(Rows(size, np.zeros((1, 3), np.int64)))

    @property
    def region(self) -> Region:
        return self._region

    def begin(self, src: Ints, dst: Ints, num_bytes: Ints) -> ScatterJob:
        return self._start(Rows.of(self._bases, src, dst, num_bytes))

    def _start(self, rows: Rows) -> ScatterJob:
        torch = self._torch
        with torch.cuda.stream(self._stream):
            table = to_device(rows.table, self._caches.device)
            staged, caches = (as_words(memory, rows.word_bytes) for memory in (self._staged, self._caches))
            self._copy_rows(staged, caches, table)
            event = torch.cuda.Event()
            event.record(self._stream)
        return _CudaJob(event)


@dataclass(frozen=True, slots=True, eq=False)
class _CudaJob:
    event: Any

    def has_ended(self) -> bool:
        return bool(self.event.query())


def torch_copy_rows(staged: "torch.Tensor", caches: "torch.Tensor", table: "torch.Tensor") -> None:
    """Carry out every row of ``table`` (``Rows``); any device."""
    import torch

    lengths = table[:, 2].cpu()
    for length in set(lengths.tolist()) - {0}:
        alike = (lengths == length).nonzero().squeeze(1)
        column = torch.arange(length, device=table.device)
        for part in alike.split(max(1, _TORCH_CHUNK_WORDS // length)):
            src, dst = (table[part.to(table.device), place][:, None] + column for place in (0, 1))
            caches[dst] = staged[src]


def _triton_copy_rows() -> Any:
    """The same as ``torch_copy_rows`` as one kernel; ``None`` where Triton is not installed."""
    try:
        from hybrid_connector.transport.scatter_kernel import copy_rows
    except ImportError:
        return None
    return copy_rows
