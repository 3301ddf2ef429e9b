"""D's loads: the right bytes, in the right order, and no block given back too early (invariants I1, I3, I5)."""

import dataclasses
import logging
from collections.abc import Callable

import numpy as np
import pytest

from hybrid_connector.core.blocks import RankLayout
from hybrid_connector.core.geometry import StateKind
from hybrid_connector.engine.exchange import BlockIds, LoadOrder, LoadRecord
from hybrid_connector.engine.loads import Loads
from hybrid_connector.transport.base import host_region
from hybrid_connector.transport.memory import Fabric, MemoryTransport
from hybrid_connector.wire.manifest import EngineManifest

from fakes import Clock, Stream, engine_manifest
from layouts import Model, Storage, build_engine, edited, place
from oracle import Request, are_untouched, expected, noise, prefilled, wrong_in

HYBRID = Model(num_attention=1, num_kv_heads=4, num_recurrent=3, family="gdn", num_heads=4, num_groups=4)
NUM_TOKENS = 40
PAGE_TOKENS = 4


def storage(num_ranks: int) -> Storage:
    return Storage(num_ranks=num_ranks, page_tokens=PAGE_TOKENS, max_tokens=NUM_TOKENS)


class World:
    """One P and one D engine in this process, with a request's state in P's memory and noise in D's.

    Transports are named ``P.first.0`` (engine, incarnation, rank) and ``D.0``.
    """

    def __init__(
        self, p_ranks: int = 1, d_ranks: int = 1, *, cached_tokens: int = 0, honest: bool = True, model: Model = HYBRID
    ) -> None:
        self.fabric = Fabric()
        self.clock = Clock()
        self.stream = Stream(honest)
        self.srcs = build_engine(model, storage(p_ranks))
        self.dsts = build_engine(model, storage(d_ranks))
        self.request: Request = place(self.srcs, self.dsts, NUM_TOKENS, cached_tokens)
        self.kept: list[object] = []  # memory and transports, for as long as somebody may read
        self.loaded: list[tuple[LoadOrder, LoadRecord]] = []
        self.received = [np.frombuffer(noise(f"D {d.rank}", d.region_bytes), np.uint8).copy() for d in self.dsts]
        self.loads = [self.make_loads(d, r) for d, r in zip(self.dsts, self.received, strict=True)]
        self.manifest = self.start_prefill("first")

    def make_loads(self, layout: RankLayout, memory: np.ndarray) -> Loads:
        transport = MemoryTransport(self.fabric, f"D.{layout.rank}")
        region = host_region(memory)
        transport.register(region)
        on_loaded = self.note_loaded
        return Loads(layout, region, transport, self.stream, self.clock, on_loaded)

    def note_loaded(self, order: LoadOrder, record: LoadRecord) -> None:
        self.loaded.append((order, record))

    def start_prefill(self, incarnation: str) -> EngineManifest:
        """Start P (again), which D then knows, and what was there before is gone."""
        addresses, identities = [], []
        for src in self.srcs:
            memory = np.frombuffer(prefilled(src, self.request), np.uint8).copy()
            transport = MemoryTransport(self.fabric, f"P.{incarnation}.{src.rank}")
            transport.register(host_region(memory))
            self.kept += [memory, transport]
            addresses.append(memory.ctypes.data)
            identities.append(transport.identity())
        manifest = engine_manifest(self.srcs, "P", incarnation, addresses=addresses, identities=identities)
        for loads in self.loads:
            if incarnation != "first":
                loads.forget_peer(("P", "first"))
            loads.add_peer(manifest)
        return manifest

    def order(self, request_id: str = "r", **changes: object) -> LoadOrder:
        order = LoadOrder(
            request_id,
            f"remote-{request_id}",
            ("P", "first"),
            self.request.src_blocks,
            self.request.dst_blocks,
            self.request.num_tokens,
            self.request.cached_tokens,
        )
        return dataclasses.replace(order, **changes)  # type: ignore[arg-type]

    def start(self, request_id: str = "r", **changes: object) -> None:
        for loads in self.loads:
            loads.start(self.order(request_id, **changes))

    def poll(self) -> list[LoadRecord]:
        return [record for loads in self.loads for record in loads.poll()]

    def wrong(self) -> list[str]:
        """Where D's memory differs from what it must hold after the load; nothing where it is right."""
        return wrong_in(self.dsts, self.received, self.srcs, self.request)

    def is_untouched(self) -> bool:
        return are_untouched(self.dsts, self.received)

    def fill_block(self, group: int, block: int, value: int) -> Callable[[], None]:
        """A kernel that writes ``value`` into all pages of a block of D, where and when it is run."""

        def run() -> None:
            for dst, memory in zip(self.dsts, self.received, strict=True):
                ratio = dst.groups[group].pages_per_block
                for layer in (layer for layer in dst.layers if layer.group == group):
                    for page in range(block * ratio, (block + 1) * ratio):
                        start = layer.offset + page * layer.page_stride
                        memory[start : start + layer.page_stride] = value

        return run


def groups_of(layout: RankLayout) -> tuple[int, int]:
    """The numbers of the attention and of the recurrent group."""
    paged = [group.page_tokens is not None for group in layout.groups]
    return paged.index(True), paged.index(False)


PAIRS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (4, 2)]


@pytest.mark.parametrize(("p_ranks", "d_ranks"), PAIRS)
def test_the_right_bytes_arrive(p_ranks: int, d_ranks: int) -> None:
    world = World(p_ranks, d_ranks)
    world.start()
    records = world.poll()
    assert [(record.request_id, record.rank, record.error) for record in records] == [
        ("r", rank, None) for rank in range(d_ranks)
    ]
    assert world.wrong() == []
    for dst, record in zip(world.dsts, records, strict=True):
        assert record.num_bytes == sum(expected(dst, world.srcs, world.request).counts)
        assert record.num_descriptors > 0
    assert world.loaded == [(world.order(), record) for record in records]
    assert world.poll() == []
    assert [len(loads) for loads in world.loads] == [0] * d_ranks


@pytest.mark.parametrize(("p_ranks", "d_ranks"), PAIRS)
@pytest.mark.parametrize("cached_pages", [3, 9, 10])
def test_of_a_prefix_hit_only_the_rest_moves_and_the_state_once(p_ranks: int, d_ranks: int, cached_pages: int) -> None:
    world = World(p_ranks, d_ranks, cached_tokens=cached_pages * PAGE_TOKENS)
    world.start()
    records = world.poll()
    assert world.wrong() == []
    full = World(p_ranks, d_ranks)
    full.start()
    for record, whole in zip(records, full.poll(), strict=True):
        kinds, all_kinds = dict(record.kind_bytes), dict(whole.kind_bytes)
        left = all_kinds.pop(StateKind.ATTENTION) * (10 - cached_pages) // 10
        assert kinds == all_kinds | ({StateKind.ATTENTION: left} if left else {})


def test_a_local_prefix_that_ends_inside_a_page_fails_the_load() -> None:
    world = World()
    world.start(first_tokens=PAGE_TOKENS + 1)
    (record,) = world.poll()
    assert record.error == f"first_tokens {PAGE_TOKENS + 1} is no multiple of D's page of {PAGE_TOKENS} tokens"
    assert world.is_untouched()


def test_times_are_told_from_the_order_and_from_the_post() -> None:
    world = World()
    world.stream.queue()
    world.fabric.hold()
    world.start()
    world.clock.advance(2.0)
    world.stream.run()
    assert world.poll() == []
    world.clock.advance(3.0)
    world.fabric.release()
    (record,) = world.poll()
    assert (record.post_s, record.transfer_s) == (2.0, 3.0)


# I5: what was queued before comes first.


@pytest.mark.parametrize("kind", ["attention", "recurrent"])
@pytest.mark.parametrize("value", [0, 0x51])
@pytest.mark.parametrize("honest", [True, False])
def test_work_queued_before_a_load_cannot_overwrite_it(kind: str, value: int, honest: bool) -> None:
    """Cases 4 and 5: a step still in flight writes Q's state into a block, or a kernel zeroes it, and R loads into it.

    With marks that do not wait for the device the same ends in wrong bytes, so the test can tell.
    """
    world = World(honest=honest)
    group = groups_of(world.dsts[0])[kind == "recurrent"]
    world.stream.queue()
    world.stream.queue(world.fill_block(group, world.request.dst_blocks[group][0], value))
    world.start()
    records = []
    for _ in range(2):
        records += world.poll()
        assert bool(records) is not honest
        assert world.is_untouched() is honest
        world.stream.run(1)
    records += world.poll()
    assert [record.error for record in records] == [None]
    if honest:
        assert world.wrong() == []
    else:
        assert world.wrong()[0].startswith("not the byte of this coordinate")


def test_work_queued_after_a_load_does_not_hold_it_up() -> None:
    world = World()
    world.stream.queue()
    world.start("r")
    world.stream.queue()
    world.start("later", dst_block_ids=world.request.dst_blocks)
    world.stream.run(1)
    assert [record.request_id for record in world.poll()] == ["r"]
    world.stream.run()
    assert [record.request_id for record in world.poll()] == ["later"]


# I3: a load has ended when all its reads have.


def test_one_of_several_reads_fails_and_the_blocks_stay_taken_until_all_ended() -> None:
    """Case 6."""
    world = World(p_ranks=4)
    peers = [f"P.first.{rank}" for rank in range(4)]
    world.fabric.fail_next(100, peer=peers[0])
    for peer in peers[1:]:
        world.fabric.hold(peer)
    world.start()
    for peer in peers[1:]:
        assert world.poll() == []
        assert len(world.loads[0]) == 1
        world.fabric.release(peer)
    (record,) = world.poll()
    assert record.error == "P.first.0: failed on purpose after 100 bytes"
    assert record.num_bytes == 0
    assert world.poll() == []
    assert len(world.loads[0]) == 0
    assert world.loaded == []


@pytest.mark.parametrize("first", range(4))
def test_of_several_failures_one_is_named(first: int) -> None:
    world = World(p_ranks=4)
    for rank in (first, *(rank for rank in range(4) if rank != first)):
        world.fabric.fail_next(rank, peer=f"P.first.{rank}")
        world.fabric.hold(f"P.first.{rank}")
    world.start()
    world.poll()
    world.fabric.release(f"P.first.{first}")
    world.poll()
    world.fabric.release()
    (record,) = world.poll()
    assert record.error == f"P.first.{first}: failed on purpose after {first} bytes"


def test_a_read_that_cannot_be_posted_waits_for_those_that_were() -> None:
    world = World(p_ranks=4)
    world.fabric.vanish("P.first.2")
    world.fabric.hold("P.first.0")
    world.start()
    assert world.poll() == []
    assert len(world.loads[0]) == 1
    world.fabric.release()
    (record,) = world.poll()
    assert record.error == "P.first.2: not in this process, or gone"


def test_after_a_failed_read_the_peer_is_read_from_again() -> None:
    """Case 2: one error costs one request, not the peer."""
    world = World(p_ranks=2)
    world.fabric.fail_next(peer="P.first.1")
    world.start()
    (record,) = world.poll()
    assert record.error == "P.first.1: failed on purpose after 0 bytes"
    world.start()
    (record,) = world.poll()
    assert record.error is None
    assert world.wrong() == []


def test_loads_end_apart_from_each_other() -> None:
    world = World(p_ranks=2)
    world.fabric.fail_next(peer="P.first.0")
    world.start("a")
    world.poll()
    world.fabric.hold("P.first.1")
    world.start("b")
    world.loads[0].fail("c", "no grant")
    assert [(record.request_id, record.error) for record in world.poll()] == [("c", "no grant")]
    world.fabric.release()
    assert [(record.request_id, record.error) for record in world.poll()] == [("b", None)]


def test_a_request_is_loaded_once_at_a_time() -> None:
    world = World()
    world.fabric.hold()
    world.start()
    with pytest.raises(AssertionError, match="r: its last load has not ended yet"):
        world.start()


def test_a_failure_is_reported_once_with_its_reason_and_rank() -> None:
    world = World(d_ranks=2)
    for loads in world.loads:
        loads.fail("r", "the lease ran out")
    assert world.poll() == [LoadRecord("r", rank, error="the lease ran out") for rank in range(2)]
    assert world.poll() == []


# Peers that restart, vanish, are unknown or do not fit.


def test_an_unknown_engine_fails_the_load() -> None:
    world = World()
    world.start(peer=("Q", "first"))
    assert [record.error for record in world.poll()] == ["engine Q restarted after it granted the lease"]


def test_a_peer_that_restarted_before_the_order_fails_the_load() -> None:
    world = World()
    world.start_prefill("second")
    world.start("old")
    world.start("new", peer=("P", "second"))
    errors = {record.request_id: record.error for record in world.poll()}
    assert errors == {"old": "engine P restarted after it granted the lease", "new": None}
    assert world.wrong() == []


def test_a_peer_that_restarts_before_the_read_is_posted_fails_the_load() -> None:
    world = World()
    world.stream.queue()
    world.start()
    world.start_prefill("second")
    assert world.poll() == []
    world.stream.run()
    assert [record.error for record in world.poll()] == ["engine P restarted before the read was posted"]
    assert world.is_untouched()


def test_reads_under_way_run_on_when_their_peer_is_forgotten() -> None:
    world = World(p_ranks=2)
    world.fabric.hold()
    world.start()
    world.poll()
    world.start_prefill("second")
    world.fabric.vanish("P.first.1")
    world.fabric.release("P.first.0")
    assert world.poll() == []
    world.fabric.release()
    assert [record.error for record in world.poll()] == ["P.first.1: gone"]
    world.start(peer=("P", "second"))
    assert [record.error for record in world.poll()] == [None]
    assert world.wrong() == []


def test_a_peer_may_be_named_twice() -> None:
    world = World()
    world.fabric.hold()
    world.start()
    world.poll()
    world.loads[0].add_peer(world.manifest)
    world.fabric.release()
    assert [record.error for record in world.poll()] == [None]


def test_a_peer_that_cannot_be_read_from_fails_its_loads_with_the_reason() -> None:
    """The scheduler has compared geometry before; a worker must survive all the same, and the peer's next start too."""
    world = World()
    ranks = world.manifest.ranks
    places = {"addresses": [r.region_address for r in ranks], "identities": [r.identity for r in ranks]}
    other = [edited(src, "layers.0.attn.kv", dtype="float16") for src in world.srcs]
    world.loads[0].add_peer(engine_manifest(other, "Q", "first", **places))
    world.start("a", peer=("Q", "first"))
    world.start("b")
    errors = {record.request_id: record.error for record in world.poll()}
    assert errors == {
        "a": "engine Q cannot be read from: layers.0.attn.kv: element type is float16 on P, bfloat16 on D",
        "b": None,
    }
    world.loads[0].forget_peer(("Q", "first"))
    world.loads[0].add_peer(engine_manifest(world.srcs, "Q", "second", **places))
    world.start("c", peer=("Q", "second"))
    world.start("d", peer=("Q", "first"))
    errors = {record.request_id: record.error for record in world.poll()}
    assert errors == {"c": None, "d": "engine Q restarted after it granted the lease"}


def with_ids(ids: BlockIds, group: int, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> BlockIds:
    return tuple(change(blocks) if i == group else blocks for i, blocks in enumerate(ids))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda ids: (*ids[:-1], 13), "P group 0: expected block ids in [0, 13), got 13 at 9"),
        (lambda ids: (2**31 - 1, *ids[1:]), "P group 0: expected block ids in [0, 13), got 2147483647 at 0"),
        (lambda ids: (-1, *ids[1:]), "P group 0: expected block ids in [0, 13), got -1 at 0"),
        (lambda ids: ids[1:], "P group 0: 40 tokens need 10 block ids, got 9"),
        (lambda ids: (*ids, 0), "P group 0: 40 tokens need 10 block ids, got 11"),
        (lambda ids: (), "P group 0: 40 tokens need 10 block ids, got 0"),
    ],
)
def test_block_ids_that_do_not_fit_cost_their_request_only(
    change: Callable[[tuple[int, ...]], tuple[int, ...]], problem: str
) -> None:
    world = World()
    world.start("bad", src_block_ids=with_ids(world.request.src_blocks, 0, change))
    world.start("good")
    errors = {record.request_id: record.error for record in world.poll()}
    assert errors == {"bad": problem, "good": None}
    assert world.wrong() == []


def test_a_missing_group_and_a_wrong_token_count_cost_their_request_only() -> None:
    world = World()
    world.start("a", src_block_ids=world.request.src_blocks[:1])
    world.start("b", num_tokens=0)
    world.start("c", num_tokens=2**31 - 1)
    world.start("d", dst_block_ids=with_ids(world.request.dst_blocks, 0, lambda ids: (ids[1], *ids[1:])))
    errors = [record.error for record in world.poll()]
    assert errors[:2] == [
        "P: expected block ids for 2 groups, got 1",
        "P holds 0 tokens, D already has 0: expected 0 <= D <= P, P > 0",
    ]
    assert errors[2] == "D group 0: 2147483647 tokens need 536870912 block ids, got 10"
    assert errors[3] is not None
    assert errors[3].startswith("D's block ids put two pages at address")
    assert world.is_untouched()


def test_who_looks_on_cannot_keep_a_load_from_being_reported(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    broken = Loads(
        world.dsts[0],
        world.loads[0]._region,
        world.loads[0]._transport,
        world.stream,
        world.clock,
        on_loaded=lambda order, record: 1 / 0,
    )
    broken.add_peer(world.manifest)
    broken.start(world.order())
    with caplog.at_level(logging.ERROR):
        assert [record.error for record in broken.poll()] == [None]
    assert "request r, rank 0: after the load" in caplog.text


def test_failed_loads_are_not_shown_to_who_looks_on() -> None:
    world = World()
    world.fabric.fail_next(10)
    world.start("failing")
    world.poll()
    world.start("fine")
    world.poll()
    assert [order.request_id for order, _ in world.loaded] == ["fine"]


def test_binding_many_loads_is_bounded_per_poll() -> None:
    """Each look at the clock takes 0.5 ms here."""
    world = World()
    for number in range(20):
        world.start(f"{number}")
    now = world.clock.__call__

    def slow() -> float:
        world.clock.advance(5e-4)
        return now()

    world.loads[0]._clock = slow
    done = [len(world.poll()) for _ in range(20)]
    assert sum(done) == 20
    assert 0 < max(done) < 10
    assert world.wrong() == []
