"""How many reads are under way at once, and does a long request hold up short ones?"""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from hybrid_connector.core.errors import PeerError
from hybrid_connector.engine.reading import Job, Limits, Peer, Reads, cut_direct
from hybrid_connector.transport.base import Region, TransferState
from hybrid_connector.transport.binding import BoundCopies
from hybrid_connector.transport.cost import DEFAULTS

from fakes import Clock, Stream, engine_manifest
from layouts import Model, Storage, build_engine

KIB = 1024


class Read:
    """A read that ends when the test says so."""

    def __init__(self, peer: str, copies: BoundCopies) -> None:
        self.peer, self.copies, self.state = peer, copies, TransferState.PENDING

    @property
    def num_descriptors(self) -> int:
        return len(self.copies)

    @property
    def num_bytes(self) -> int:
        return self.copies.total_bytes

    @property
    def error(self) -> str | None:
        return "broken" if self.state is TransferState.FAILED else None

    def poll(self) -> TransferState:
        return self.state


class Line:
    """A transport on which nothing happens by itself; posting takes ``post_s`` of the clock."""

    def __init__(self, clock: Clock, post_s: float = 0.0) -> None:
        self.clock, self.post_s, self.reads, self.lost = clock, post_s, [], set()

    def add_peer(self, identity: bytes) -> str:
        if identity.decode() in self.lost:
            raise PeerError(f"{identity.decode()}: gone")
        return identity.decode()

    def read(self, peer: str, copies: BoundCopies, local: Region, remote: Region) -> Read:
        self.clock.advance(self.post_s)
        self.reads.append(Read(peer, copies))
        return self.reads[-1]

    @property
    def in_flight(self) -> list[Read]:
        return [read for read in self.reads if read.state is TransferState.PENDING]


class World:
    def __init__(self, limits: Limits, post_s: float = 0.0) -> None:
        self.clock, self.stream = Clock(), Stream()
        self.line = Line(self.clock, post_s)
        self.limits = limits
        self.reads = Reads(Region(1 << 20, 1 << 20), self.line, None, self.clock, limits)  # type: ignore[arg-type]
        self.peers = {name: self.peer(name) for name in "PQ"}
        self.jobs: dict[str, Job] = {}

    def peer(self, name: str) -> Peer:
        srcs = build_engine(Model(num_attention=1), Storage())
        manifest = engine_manifest(srcs, name, "first", identities=[name.encode()])
        return Peer(manifest, None, DEFAULTS["tcp"])  # type: ignore[arg-type]

    def add(self, name: str, num_bytes: Sequence[int], peer: str = "P") -> Job:
        job = Job(self.peers[peer], self.stream.mark())
        job.pieces.extend(cut_direct(copies_of(num_bytes), self.limits))
        self.jobs[name] = job
        self.reads.add(job)
        return job

    def owner(self, read: Read) -> str:
        return next(name for name, job in self.jobs.items() if read in [running.read for running in job.running])

    def finish(self, *reads: Read, state: TransferState = TransferState.DONE) -> None:
        for read in reads:
            read.state = state


def copies_of(num_bytes: Sequence[int]) -> BoundCopies:
    sizes = np.array(num_bytes, np.uint64)
    starts = np.cumsum(sizes) - sizes + np.uint64(1 << 20)
    return BoundCopies(0, starts, starts, sizes)


def test_what_is_under_way_is_bounded_per_engine() -> None:
    world = World(Limits(in_flight_bytes=10 * KIB, in_flight_reads=4, piece_bytes=4 * KIB))
    world.add("a", [KIB] * 40)
    world.add("b", [KIB // 4] * 4, "Q")
    seen = 0
    while world.jobs["a"].ended_at is None:
        world.reads.advance()
        for name in "PQ":
            flying = [read for read in world.line.in_flight if read.peer == name]
            assert len(flying) <= 4
            assert sum(read.num_bytes for read in flying) <= 10 * KIB
        assert seen or [read.peer for read in world.line.reads] == ["P", "Q", "P"]  # Q is not behind P's bound
        seen = max(seen, len(world.line.in_flight))
        world.finish(*world.line.in_flight[:1])
    assert seen == 3
    assert sum(read.num_bytes for read in world.line.reads) == 41 * KIB
    assert world.jobs["a"].direct_bytes == 40 * KIB


def test_many_small_reads_are_bounded_too() -> None:
    world = World(Limits(in_flight_reads=3))
    for number in range(8):
        world.add(f"{number}", [KIB])
    world.reads.advance()
    assert len(world.line.in_flight) == 3


def test_a_single_piece_beyond_the_bound_is_read_alone() -> None:
    world = World(Limits(in_flight_bytes=KIB, piece_bytes=KIB))
    world.add("a", [5 * KIB, 5 * KIB])
    world.add("b", [10])
    world.reads.advance()
    assert [read.num_bytes for read in world.line.in_flight] == [5 * KIB]
    world.finish(*world.line.in_flight)
    world.reads.advance()
    assert [read.num_bytes for read in world.line.in_flight] == [10]


def test_a_long_request_does_not_hold_up_short_ones() -> None:
    """100 pieces of one request, four under way; short ones that come later have their turn with the next that end."""
    world = World(Limits(in_flight_bytes=4 * KIB, piece_bytes=KIB))
    world.add("long", [KIB] * 100)
    world.reads.advance()
    for name in ("x", "y", "z"):
        world.add(name, [KIB] * 2)
    order = []
    while any(world.jobs[name].ended_at is None for name in "xyz"):
        posted = len(world.line.reads)
        world.finish(world.line.in_flight[0])
        world.reads.advance()
        order += [world.owner(read) for read in world.line.reads[posted:]]
    assert order[:8] == ["long", "x", "y", "z"] * 2
    assert len(world.line.reads) < 20
    assert world.jobs["long"].ended_at is None


def test_jobs_take_turns_piece_by_piece() -> None:
    world = World(Limits(piece_bytes=KIB, in_flight_reads=1000))
    world.add("a", [KIB] * 3)
    world.add("b", [KIB] * 2)
    world.add("c", [KIB])
    world.reads.advance()
    assert [world.owner(read) for read in world.line.reads] == ["a", "b", "c", "a", "b", "a"]


def test_posting_is_bounded_in_time_and_goes_on_where_it_stopped() -> None:
    world = World(Limits(piece_bytes=KIB, post_s=2e-3), post_s=1e-3)
    for name in "abc":
        world.add(name, [KIB] * 2)
    order: list[str] = []
    while len(world.line.reads) < 6:
        began, posted = world.clock(), len(world.line.reads)
        world.reads.advance()
        assert world.clock() - began <= 2.1e-3
        assert len(world.line.reads) > posted
        order += [world.owner(read) for read in world.line.reads[posted:]]
    assert order == ["a", "b", "c", "a", "b", "c"]


def test_what_may_not_be_written_yet_does_not_hold_up_the_others() -> None:
    world = World(Limits())
    world.add("free", [KIB])
    world.stream.queue()
    world.add("later", [KIB])
    world.reads.advance()
    assert [world.owner(read) for read in world.line.reads] == ["free"]
    world.stream.run()
    world.reads.advance()
    assert [world.owner(read) for read in world.line.reads] == ["free", "later"]


def test_a_failed_read_takes_what_waits_with_it_but_not_what_runs() -> None:
    world = World(Limits(in_flight_reads=2, piece_bytes=KIB))
    job = world.add("a", [KIB] * 5)
    world.reads.advance()
    first, second = world.line.in_flight
    world.finish(first, state=TransferState.FAILED)
    world.reads.advance()
    assert (job.error, job.ended_at) == ("broken", None)
    world.finish(second)
    world.reads.advance()
    assert job.ended_at is not None
    assert len(world.line.reads) == 2
    other = world.add("b", [KIB])  # what was lent to the failed read has come back
    world.reads.advance()
    assert len(world.line.in_flight) == 1
    assert other.posted_at is not None


@pytest.mark.parametrize("num_waiting", [1, 4])
def test_an_engine_that_is_gone_fails_its_jobs_and_no_others(num_waiting: int) -> None:
    world = World(Limits())
    world.line.lost.add("P")
    for number in range(num_waiting):
        world.add(f"p{number}", [KIB])
    world.add("q", [KIB], "Q")
    world.reads.advance()
    assert {job.error for name, job in world.jobs.items() if name != "q"} == {"P: gone"}
    assert world.jobs["q"].error is None
    assert len(world.line.in_flight) == 1


@pytest.mark.parametrize("sizes", [[1], [5] * 20, [3, 50, 1, 1, 90, 2], list(range(1, 40))])
@pytest.mark.parametrize(
    "limits", [Limits(), Limits(piece_bytes=10), Limits(piece_descriptors=3), Limits(piece_bytes=1)]
)
def test_pieces_are_the_same_runs_in_order(sizes: list[int], limits: Limits) -> None:
    copies = copies_of(sizes)
    pieces = cut_direct(copies, limits)
    for name in ("src", "dst", "num_bytes"):
        assert np.concatenate([getattr(piece, name) for piece in pieces]).tolist() == getattr(copies, name).tolist()
    for piece in pieces:
        assert len(piece) <= limits.piece_descriptors
        assert len(piece) == 1 or piece.total_bytes <= limits.piece_bytes
    for one, two in itertools.pairwise(pieces):  # none could take the next run as well
        full = len(one) == limits.piece_descriptors
        assert full or one.total_bytes + int(two.num_bytes[0]) > limits.piece_bytes
