"""Staged loads: the same bytes as direct ones, none read but of the request's pages, nothing reused too early."""

import dataclasses
import itertools
import os
import random
import subprocess
import sys

import numpy as np
import pytest

from hybrid_connector.core.blocks import BlockIds, RankLayout
from hybrid_connector.core.geometry import StateKind
from hybrid_connector.core.planning import plan_transfer
from hybrid_connector.engine.exchange import LoadOrder, LoadRecord
from hybrid_connector.engine.loads import Loads
from hybrid_connector.engine.reading import REFIT_EVERY, SEEN_WITHIN, Limits
from hybrid_connector.transport.base import Region, host_region
from hybrid_connector.transport.binding import Binder, Ints, Spans
from hybrid_connector.transport.cost import SCATTER, Cost, Staging, choose, is_staged
from hybrid_connector.transport.digest import host_digest
from hybrid_connector.transport.memory import Fabric, MemoryTransport
from hybrid_connector.transport.scatter import HostScatter, Rows, ScatterJob, word_bytes
from hybrid_connector.transport.staging import ALIGNMENT, Slot, StagingArea, cut

from fakes import Clock, Stream, engine_manifest
from layouts import Model, Storage, build_engine, place
from oracle import Request, are_untouched, expected, noise, prefilled, wrong_in

NUM_TOKENS = 40
LARGE = 1 << 20
SMALL = 1024
"""Chunks of 256 bytes: less than a page."""

FAMILIES = [
    Model(num_attention=2, num_kv_heads=4),
    Model(num_attention=2, num_kv_heads=1, num_recurrent=2, family="gdn", num_heads=4, num_groups=4),
    Model(num_attention=1, num_kv_heads=2, num_recurrent=2, family="mamba2", num_heads=4, num_groups=1),
    Model(num_attention=1, num_kv_heads=4, num_recurrent=2, family="mamba1", num_heads=4),
    Model(num_attention=1, num_kv_heads=4, num_recurrent=2, family="kda", num_heads=4),
    Model(num_attention=1, num_kv_heads=4, num_recurrent=2, family="short_conv", num_heads=4),
    Model(num_attention=1, num_kv_heads=4, num_recurrent=2, family="linear", num_heads=4),
]
STORAGES = [
    (Storage(page_tokens=4), Storage(page_tokens=4)),
    (Storage(page_tokens=4, order="NHD"), Storage(page_tokens=4, order="HND")),
    (Storage(page_tokens=4, channel_first=False), Storage(page_tokens=4)),
    (Storage(page_tokens=4), Storage(page_tokens=8, channel_first=False)),
    (Storage(page_tokens=8), Storage(page_tokens=4, pages_per_block=2)),
    (Storage(page_tokens=4, placement="block", page_padding=6), Storage(page_tokens=4, placement="block")),
    (Storage(page_tokens=4, placement="shared", page_padding=10), Storage(page_tokens=4, row_padding=2)),
    (Storage(page_tokens=4, order="LHBNC"), Storage(page_tokens=4)),
]
RANKS = [(1, 1), (2, 1), (1, 2), (1, 4), (4, 1)]


class DelayedScatter:
    """A device that copies when the test says so. ``begun``: what was asked for and has not run."""

    def __init__(self, num_bytes: int, caches: Region) -> None:
        self._host = HostScatter(num_bytes, caches)
        self.begun: list[tuple[Ints, Ints, Ints]] = []
        self.num_run = 0
        self.num_begun = 0

    @property
    def region(self) -> Region:
        return self._host.region

    def begin(self, src: Ints, dst: Ints, num_bytes: Ints) -> ScatterJob:
        self.begun.append((src, dst, num_bytes))
        self.num_begun += 1
        return _Job(self, self.num_begun)

    def run(self) -> None:
        for job in self.begun:
            self._host.begin(*job)
        self.num_run += len(self.begun)
        self.begun.clear()


class _Job:
    def __init__(self, scatter: DelayedScatter, number: int) -> None:
        self._scatter, self._number = scatter, number

    def has_ended(self) -> bool:
        return self._scatter.num_run >= self._number


class World:
    """One P and one D engine in this process. D's ranks stage as told; ``delayed``: on a device of the test's own."""

    def __init__(
        self,
        model: Model = FAMILIES[0],
        storages: tuple[Storage, Storage] = STORAGES[0],
        ranks: tuple[int, int] = (2, 1),
        *,
        use: Staging = "always",
        staging_bytes: int = LARGE,
        cached_tokens: int = 0,
        honest: bool = True,
        delayed: bool = False,
        cost: Cost | None = None,
    ) -> None:
        self.fabric, self.clock, self.stream = Fabric(), Clock(), Stream(honest)
        self.srcs, self.dsts = (
            build_engine(model, _with(storage, num)) for storage, num in zip(storages, ranks, strict=True)
        )
        self.request: Request = place(self.srcs, self.dsts, NUM_TOKENS, cached_tokens, seed=sum(ranks))
        self.received = [np.frombuffer(noise(f"D {d.rank}", d.region_bytes), np.uint8).copy() for d in self.dsts]
        self.sent = [np.frombuffer(prefilled(src, self.request), np.uint8).copy() for src in self.srcs]
        self.devices: list[DelayedScatter] = []
        self.areas: list[StagingArea] = []
        self._delayed = delayed
        self._transports = []
        self.loads = [
            self._loads(d, m, staging_bytes, use, cost) for d, m in zip(self.dsts, self.received, strict=True)
        ]
        for name in ("P", "Q"):
            self._meet(name)

    def _loads(self, dst: RankLayout, memory: np.ndarray, size: int, use: Staging, cost: Cost | None) -> Loads:
        transport = MemoryTransport(self.fabric, f"D.{dst.rank}")
        region = host_region(memory)
        transport.register(region)

        def make(num_bytes: int) -> HostScatter | DelayedScatter:
            if not self._delayed:
                return HostScatter(num_bytes, region)
            self.devices.append(DelayedScatter(num_bytes, region))
            return self.devices[-1]

        self.areas.append(StagingArea(size, make))
        return Loads(
            dst, region, transport, self.stream, self.clock, staging=self.areas[-1], use_staging=use, cost=cost
        )

    def _meet(self, engine: str) -> None:
        """Two engines that hold the same."""
        addresses, identities = [], []
        for src, memory in zip(self.srcs, self.sent, strict=True):
            transport = MemoryTransport(self.fabric, f"{engine}.{src.rank}")
            transport.register(host_region(memory))
            self._transports.append(transport)
            addresses.append(memory.ctypes.data)
            identities.append(transport.identity())
        manifest = engine_manifest(self.srcs, engine, "first", addresses=addresses, identities=identities)
        for loads in self.loads:
            loads.add_peer(manifest)

    def start(self, request_id: str = "r", engine: str = "P", *, verify: bool = False) -> None:
        request = self.request
        order = LoadOrder(
            request_id,
            f"remote-{request_id}",
            (engine, "first"),
            request.src_blocks,
            request.dst_blocks,
            request.num_tokens,
            request.cached_tokens,
            verify,
        )
        for loads in self.loads:
            loads.start(order)

    def poll(self) -> list[LoadRecord]:
        return [record for loads in self.loads for record in loads.poll()]

    def wrong(self) -> list[str]:
        """Where D's memory differs from what it must hold after the load."""
        return wrong_in(self.dsts, self.received, self.srcs, self.request)

    def is_untouched(self) -> bool:
        return are_untouched(self.dsts, self.received)

    def is_empty(self) -> bool:
        """Whether every slot has come back."""
        return all(area.num_free_bytes == area.chunk_bytes * 4 for area in self.areas)


def _with(storage: Storage, num_ranks: int) -> Storage:
    return dataclasses.replace(storage, num_ranks=num_ranks, max_tokens=NUM_TOKENS)


CASES = [
    (FAMILIES[(i + j) % len(FAMILIES)], storages, ranks)
    for i, (storages, ranks) in enumerate(itertools.product(STORAGES, RANKS))
    for j in (0, 3)
]
"""Every pair of storages at every pair of TP sizes, with two families each."""


@pytest.mark.parametrize(("model", "storages", "ranks"), CASES, ids=range(len(CASES)))
def test_staged_bytes_are_those_of_the_oracle_in_any_area(model, storages, ranks) -> None:
    moved = {}
    for size in (LARGE, SMALL):
        world = World(model, storages, ranks, staging_bytes=size)
        world.start()
        records = world.poll()
        assert [record.error for record in records] == [None] * len(world.dsts)
        assert world.wrong() == []
        assert world.is_empty()
        moved[size] = [(r.kind_bytes, r.staged_bytes, r.direct_bytes) for r in records]
    # A chunk that no run is in is left out, else a small area reads what a large one does.
    for large, small in zip(moved[LARGE], moved[SMALL], strict=True):
        assert small[0] == large[0]
        assert 0.5 * large[1] <= small[1] <= large[1]
        assert small[2] == large[2]
    direct = World(model, storages, ranks, use="never")
    direct.start()
    assert [r.staged_bytes for r in direct.poll()] == [0] * len(direct.dsts)
    assert all(map(np.array_equal, direct.received, world.received))


@pytest.mark.parametrize(
    ("number", "ranks", "what"),
    [
        (0, (1, 1), "nothing"),
        (0, (2, 1), "all"),  # a page of P is one run, but a part of D's
        (0, (1, 2), "all"),
        (1, (1, 1), "attention"),  # NHD to HND: a run per token and head
        (2, (1, 1), "recurrent"),  # SD to DS
        (3, (1, 1), "all"),  # pages of 4 tokens to pages of 8, and DS to SD
        (6, (1, 1), "attention"),  # rows with a gap after each
        (7, (1, 2), "recurrent"),  # a page's heads lie far apart, with other blocks between: not to be read whole
    ],
)
def test_what_is_staged(number, ranks, what) -> None:
    world = World(FAMILIES[1] if what == "recurrent" else FAMILIES[3], STORAGES[number], ranks)
    world.start()
    for record in world.poll():
        kinds = dict(record.kind_bytes)
        attention = kinds.pop(StateKind.ATTENTION)
        state = sum(kinds.values())
        direct = {"nothing": attention + state, "all": 0, "recurrent": attention, "attention": state}[what]
        assert record.direct_bytes == direct
        assert record.staged_bytes >= attention + state - direct


@pytest.mark.parametrize("ranks", RANKS, ids=str)
@pytest.mark.parametrize("cached_tokens", [8, 32, 40])
def test_of_a_prefix_hit_only_pages_of_the_rest_are_read(ranks, cached_tokens) -> None:
    world = World(FAMILIES[1], STORAGES[2], ranks, cached_tokens=cached_tokens)
    world.start()
    records = world.poll()
    assert [record.error for record in records] == [None] * len(world.dsts)
    assert world.wrong() == []
    whole = World(FAMILIES[1], STORAGES[2], ranks)
    whole.start()
    for part, full in zip(records, whole.poll(), strict=True):
        assert part.staged_bytes + part.direct_bytes < full.staged_bytes + full.direct_bytes


# What is read.


def own_bytes(src: RankLayout, blocks: BlockIds) -> np.ndarray:
    """Which bytes of P's rank belong to blocks of the request, by the formula of ``blocks`` alone."""
    own = np.zeros(src.region_bytes, bool)
    for layer in src.layers:
        ratio = src.groups[layer.group].pages_per_block
        for block in blocks[layer.group]:
            assert block is not None
            start = layer.offset + block * ratio * layer.page_stride
            own[start : start + ratio * layer.page_stride] = True
    return own


@pytest.mark.parametrize("ranks", RANKS, ids=str)
@pytest.mark.parametrize("storages", STORAGES, ids=range(len(STORAGES)))
def test_only_the_requests_own_pages_are_read(storages, ranks) -> None:
    """Padding of a page may be; another request's block never."""
    for model in FAMILIES:
        world = World(model, storages, ranks)
        layouts = {src.rank: src for src in world.srcs}
        for dst in world.dsts:
            binder = Binder(plan_transfer(dst, world.srcs), dst, world.srcs)
            for parts in binder.bind_parts(world.request.src_blocks, world.request.dst_blocks, NUM_TOKENS):
                src = layouts[parts[0].copies.src_rank]
                own = own_bytes(src, world.request.src_blocks)
                for part in parts:
                    if (pages := part.pages()) is not None:
                        read = np.zeros(src.region_bytes, bool)
                        for start, size in zip(pages.starts.tolist(), pages.num_bytes.tolist(), strict=True):
                            read[start : start + size] = True
                        assert not (read & ~own).any()
                        assert read.sum() == pages.total_bytes  # disjoint


def test_a_union_holds_each_byte_once() -> None:
    rng = random.Random(3)
    for _ in range(200):
        ranges = [(start := rng.randrange(60), start + rng.randint(1, 12)) for _ in range(rng.randint(1, 9))]
        spans = Spans.union(*(np.array(column, np.int64) for column in zip(*ranges, strict=True)))
        held = [range(a, a + n) for a, n in zip(spans.starts.tolist(), spans.num_bytes.tolist(), strict=True)]
        assert sorted(itertools.chain(*held)) == sorted({byte for a, b in ranges for byte in range(a, b)})
        assert all(first.stop < second.start for first, second in itertools.pairwise(held))


@pytest.mark.parametrize("chunk_bytes", [64, 128, 448, 4096, 1 << 20])
def test_chunks_hold_every_run_once_at_ps_alignment(chunk_bytes) -> None:
    world = World(FAMILIES[3], STORAGES[2], (1, 2))
    dst = world.dsts[1]
    binder = Binder(plan_transfer(dst, world.srcs), dst, world.srcs, src_bases={0: 4096 + 6}, dst_base=1 << 40)
    (parts,) = binder.bind_parts(world.request.src_blocks, world.request.dst_blocks, NUM_TOKENS)
    (copies,) = binder.bind(world.request.src_blocks, world.request.dst_blocks, NUM_TOKENS)
    chunks = cut(parts, chunk_bytes)
    assert len(chunks) > 1 or chunk_bytes > 448
    origin = {}
    for chunk in chunks:
        assert chunk.num_bytes <= chunk_bytes
        assert ((chunk.page_at - chunk.page_src) % ALIGNMENT == 0).all()
        at = {}
        for src, place_, size in zip(chunk.page_src, chunk.page_at, chunk.page_bytes, strict=True):
            at |= {int(place_) + i: int(src) + i for i in range(size)}
        assert len(at) == chunk.page_bytes.sum()
        for src, place_, to, size in zip(chunk.run_src, chunk.run_at, chunk.run_dst, chunk.run_bytes, strict=True):
            for i in range(size):
                assert at[place_ + i] == src + i
                assert to + i not in origin
                origin[int(to) + i] = int(src) + i
    columns = (copies.src.tolist(), copies.dst.tolist(), copies.num_bytes.tolist())
    want = {to + i: src + i for src, to, size in zip(*columns, strict=True) for i in range(size)}
    assert origin == want


def test_slots_are_disjoint_and_come_back() -> None:
    area = StagingArea(LARGE, lambda size: HostScatter(size, host_region(np.zeros(64, np.uint8))))
    rng = random.Random(5)
    taken: list[Slot] = []
    refused = 0
    for _ in range(2000):
        if taken and rng.random() < 0.5:
            area.give_back(taken.pop(rng.randrange(len(taken))))
        elif (slot := area.take(rng.randint(1, area.chunk_bytes))) is not None:
            assert slot.offset % ALIGNMENT == 0
            assert slot.offset + slot.num_bytes <= LARGE
            taken.append(slot)
        else:
            refused += 1
        order = sorted(taken, key=lambda slot: slot.offset)
        assert all(a.offset + a.num_bytes <= b.offset for a, b in itertools.pairwise(order))
        assert area.num_free_bytes == LARGE - sum(slot.num_bytes for slot in taken)
    assert refused
    for slot in taken:
        area.give_back(slot)
    assert area.take(LARGE) == Slot(0, LARGE)


# Order (I5) and early reuse (I3).


def test_pages_are_read_at_once_but_scattered_after_work_queued_before() -> None:
    for honest in (True, False):
        world = World(honest=honest)
        world.stream.queue(lambda world=world: [memory.fill(0x51) for memory in world.received])
        world.start()
        records = world.poll()
        assert bool(records) is not honest
        assert world.is_untouched() is honest
        assert world.is_empty() is not honest  # the pages have landed and wait
        world.stream.run()
        records += world.poll()
        assert [record.error for record in records] == [None]
        ((dst, memory),) = zip(world.dsts, world.received, strict=True)
        want = expected(dst, world.srcs, world.request)
        written = np.frombuffer(want.counts, np.uint8) == 1
        is_right = (memory[written] == np.frombuffer(want.data, np.uint8)[written]).all()
        assert is_right == honest  # marks that lie: the queued kernel wins, so the test can tell


def test_a_load_ends_with_its_last_scatter_and_slots_are_not_reused_before() -> None:
    world = World(delayed=True, staging_bytes=SMALL)
    world.start()
    records, rounds = [], 0
    (device,) = world.devices
    (area,) = world.areas
    seen = 0
    while not records:
        assert rounds < 100
        assert len(world.loads[0]) == 1
        records += world.poll()
        held = [(int(src.min()), int((src + size).max())) for src, _, size in device.begun]
        assert all(a[1] <= b[0] or b[1] <= a[0] for a, b in itertools.combinations(held, 2))
        if device.begun:
            assert area.num_free_bytes < SMALL
        seen = max(seen, len(device.begun))
        device.run()
        rounds += 1
    assert seen >= 3  # several chunks at a time
    assert rounds >= 3  # and several rounds
    assert [record.error for record in records] == [None]
    assert world.wrong() == []
    assert world.is_empty()


def see_through(world: World, rounds: int = 50) -> list[LoadRecord]:
    """Poll, and let the device work, until nothing more can come of it."""
    records = []
    for _ in range(rounds):
        records += world.poll()
        for device in world.devices:
            device.run()
    return records


@pytest.mark.parametrize("after_bytes", [0, 100])
def test_one_of_several_staged_reads_fails_and_the_load_ends_with_the_others(after_bytes) -> None:
    world = World(ranks=(4, 1), delayed=True)
    world.fabric.fail_next(after_bytes, peer="P.1")
    world.fabric.hold("P.2")
    world.start()
    assert see_through(world) == []
    assert len(world.loads[0]) == 1
    assert not world.is_empty()
    world.fabric.release()
    assert [record.error for record in world.poll()] == [f"P.1: failed on purpose after {after_bytes} bytes"]
    assert world.devices[0].num_begun == 1  # of rank 0; what came from rank 2 and 3 is of no use any more
    assert world.is_empty()


@pytest.mark.parametrize("size", [LARGE, SMALL])
def test_a_failure_in_the_middle_costs_its_request_only(size) -> None:
    world = World(ranks=(4, 1), staging_bytes=size, delayed=True)
    world.fabric.fail_next(10, peer="P.2")
    world.start("a")
    assert [record.error for record in see_through(world)] == ["P.2: failed on purpose after 10 bytes"]
    assert world.is_empty()
    world.start("b")
    assert [record.error for record in see_through(world)] == [None]
    assert world.wrong() == []


def test_a_peer_that_goes_in_the_middle_of_a_staged_load() -> None:
    world = World(staging_bytes=SMALL, delayed=True)
    world.start()
    world.poll()
    world.loads[0].forget_peer(("P", "first"))
    records = []
    for _ in range(5):
        world.devices[0].run()
        records += world.poll()
    assert [record.error for record in records] == ["engine P restarted before the read was posted"]
    assert world.is_empty()


def test_a_scatter_that_cannot_begin_costs_its_request_only() -> None:
    world = World(delayed=True)
    (device,) = world.devices
    begin = device.begin
    device.begin = lambda *runs: 1 / 0  # type: ignore[method-assign]
    world.start("a")
    assert [r.error for r in world.poll()] == ["what was staged cannot be scattered: division by zero"]
    assert world.is_untouched()
    assert world.is_empty()
    device.begin = begin  # type: ignore[method-assign]
    world.start("b")
    world.poll()
    device.run()
    assert [r.error for r in world.poll()] == [None]
    assert world.wrong() == []


def test_drain_waits_for_reads_and_scatters_and_begins_none() -> None:
    world = World(staging_bytes=SMALL, delayed=True)
    world.start()
    world.poll()
    begun = world.devices[0].num_begun
    assert begun
    assert world.loads[0].drain() == 1
    world.devices[0].run()
    assert world.loads[0].drain() == 0
    assert world.devices[0].num_begun == begun
    assert world.is_empty()


# Areas that cannot be had, or are full.


def test_without_memory_for_an_area_everything_is_read_directly(caplog) -> None:
    def make(size: int) -> HostScatter:
        raise MemoryError("nothing left")

    world = World()
    loads = Loads(
        world.dsts[0],
        world.loads[0]._region,
        world.loads[0]._transport,
        world.stream,
        world.clock,
        staging=StagingArea(LARGE, make),
        use_staging="always",
    )
    for peer in world.loads[0]._peers.values():
        loads.add_peer(peer.manifest)
    said = [record.message for record in caplog.records]
    assert said == [f"no staging area of {LARGE} bytes, everything is read directly: nothing left"]
    world.loads = [loads]
    world.start()
    (record,) = world.poll()
    assert (record.error, record.staged_bytes) == (None, 0)
    assert world.wrong() == []


def test_where_no_slot_comes_free_the_runs_are_read_directly() -> None:
    """P stands still and holds the area; Q is not to suffer from it."""
    world = World(staging_bytes=SMALL)
    world.fabric.hold("P.0")
    world.fabric.hold("P.1")
    world.start("slow", "P")
    world.poll()
    world.start("r", "Q")
    assert world.poll() == []
    world.clock.advance(Limits().patience_s / 2)
    assert world.poll() == []
    world.clock.advance(Limits().patience_s)
    (record,) = world.poll()
    assert (record.request_id, record.error, record.staged_bytes) == ("r", None, 0)
    assert world.wrong() == []
    world.fabric.release()
    assert [record.request_id for record in world.poll()] == ["slow"]
    assert world.is_empty()


def test_a_chunk_that_waits_for_the_compute_stream_does_not_lose_its_patience() -> None:
    """Its own chunks hold the area until the step in flight has ended, however long that takes."""
    world = World(staging_bytes=SMALL)
    world.stream.queue()
    world.start()
    for _ in range(5):
        assert world.poll() == []
        world.clock.advance(Limits().patience_s)
    world.stream.run()
    (record,) = world.poll()
    assert (record.error, record.direct_bytes) == (None, 0)
    assert world.wrong() == []


def test_engines_with_the_same_pages_take_no_area() -> None:
    world = World(ranks=(1, 1))
    assert [area.scatter for area in world.areas] == [None]


# Verification and the choice.


@pytest.mark.parametrize("size", [LARGE, SMALL])
def test_digests_are_of_the_runs_in_place(size) -> None:
    for flip in (False, True):
        world = World(FAMILIES[1], STORAGES[2], (1, 2), staging_bytes=size)
        world.start(verify=True)
        found = []
        if flip:  # the first byte of some run, in every page read
            for at in range(40):
                world.fabric.flip_next(at * 7)
        records = world.poll()
        assert [record.error for record in records] == [None, None]
        assert all(record.staged_bytes for record in records)
        for record in records:
            assert sum(digest.src.total_bytes for digest in record.digests) == record.num_bytes
            found += [host_digest(world.sent[d.src_rank], d.src) == d.digest for d in record.digests]
        assert all(found) is not flip
        assert (world.wrong() == []) is not flip


@pytest.mark.parametrize("ranks", RANKS, ids=str)
def test_the_engines_short_cut_says_what_explain_says(ranks) -> None:
    rng = random.Random(sum(ranks))
    counts = {True: 0, False: 0}
    for model, storages in itertools.product(FAMILIES, STORAGES):
        world = World(model, storages, ranks)
        for dst in world.dsts:
            binder = Binder(plan_transfer(dst, world.srcs), dst, world.srcs)
            for parts in binder.bind_parts(world.request.src_blocks, world.request.dst_blocks, NUM_TOKENS):
                for part in parts:
                    transfer = Cost(0.0, 10 ** rng.uniform(-9, -5), 10 ** rng.uniform(7, 11))
                    picked = is_staged(part, transfer, SCATTER["VRAM"])
                    assert picked == choose(part, transfer, SCATTER["VRAM"]).is_staged
                    counts[picked] += 1
                    assert not is_staged(part, transfer, SCATTER["VRAM"], "never")
                    assert is_staged(part, transfer, SCATTER["VRAM"], "always") == (part.pages() is not None)
    assert counts[False]
    assert counts[True] or ranks == (1, 1)


def test_auto_follows_the_cost() -> None:
    for per_descriptor_s, staged in ((1e-3, True), (1e-9, False)):
        world = World(use="auto", cost=Cost(0.0, per_descriptor_s, 1e10))
        world.start()
        (record,) = world.poll()
        assert bool(record.staged_bytes) is staged
        assert world.wrong() == []


def test_an_engine_learns_from_reads_whose_end_it_saw() -> None:
    """Each read takes 1 ms and is looked at every 0.1 ms; or not at all in between, which tells nothing."""
    for between, learns in ((10, True), (1, False)):
        world = World(use="auto", cost=Cost(0.0, 1e-3, 1e10))
        for number in range(20):
            world.fabric.hold()
            world.start(f"{number}")
            for _ in range(between):
                world.poll()
                world.clock.advance(1e-3 / between)
            world.fabric.release()
            (record,) = world.poll()
        peer = world.loads[0]._peers["P", "first"]
        assert 1 / 10 < SEEN_WITHIN < 1
        assert (peer.cost(0) != peer.start) is learns
        if learns:
            assert len(peer.estimates[0]) == 19  # the first read set up the connection
            read = record.num_descriptors // 2, (record.direct_bytes + record.staged_bytes) // 2  # of either rank
            assert peer.cost(0).seconds(*read) == pytest.approx(1e-3, rel=0.3)


def test_a_few_readings_and_the_first_after_a_failure_say_nothing() -> None:
    world = World()
    peer = world.loads[0]._peers["P", "first"]
    for seen in range(REFIT_EVERY + 2):
        assert len(peer.estimates.get(0, ())) == max(0, seen - 1)
        assert (peer.cost(0) != peer.start) is (seen > REFIT_EVERY)
        peer.note(0, 10, 1 << 20, 1e-3)
    world.fabric.fail_next(peer="P.0")
    world.start()
    world.poll()
    before = len(peer.estimates[0])
    for _ in range(2):
        peer.note(0, 10, 1 << 20, 1e-3)
    assert len(peer.estimates[0]) == before + 1


# Scatter.


def test_words_are_as_long_as_addresses_and_lengths_allow() -> None:
    for value, size in ((64, 8), (12, 4), (6, 2), (5, 1), (0, 8)):
        assert word_bytes(64, np.array([64, value]), np.array([8])) == size
    assert word_bytes(4, np.array([64])) == 4


def made_runs(seed: int, unit: int) -> tuple[Ints, Ints, Ints, int, int]:
    """Random runs of few and of many lengths, in random order on both sides."""
    rng = random.Random(seed)
    lengths = [unit * rng.choice([1, 3, 7, 128, 2000, 9000, rng.randint(1, 5000)]) for _ in range(60)]
    places = []
    for _ in range(2):
        order, start, at = rng.sample(range(60), 60), 0, {}
        for i in order:
            start += unit * rng.randint(0, 5)
            at[i] = start
            start += lengths[i]
        places.append((np.array([at[i] for i in range(60)], np.int64), start))
    (src, src_size), (dst, dst_size) = places
    return src, dst, np.array(lengths, np.int64), src_size, dst_size


@pytest.mark.parametrize("unit", [1, 2, 4, 8])
def test_runs_are_scattered_and_nothing_else(unit) -> None:
    for seed in range(5):
        src, dst, num_bytes, src_size, dst_size = made_runs(seed, unit)
        caches = np.full(dst_size + 3, 0xEE, np.uint8)
        scatter = HostScatter(src_size, host_region(caches))
        staged = scatter._staged
        staged[:] = np.frombuffer(noise("staged", src_size), np.uint8)
        want = caches.copy()
        for s, d, n in zip(src.tolist(), dst.tolist(), num_bytes.tolist(), strict=True):
            want[d : d + n] = staged[s : s + n]
        assert scatter.begin(src, dst, num_bytes).has_ended()
        assert np.array_equal(caches, want)


def scatter_rows(unit: int, kernel: str) -> None:
    """Runs cut into rows, by a kernel for GPUs on memory of the host, against `HostScatter`."""
    import torch

    from hybrid_connector.transport.scatter import as_words, torch_copy_rows

    if kernel == "triton":
        from hybrid_connector.transport.scatter_kernel import copy_rows
    else:
        copy_rows = torch_copy_rows
    src, dst, num_bytes, src_size, dst_size = made_runs(unit, unit)
    caches = np.full(dst_size + 8, 0xEE, np.uint8)
    scatter = HostScatter(src_size, host_region(caches))
    scatter._staged[:] = np.frombuffer(noise("staged", src_size), np.uint8)
    scatter.begin(src, dst, num_bytes)
    other = torch.full((dst_size + 8,), 0xEE, dtype=torch.uint8)
    rows = Rows.of(0, src, dst, num_bytes)
    assert rows.word_bytes == unit
    assert (len(rows.table) > 60) == (unit == 8)  # only there are runs longer than a row
    staged = torch.from_numpy(scatter._staged.copy())
    copy_rows(as_words(staged, unit), as_words(other, unit), torch.from_numpy(rows.table))
    assert np.array_equal(other.numpy(), caches)


@pytest.mark.parametrize("unit", [1, 2, 4, 8])
def test_torch_scatters_the_same_rows(unit) -> None:
    pytest.importorskip("torch")
    scatter_rows(unit, "torch")


def test_the_kernel_scatters_the_same_rows() -> None:
    """In Triton's interpreter, which a process has or has not from its start."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    code = "import test_staging\nfor unit in (1, 2, 4, 8): test_staging.scatter_rows(unit, 'triton')"
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
