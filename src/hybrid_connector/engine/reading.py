"""In which order is what D's requests need read, and how much of it at a time?

1. A ``Job`` is one request: direct runs in pieces, and chunks of whole pages that go through the staging area.
2. ``Reads`` posts them in turn, a piece of each job at a time, up to a bound per P engine; the rest waits.
3. A chunk that has arrived is scattered once the job's mark has passed; its slot is free when the scatter has ended.

``advance`` does what can be done now and never waits: what it posts per call is bounded too. Where no slot comes free
for a while, because a peer stands still, the chunk's runs are read directly.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hybrid_connector.core.errors import HybridConnectorError
from hybrid_connector.engine.ordering import Mark
from hybrid_connector.transport.base import Region, Transfer, TransferState, Transport
from hybrid_connector.transport.binding import Binder, BoundCopies
from hybrid_connector.transport.cost import SCATTER, Cost, Estimate
from hybrid_connector.transport.scatter import ScatterJob
from hybrid_connector.transport.staging import Chunk, Slot, StagingArea
from hybrid_connector.wire.manifest import EngineManifest

logger = logging.getLogger(__name__)

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is done at a time.

    ``in_flight_*``: from one P engine, unless a single piece is more. 1 GiB lasts 10 ms at 100 GB/s, about as long as
    an engine takes from one poll to the next.
    ``piece_*``: a direct read is cut, between runs, where it is longer; between pieces others have their turn.
    ``post_s``: after so long of binding, or of posting, in one poll the rest waits for the next; the engine's step goes
    on meanwhile.
    ``patience_s``: how long a chunk waits for a slot before its runs are read directly.
    """

    in_flight_bytes: int = 1 << 30
    in_flight_reads: int = 64
    piece_bytes: int = 128 << 20
    piece_descriptors: int = 4096
    post_s: float = 2e-3
    patience_s: float = 0.1


SEEN_WITHIN = 0.2
"""A read tells the cost model something if its end was noticed within this share of the time it took."""
REFIT_EVERY = 8
"""Fewer readings say too little beside the noise in them, and fitting a cost takes half a millisecond."""


def _estimate(start: Cost) -> Estimate:
    return Estimate(start, window=64, half_life=32, refit_every=REFIT_EVERY)


@dataclass(slots=True, eq=False)
class Peer:
    """A P engine this rank reads from; its ranks are added to the transport with each read."""

    manifest: EngineManifest
    binder: Binder
    start: Cost
    handles: dict[int, str] = field(default_factory=dict)
    estimates: dict[int, Estimate] = field(default_factory=dict)
    connected: set[int] = field(default_factory=set)
    is_gone: bool = False
    num_reads: int = 0
    num_bytes: int = 0

    def cost(self, src_rank: int) -> Cost:
        """What reads from one of its ranks cost."""
        estimate = self.estimates.get(src_rank)
        return self.start if estimate is None else estimate.cost

    def note(self, src_rank: int, num_descriptors: int, num_bytes: int, seconds: float | None) -> None:
        """A read from that rank ended well, within ``seconds`` if that is known.

        The first over a connection says nothing: it has set the connection up.
        """
        if src_rank in self.connected and seconds is not None:
            estimate = self.estimates.setdefault(src_rank, _estimate(self.start))
            estimate.add(num_descriptors, num_bytes, seconds)
        self.connected.add(src_rank)

    def has_room(self, num_bytes: int, limits: Limits) -> bool:
        """Whether a read of that size may be posted now."""
        return self.num_reads == 0 or (
            self.num_reads < limits.in_flight_reads and self.num_bytes + num_bytes <= limits.in_flight_bytes
        )


@dataclass(slots=True)
class _Running:
    """A read under way, or a chunk that is being scattered.

    ``looked_at``: when the read was last seen pending; ``ended_at``: when it was first seen to have ended.
    """

    read: Transfer
    src_rank: int
    posted_at: float
    looked_at: float
    chunk: Chunk | None = None
    slot: Slot | None = None
    ended_at: float | None = None
    has_landed: bool = False
    scatter: ScatterJob | None = None


@dataclass(slots=True, eq=False)
class Job:
    """The reads of one request. It has ended when nothing waits and nothing runs.

    ``pieces`` and ``chunks``: what waits, to be read directly and through the staging area. ``mark``: no byte of the
    caches is written before it has passed.
    """

    peer: Peer
    mark: Mark
    pieces: deque[BoundCopies] = field(default_factory=deque)
    chunks: deque[Chunk] = field(default_factory=deque)
    running: list[_Running] = field(default_factory=list)
    posted_at: float | None = None
    ended_at: float | None = None
    starved_since: float | None = None
    num_descriptors: int = 0
    direct_bytes: int = 0
    staged_bytes: int = 0
    error: str | None = None

    @property
    def is_waiting(self) -> bool:
        return bool(self.pieces or self.chunks)

    def fail(self, reason: str) -> None:
        """Post nothing more; what runs is waited for. The first reason is the one that is told."""
        self.error = self.error or reason
        self.pieces.clear()
        self.chunks.clear()


def cut_direct(copies: BoundCopies, limits: Limits) -> list[BoundCopies]:
    """The same runs in pieces as long as ``limits`` allows; a single run may be longer."""
    if len(copies) <= limits.piece_descriptors and copies.total_bytes <= limits.piece_bytes:
        return [copies]
    ends = np.cumsum(copies.num_bytes)
    pieces, first, done = [], 0, 0
    while first < len(copies):
        stop = int(np.searchsorted(ends, np.uint64(done + limits.piece_bytes), side="right"))
        stop = min(max(stop, first + 1), first + limits.piece_descriptors)
        part = slice(first, stop)
        pieces.append(BoundCopies(copies.src_rank, copies.src[part], copies.dst[part], copies.num_bytes[part]))
        first, done = stop, int(ends[min(stop, len(copies)) - 1])
    return pieces


class Reads:
    """The reads of one D rank."""

    def __init__(
        self, region: Region, transport: Transport, staging: StagingArea | None, clock: Clock, limits: Limits
    ) -> None:
        self._region = region
        self._transport = transport
        self._staging = staging
        self._clock = clock
        self._limits = limits
        self._scatter_cost = _estimate(SCATTER[region.memory])
        self._jobs: list[Job] = []
        self._turns: deque[Job] = deque()

    @property
    def scatter_cost(self) -> Cost:
        """Of bringing staged runs to their places. A GPU's stays as it was: its end is seen too late to learn from."""
        return self._scatter_cost.cost

    def add(self, job: Job) -> None:
        """Read what ``job`` holds, in turn with the others."""
        self._jobs.append(job)
        self._turns.append(job)

    def advance(self) -> None:
        """Post what may be posted, scatter what has landed, notice what has ended."""
        deadline = self._clock() + self._limits.post_s
        self._poll()
        while self._post(deadline):
            self._poll()
            if self._clock() >= deadline:
                break

    def drain(self) -> int:
        """Notice what has ended, post and scatter nothing more; returns how many jobs may still write."""
        for job in self._jobs:
            job.fail("the engine shuts down")
        self._poll()
        return sum(bool(job.running) for job in self._jobs)

    # Posting.

    def _post(self, deadline: float) -> bool:
        """Give every job its turn, again and again until nothing more may be posted now; whether anything was."""
        has_posted, refused = False, 0
        while refused < len(self._turns):
            job = self._turns.popleft()
            if job.is_waiting and job.peer.is_gone:
                job.fail(f"engine {job.peer.manifest.engine_id} restarted before the read was posted")
            is_posted = self._post_chunk(job) or self._post_direct(job)
            if job.is_waiting:
                self._turns.append(job)
            refused = 0 if is_posted else refused + job.is_waiting
            has_posted = has_posted or is_posted
            if is_posted and self._clock() >= deadline:
                break
        return has_posted

    def _post_chunk(self, job: Job) -> bool:
        """Post the next chunk if there is room; whether it was posted, or cost the job its life.

        It is read into the staging area, so it need not wait for those who write the caches.
        """
        if not job.chunks or not job.peer.has_room(job.chunks[0].num_bytes, self._limits):
            return False
        assert self._staging is not None
        slot = self._staging.take(job.chunks[0].num_bytes)
        if slot is not None:
            job.starved_since = None
            self._try(job, job.chunks.popleft(), slot)
            return True
        if not job.mark.has_passed():
            return False  # nor could its runs be read directly
        if job.starved_since is None:
            job.starved_since = self._clock()
        elif self._clock() - job.starved_since >= self._limits.patience_s:
            job.pieces.append(job.chunks.popleft().direct())
        return False

    def _post_direct(self, job: Job) -> bool:
        """Post the next piece if there is room and its blocks are free; whether it was, or cost the job its life."""
        if (
            not job.pieces
            or not job.mark.has_passed()
            or not job.peer.has_room(job.pieces[0].total_bytes, self._limits)
        ):
            return False
        self._try(job, job.pieces.popleft(), None)
        return True

    def _try(self, job: Job, piece: BoundCopies | Chunk, slot: Slot | None) -> None:
        try:
            self._start(job, piece, slot)
        except (HybridConnectorError, ValueError) as error:
            if slot is not None:
                self._give_back(slot)
            job.fail(str(error))
        if not job.is_waiting:
            job.posted_at = self._clock()

    def _start(self, job: Job, piece: BoundCopies | Chunk, slot: Slot | None) -> None:
        began = self._clock()
        local = self._region
        if isinstance(piece, Chunk):
            assert self._staging is not None
            assert self._staging.scatter is not None
            assert slot is not None
            local = self._staging.scatter.region
            copies = piece.into(local.address + slot.offset)
        else:
            copies = piece
        remote = job.peer.manifest.ranks[copies.src_rank]
        # Each time: cheap for a known peer, and after a failed read it is what connects again.
        handle = job.peer.handles[copies.src_rank] = self._transport.add_peer(remote.identity)
        region = Region(remote.region_address, remote.layout.region_bytes, remote.memory, remote.device)
        read = self._transport.read(handle, copies, local, region)
        chunk = piece if isinstance(piece, Chunk) else None
        running = _Running(read, copies.src_rank, began, self._clock(), chunk, slot)
        self._look(running)  # some transports read before they return; how long that took is known only now
        job.running.append(running)
        job.num_descriptors += read.num_descriptors
        if chunk is None:
            job.direct_bytes += read.num_bytes
        else:
            job.staged_bytes += read.num_bytes
        job.peer.num_reads += 1
        job.peer.num_bytes += read.num_bytes

    def _give_back(self, slot: Slot) -> None:
        assert self._staging is not None
        self._staging.give_back(slot)

    # What runs.

    def _poll(self) -> None:
        for job in self._jobs:
            job.running = [running for running in job.running if not self._has_ended(job, running)]
            if not job.is_waiting and not job.running:
                job.ended_at = self._clock()
                job.posted_at = job.ended_at if job.posted_at is None else job.posted_at
        self._jobs = [job for job in self._jobs if job.ended_at is None]

    def _has_ended(self, job: Job, running: _Running) -> bool:
        """Whether the read can write no more, and its scatter neither. An error of one does not end the others."""
        if not running.has_landed:
            if not self._look(running):
                return False
            running.has_landed = True
            job.peer.num_reads -= 1
            job.peer.num_bytes -= running.read.num_bytes
            if running.read.poll() is TransferState.FAILED:
                job.peer.connected.discard(running.src_rank)
                job.fail(running.read.error or "read failed")
            else:
                self._learn(job.peer, running)
        if running.chunk is None or running.slot is None:
            return True
        if running.scatter is None and job.error is None:
            if not job.mark.has_passed():
                return False
            self._scatter(job, running, running.chunk, running.slot)
        if running.scatter is not None and not running.scatter.has_ended():
            return False
        self._give_back(running.slot)
        return True

    def _scatter(self, job: Job, running: _Running, chunk: Chunk, slot: Slot) -> None:
        assert self._staging is not None
        assert self._staging.scatter is not None
        began = self._clock()
        try:
            running.scatter = self._staging.scatter.begin(
                chunk.run_at + slot.offset, chunk.run_dst - self._region.address, chunk.run_bytes
            )
            if running.scatter.has_ended():
                self._scatter_cost.add(len(chunk.run_at), int(chunk.run_bytes.sum()), self._clock() - began)
        except Exception as error:  # a device may have no memory left; that costs the request, not the engine
            job.fail(f"what was staged cannot be scattered: {error}")

    def _look(self, running: _Running) -> bool:
        """Whether the read has ended, noting the time."""
        if running.ended_at is None:
            if running.read.poll() is TransferState.PENDING:
                running.looked_at = self._clock()
            else:
                running.ended_at = self._clock()
        return running.ended_at is not None

    def _learn(self, peer: Peer, running: _Running) -> None:
        """Note what a read took, unless it may have ended long before it was looked at."""
        assert running.ended_at is not None
        took = running.ended_at - running.posted_at
        is_known = running.ended_at - running.looked_at <= SEEN_WITHIN * took
        peer.note(running.src_rank, running.read.num_descriptors, running.read.num_bytes, took if is_known else None)
