"""Are the bytes that D has read the bytes that P holds? (verification mode)

1. ``run_lists`` names the bytes of a read twice: where they lie on P, and where on D. Nothing else differs.
2. The runs are cut into rows of at most ``ROW_WORDS`` words. A word counts with its row's weight times its column's;
   the digest is the sum modulo 2**64.
3. A ``Digester`` computes it on the device where the memory is: ``HostDigester`` with numpy, ``CudaDigester`` beside
   the engine's own work.

All weights are odd, so no change of a single word can cancel. Words have at most 32 of the sum's 64 bits, so changes
of several words cancel about once in 2**32: of words of 64 bits, two flips of the highest bit always would.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from hybrid_connector.core.digests import MAX_RUNS, RunList
from hybrid_connector.transport.base import Region
from hybrid_connector.transport.binding import Addresses, BoundCopies, Ints, spread

if TYPE_CHECKING:
    import torch

ROW_WORDS = 4096
_CHUNK_WORDS = 1 << 18
"""Gathered at once on the host: what still fits into a core's cache was seen to be fastest."""
_TORCH_CHUNK_WORDS = 1 << 21
"""Gathered at once on a GPU without Triton: 40 MiB of what the engine left free."""
_MASK = 2**64 - 1
_COLUMN_SEED = 1 << 40
"""Where the columns' weights begin in the sequence of which rows take the start."""


class DigestJob(Protocol):
    """One digest under way."""

    def poll(self) -> int | None:
        """The digest, ``None`` while it is not there. Never waits for the device."""
        ...


class Digester(Protocol):
    """Computes digests of one region, where it lies."""

    def begin(self, runs: RunList) -> DigestJob:
        """``runs`` lie inside the region, and nobody writes them until the job has ended."""
        ...


@dataclass(frozen=True, slots=True)
class PairedRuns:
    """The same bytes on P and on D."""

    src_rank: int
    src: RunList
    dst: RunList


def run_lists(copies: BoundCopies, local: Region, remote: Region) -> tuple[PairedRuns, ...]:
    """What ``copies`` move from ``remote`` to ``local``, in lists of at most ``MAX_RUNS`` runs."""
    addresses = np.concatenate((copies.src, copies.dst, copies.num_bytes))
    odd_bits = int(np.bitwise_or.reduce(addresses))
    word_bytes = next(size for size in (4, 2, 1) if odd_bits % size == 0)

    def pack(values: Addresses) -> bytes:
        return values.astype("<u8").tobytes()

    pairs = []
    for first in range(0, len(copies), MAX_RUNS):
        part = slice(first, first + MAX_RUNS)
        num_bytes = pack(copies.num_bytes[part])
        src = pack(copies.src[part] - np.uint64(remote.address))
        dst = pack(copies.dst[part] - np.uint64(local.address))
        pairs.append(
            PairedRuns(copies.src_rank, RunList(word_bytes, src, num_bytes), RunList(word_bytes, dst, num_bytes))
        )
    return tuple(pairs)


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """A run list in words: offset in the region and length of each run."""

    starts: Ints
    num_words: Ints

    @classmethod
    def of(cls, runs: RunList) -> "Runs":
        starts, num_words = (np.frombuffer(packed, "<i8") for packed in (runs.offsets, runs.num_bytes))
        return cls(starts // runs.word_bytes, num_words // runs.word_bytes)

    @property
    def num_rows(self) -> Ints:
        """Of each run."""
        return -(-self.num_words // ROW_WORDS)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A run list cut into rows: word offset in the region, words (at most ``ROW_WORDS``) and weight of each."""

    starts: Ints
    num_words: Ints
    weights: Ints

    @classmethod
    def of(cls, runs: Runs) -> "Rows":
        run, number = spread(runs.num_rows)
        done = number * ROW_WORDS
        num_words = np.minimum(runs.num_words[run] - done, ROW_WORDS)
        return cls(runs.starts[run] + done, num_words, _odd_weights(np.arange(len(run))))


def _odd_weights(numbers: Ints) -> Ints:
    """Pseudo-random odd numbers: the output function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    z = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)


@cache
def column_weights() -> Ints:
    """Of the words of a row."""
    return _odd_weights(np.arange(_COLUMN_SEED, _COLUMN_SEED + ROW_WORDS))


def host_digest(memory: NDArray[np.uint8], runs: RunList) -> int:
    """The digest of ``runs`` of ``memory``, a rank's whole region.

    Words are signed integers; sums wrap, as int64 does everywhere.
    """
    size = runs.word_bytes
    words = memory[: memory.size // size * size].view(f"<i{size}")
    rows, columns = Rows.of(Runs.of(runs)), column_weights()
    total = 0
    for length in np.unique(rows.num_words):
        alike = np.flatnonzero(rows.num_words == length)
        windows = sliding_window_view(words, length)
        step = max(1, _CHUNK_WORDS // int(length))
        for first in range(0, len(alike), step):
            part = alike[first : first + step]
            gathered = windows[rows.starts[part]].astype(np.int64)
            sums = np.einsum("rc,c->r", gathered, columns[:length])
            total += int(np.einsum("r,r->", sums, rows.weights[part]))
    return total & _MASK


@dataclass(frozen=True, slots=True)
class _Ended:
    digest: int

    def poll(self) -> int:
        return self.digest


class HostDigester:
    """Digests of memory in DRAM, computed before ``begin`` returns."""

    def __init__(self, region: Region) -> None:
        array = (ctypes.c_uint8 * region.num_bytes).from_address(region.address)
        self._memory = np.ctypeslib.as_array(array)

    def begin(self, runs: RunList) -> DigestJob:
        return _Ended(host_digest(self._memory, runs))


class CudaDigester:
    """Digests of memory on a GPU, in a stream of their own, so that no step of the engine waits for one.

    What is to be digested has been written before ``begin`` is called: a read has ended, a lease is sealed.
    ``memory``: the region as uint8. Without Triton, plain torch does the same in chunks, and ``begin`` waits for it.
    """

    def __init__(self, memory: "torch.Tensor") -> None:
        import torch

        self._torch = torch
        self._memory = memory
        self._stream = torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._columns = torch.from_numpy(column_weights()).to(memory.device)
        self._add_up = _triton_add_up() or torch_add_up
        warm_up = np.array([16], "<u8").tobytes()
        self.begin(RunList(4, bytes(8), warm_up))  # compiles now, not while requests wait

    def begin(self, runs: RunList) -> DigestJob:
        torch = self._torch
        with torch.cuda.stream(self._stream):
            words = as_words(self._memory, runs.word_bytes)
            digest = torch.empty((), dtype=torch.int64, pin_memory=True)
            digest.copy_(self._add_up(words, Runs.of(runs), self._columns), non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return _CudaJob(digest, event)


@dataclass(frozen=True, slots=True, eq=False)
class _CudaJob:
    """``digest``: in host memory, there once ``event`` has passed."""

    digest: "torch.Tensor"
    event: Any

    def poll(self) -> int | None:
        return int(self.digest) & _MASK if self.event.query() else None


def as_words(memory: "torch.Tensor", word_bytes: int) -> "torch.Tensor":
    """uint8 memory as signed integers of ``word_bytes``; a rest that is no word is left out."""
    import torch

    dtype = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[word_bytes]
    return memory[: memory.numel() // word_bytes * word_bytes].view(dtype)


def to_device(array: NDArray[Any], device: "torch.device") -> "torch.Tensor":
    """Through pinned memory, without waiting: a copy of pageable memory would wait for what is queued before."""
    import torch

    on_host = torch.from_numpy(array)
    return (on_host.pin_memory() if device.type == "cuda" else on_host).to(device, non_blocking=True)


def torch_add_up(words: "torch.Tensor", runs: Runs, columns: "torch.Tensor") -> "torch.Tensor":
    """The digest of ``runs`` of ``words`` as one int64, where ``words`` and the weights of ``columns`` are."""
    import torch

    rows = Rows.of(runs)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for length in np.unique(rows.num_words).tolist():
        windows = words.unfold(0, length, 1)
        alike = np.flatnonzero(rows.num_words == length)
        step = max(1, _TORCH_CHUNK_WORDS // length)
        for first in range(0, len(alike), step):
            part = alike[first : first + step]
            starts, weights = (torch.from_numpy(x[part]).to(words.device) for x in (rows.starts, rows.weights))
            total += ((windows[starts].to(torch.int64) * columns[:length]).sum(1) * weights).sum()
    return total


def _triton_add_up() -> Any:
    """The same as ``torch_add_up`` as one kernel; ``None`` where Triton is not installed."""
    try:
        from hybrid_connector.transport.digest_kernel import add_up
    except ImportError:
        return None
    return add_up
