"""How are whole pages of P read, where only runs of them are wanted?

1. ``cut``: the pages of a P rank's parts, one after the other, in chunks; each chunk knows the runs in it.
2. ``StagingArea``: memory beside the caches that chunks are read into; registered with the first peer that may need it.
3. From there a ``Scatter`` copies the runs to their places (``transport.scatter``).

Nothing but the runs is ever written into the caches, and no byte is read but of P's pages that hold one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hybrid_connector.transport.base import Transport
from hybrid_connector.transport.binding import BoundCopies, BoundPart, Ints, Spans, join_parts, spread
from hybrid_connector.transport.scatter import Scatter

ALIGNMENT = 64
"""A staged byte's address is P's modulo this, so that words stay words and copies on a device stay wide."""

CHUNKS = 4
"""A chunk is at most this part of the area: while one is scattered, others are read."""

MIN_STAGING_BYTES = 4096
"""Less than this is no area: chunks must hold more than their alignment."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Pages, or parts of pages, that are read together, and the runs in them.

    Range ``i`` of the pages is ``page_bytes[i]`` bytes from P's address ``page_src[i]`` to offset ``page_at[i]`` of the
    chunk; run ``j`` is the ``run_bytes[j]`` bytes at ``run_at[j]``, P's ``run_src[j]``, and belongs to ``run_dst[j]``.
    """

    src_rank: int
    page_src: Ints
    page_at: Ints
    page_bytes: Ints
    run_src: Ints
    run_at: Ints
    run_dst: Ints
    run_bytes: Ints

    @property
    def num_bytes(self) -> int:
        """What the chunk takes of the area."""
        return int(self.page_at[-1] + self.page_bytes[-1])

    def into(self, address: int) -> BoundCopies:
        """The read of the pages to where a slot begins."""
        return _copies(self.src_rank, self.page_src, self.page_at + address, self.page_bytes)

    def direct(self) -> BoundCopies:
        """The same runs straight into place."""
        return _copies(self.src_rank, self.run_src, self.run_dst, self.run_bytes)


def cut(parts: Sequence[BoundPart], chunk_bytes: int) -> tuple[Chunk, ...]:
    """The chunks that hold all runs of some parts of one P rank, each at most ``chunk_bytes`` long.

    A page or a run may be cut anywhere; what no run is in is left out. ``parts`` have pages, and overlap nowhere on D.
    ``chunk_bytes`` is a multiple of ``ALIGNMENT``.
    """
    pages = [spans for part in parts if (spans := part.pages()) is not None]
    assert len(pages) == len(parts), "a part without pages cannot be staged"
    starts, num_bytes = (np.concatenate([getattr(spans, name) for spans in pages]) for name in ("starts", "num_bytes"))
    spans = Spans.union(starts, starts + num_bytes)
    lead = spans.starts % ALIGNMENT
    room = -(-(lead + spans.num_bytes) // ALIGNMENT) * ALIGNMENT
    at = np.cumsum(room) - room + lead
    runs = join_parts(parts)
    src, dst, run_bytes = (array.astype(np.int64) for array in (runs.src, runs.dst, runs.num_bytes))
    span = np.searchsorted(spans.starts, src, side="right") - 1
    run_at = at[span] + src - spans.starts[span]
    if room.sum() <= chunk_bytes:
        return (Chunk(runs.src_rank, spans.starts, at, spans.num_bytes, src, run_at, dst, run_bytes),)
    page_number, *pages_in = _split(chunk_bytes, at, spans.num_bytes, spans.starts)
    run_number, *runs_in = _split(chunk_bytes, run_at, run_bytes, src, dst)
    numbers = np.unique(run_number)
    page_bounds, run_bounds = (
        list(zip(np.searchsorted(found, numbers), np.searchsorted(found, numbers, side="right"), strict=True))
        for found in (page_number, run_number)
    )
    chunks = []
    for (p, p_stop), (r, r_stop) in zip(page_bounds, run_bounds, strict=True):
        page_at, page_bytes, page_src = (column[p:p_stop] for column in pages_in)
        run_at, run_bytes, run_src, run_dst = (column[r:r_stop] for column in runs_in)
        chunks.append(Chunk(runs.src_rank, page_src, page_at, page_bytes, run_src, run_at, run_dst, run_bytes))
    return tuple(chunks)


def _split(length: int, at: Ints, num_bytes: Ints, *addresses: Ints) -> tuple[Ints, ...]:
    """Ranges cut where a multiple of ``length`` lies inside, in order of the chunks that they are then in.

    Returns the chunks' numbers, offsets in the chunk, bytes, and each of ``addresses`` moved along.
    """
    first = at // length
    counts = (at + num_bytes - 1) // length - first + 1
    item, number = spread(counts)
    number += first[item]
    order = np.argsort(number, kind="stable")
    item, number = item[order], number[order]
    begins = at[item]
    start = np.maximum(begins, number * length)
    stop = np.minimum(begins + num_bytes[item], (number + 1) * length)
    moved = start - begins
    return number, start - number * length, stop - start, *(address[item] + moved for address in addresses)


def _copies(rank: int, src: Ints, dst: Ints, num_bytes: Ints) -> BoundCopies:
    return BoundCopies(rank, src.astype(np.uint64), dst.astype(np.uint64), num_bytes.astype(np.uint64))


@dataclass(frozen=True, slots=True)
class Slot:
    """A part of the area that one chunk has to itself, from byte ``offset`` on."""

    offset: int
    num_bytes: int


class StagingArea:
    """``num_bytes`` of memory that chunks are read into.

    ``make_scatter`` allocates it; it is called once, by ``open``. Only the thread that reads comes here.
    """

    def __init__(self, num_bytes: int, make_scatter: Callable[[int], Scatter]) -> None:
        self._num_bytes = num_bytes // (ALIGNMENT * CHUNKS) * (ALIGNMENT * CHUNKS)
        self._make_scatter = make_scatter
        self._scatter: Scatter | None = None
        self._free = [Slot(0, self._num_bytes)]
        self.problem: str | None = None

    @property
    def chunk_bytes(self) -> int:
        """The longest chunk."""
        return self._num_bytes // CHUNKS

    @property
    def num_free_bytes(self) -> int:
        return sum(slot.num_bytes for slot in self._free)

    @property
    def num_used_bytes(self) -> int:
        return self._num_bytes - self.num_free_bytes

    @property
    def scatter(self) -> Scatter | None:
        """What copies out of the area; ``None`` before ``open``, and where that failed: ``problem`` says why."""
        return self._scatter

    def open(self, transport: Transport) -> None:
        """Allocate and register the memory, the first time; where that fails, nothing will be staged."""
        if self._scatter is not None or self.problem is not None:
            return
        try:
            scatter = self._make_scatter(self._num_bytes)
            transport.register(scatter.region)
        except Exception as error:  # no memory left, or no compiler for the kernel: that costs time, not the engine
            self.problem = f"no staging area of {self._num_bytes} bytes, everything is read directly: {error}"
            return
        self._scatter = scatter

    def take(self, num_bytes: int) -> Slot | None:
        """A slot for a chunk of that many bytes; ``None`` where there is no room now."""
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        for i, free in enumerate(self._free):
            if free.num_bytes >= size:
                rest = Slot(free.offset + size, free.num_bytes - size)
                self._free[i : i + 1] = [rest] if rest.num_bytes else []
                return Slot(free.offset, size)
        return None

    def give_back(self, slot: Slot) -> None:
        """Nothing reads from or writes into the slot any more."""
        joined: list[Slot] = []
        for free in sorted([*self._free, slot], key=lambda free: free.offset):
            if joined and joined[-1].offset + joined[-1].num_bytes == free.offset:
                joined[-1] = Slot(joined[-1].offset, joined[-1].num_bytes + free.num_bytes)
            else:
                joined.append(free)
        self._free = joined
