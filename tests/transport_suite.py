"""What must every transport do, whatever moves the bytes?

1. ``StateImage``: a rank's memory with a request's state in it, by global coordinate; knows neither planner nor binder.
2. ``LocalRank``: a buffer and a transport, driven by calls that can also come from another process.
3. ``TransportSuite``: the tests; a subclass has a ``world`` fixture that starts and kills ranks.
"""

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from hybrid_connector.core.blocks import Group, Layer, RankLayout
from hybrid_connector.core.errors import HybridConnectorError, PeerError, TransferError, WireError
from hybrid_connector.core.families import Attention, ElementType, StatePage, TokenPage, delta_net
from hybrid_connector.core.geometry import Shard
from hybrid_connector.core.planning import plan_transfer
from hybrid_connector.transport.base import Region, TransferState, Transport, host_region
from hybrid_connector.transport.binding import Binder, BoundCopies

BF16 = ElementType("bfloat16", 2)
FP32 = ElementType("float32", 4)
REGION_BYTES = 1 << 20
NUM_TOKENS = 45
DEADLINE_S = 60.0

Bytes = NDArray[np.uint8]
BlockIds = tuple[tuple[int, ...], ...]


GATED_DELTA_NET = delta_net(
    num_key_heads=4,
    num_value_heads=8,
    key_dim=4,
    value_dim=4,
    num_taps=3,
    conv_element=BF16,
    temporal_element=FP32,
)


@dataclass(frozen=True, slots=True)
class Storage:
    """How an engine keeps the model of these tests: 3 gated delta net and 2 attention layers."""

    num_ranks: int
    page_tokens: int = 8
    pages_per_block: int = 2
    token_first: bool = False
    channel_first: bool = True
    padding: int = 0
    num_blocks: int = 12

    def layout(self, rank: int) -> RankLayout:
        groups = (Group(self.num_blocks), Group(self.num_blocks, self.pages_per_block, self.page_tokens))
        layers = []
        offset = 64
        for i in range(3):
            page = StatePage(self.channel_first)
            shards = GATED_DELTA_NET.shards(f"gdn.{i}", page, rank=rank, num_ranks=self.num_ranks)
            page_stride = sum(shard.num_bytes for shard in shards) + self.padding
            layers.append(Layer(f"gdn.{i}", 0, offset, page_stride, shards))
            offset += page_stride * self.num_blocks
        for i in range(2):
            num_heads = max(1, 2 // self.num_ranks)
            strides = (16, num_heads * 16, 2) if self.token_first else (self.page_tokens * 16, 16, 2)
            tokens = TokenPage(self.page_tokens, strides)
            (shard,) = Attention(2, 8, BF16).shards(f"attn.{i}", tokens, rank=rank, num_ranks=self.num_ranks)
            page_stride = shard.num_bytes + self.padding
            layers.append(Layer(f"attn.{i}", 1, offset, page_stride, (shard,)))
            offset += page_stride * self.num_blocks * self.pages_per_block
        return RankLayout(rank, offset + 64, groups, tuple(layers))

    def layouts(self) -> tuple[RankLayout, ...]:
        return tuple(map(self.layout, range(self.num_ranks)))

    def draw_blocks(self, num_tokens: int, seed: int) -> BlockIds:
        blocks = np.random.default_rng(seed).permutation(self.num_blocks).tolist()
        return tuple(tuple(blocks[: group.num_request_blocks(num_tokens)]) for group in self.layout(0).groups)


@dataclass(frozen=True, slots=True)
class StateImage:
    """``data``: a rank's memory. ``is_tail``: bytes of its pages behind the last token, which nobody reads."""

    data: Bytes
    is_tail: NDArray[np.bool_]


def noise(num_bytes: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def paint(
    layout: RankLayout, before: Bytes, block_ids: BlockIds, num_tokens: int, first_tokens: int = 0, skew: int = 0
) -> StateImage:
    """``before`` with the state of one request in the blocks; every element's bytes follow from its coordinates."""
    image = StateImage(before.copy(), np.zeros(len(before), dtype=bool))
    for layer in layout.layers:
        group = layout.groups[layer.group]
        for page in range(group.num_request_pages(num_tokens)):
            block, rest = divmod(page, group.pages_per_block)
            slot = block_ids[layer.group][block] * group.pages_per_block + rest
            for shard in layer.shards:
                address = layer.offset + slot * layer.page_stride
                _paint_page(image, shard, address, page, num_tokens, first_tokens, skew)
    return image


def _paint_page(
    image: StateImage, shard: Shard, address: int, page: int, num_tokens: int, first_tokens: int, skew: int
) -> None:
    tensor = shard.tensor
    grid = np.meshgrid(*(np.arange(i.start, i.stop) for i in shard.box.intervals), indexing="ij")
    own = [axis.ravel() for axis in grid]
    where = np.full(len(own[0]), address + shard.offset)
    for axis, interval, stride in zip(own, shard.box.intervals, shard.strides, strict=True):
        where = where + (axis - interval.start) * stride
    is_state = np.ones(len(own[0]), dtype=bool)
    is_tail = ~is_state
    number = np.zeros(len(own[0]), dtype=np.uint64)
    for axis, extent in zip(own, tensor.shape, strict=True):
        if extent is None:
            tokens = axis + page * shard.page_extent
            is_state = (tokens >= first_tokens) & (tokens < num_tokens)
            is_tail = tokens >= num_tokens
            axis = tokens
        number = number * np.uint64(extent or 1 << 20) + axis.astype(np.uint64)
    number = (number + np.uint64(zlib.crc32(tensor.name.encode()) + skew)) * np.uint64(0x9E3779B97F4A7C15)
    for byte in range(tensor.item_bytes):
        value = (number >> np.uint64(56 - 8 * byte)).astype(np.uint8)
        image.data[where[is_state] + byte] = value[is_state]
        image.is_tail[where[is_tail] + byte] = True


@dataclass(frozen=True, slots=True)
class Read:
    """One read to carry out: whom to read from, and what."""

    identity: bytes
    remote: Region
    copies: BoundCopies


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a set of reads ended: the errors, and what was moved."""

    errors: tuple[str, ...]
    num_descriptors: int
    num_bytes: int


class Rank(Protocol):
    """One P or D rank. ``describe``: its identity and region."""

    def describe(self) -> tuple[bytes, Region]: ...
    def fill(self, data: Bytes) -> None: ...
    def contents(self) -> Bytes: ...
    def add_peer(self, identity: bytes) -> str: ...
    def remove_peer(self, peer: str) -> None: ...
    def read(self, reads: Sequence[Read]) -> Outcome: ...


class LocalRank:
    """A ``Rank`` in this process. ``pause`` is called between two polls."""

    def __init__(self, transport: Transport, num_bytes: int, pause: Callable[[], None] = lambda: None) -> None:
        self._transport = transport
        self._memory = np.zeros(num_bytes, dtype=np.uint8)
        self._region = host_region(self._memory)
        self._pause = pause
        transport.register(self._region)

    def describe(self) -> tuple[bytes, Region]:
        return self._transport.identity(), self._region

    def fill(self, data: Bytes) -> None:
        self._memory[: len(data)] = data

    def contents(self) -> Bytes:
        return self._memory.copy()

    def add_peer(self, identity: bytes) -> str:
        return self._transport.add_peer(identity)

    def remove_peer(self, peer: str) -> None:
        self._transport.remove_peer(peer)

    def read(self, reads: Sequence[Read]) -> Outcome:
        peers = [self._transport.add_peer(read.identity) for read in reads]
        transfers = [
            self._transport.read(peer, read.copies, self._region, read.remote)
            for peer, read in zip(peers, reads, strict=True)
        ]
        deadline = time.monotonic() + DEADLINE_S
        running = transfers
        while running := [transfer for transfer in running if transfer.poll() is TransferState.PENDING]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"reads have not ended after {DEADLINE_S} s")
            self._pause()
        return Outcome(
            tuple(transfer.error for transfer in transfers if transfer.error is not None),
            sum(transfer.num_descriptors for transfer in transfers),
            sum(transfer.num_bytes for transfer in transfers),
        )

    def close(self) -> None:
        self._transport.close()


class World(Protocol):
    """Starts ranks of ``REGION_BYTES`` bytes, and kills them as a crash would."""

    def start(self) -> Rank: ...
    def kill(self, rank: Rank) -> None: ...


def one_copy(src: int, dst: int, num_bytes: int) -> BoundCopies:
    src_array, dst_array, size_array = (np.array([value], dtype=np.uint64) for value in (src, dst, num_bytes))
    return BoundCopies(0, src_array, dst_array, size_array)


def read_slice(source: Rank, target: Rank, num_bytes: int = 4096) -> Read:
    """A read of the first bytes of ``source`` to the first bytes of ``target``."""
    identity, remote = source.describe()
    _, local = target.describe()
    return Read(identity, remote, one_copy(remote.address, local.address, num_bytes))


def fails(target: Rank, read: Read) -> bool:
    """Whether a read fails, be it at once or later."""
    try:
        return bool(target.read([read]).errors)
    except HybridConnectorError:
        return True


class TransportSuite:
    """Subclasses define ``world``; every test starts its own ranks in it."""

    def transfer(
        self,
        world: World,
        src_storage: Storage,
        dst_storage: Storage,
        *,
        num_tokens: int = NUM_TOKENS,
        first_tokens: int = 0,
    ) -> None:
        """Move one request between two engines and compare every byte of D with what its coordinates demand."""
        srcs, dsts = src_storage.layouts(), dst_storage.layouts()
        src_blocks = src_storage.draw_blocks(num_tokens, seed=1)
        dst_blocks = dst_storage.draw_blocks(num_tokens, seed=2)
        sources = [world.start() for _ in srcs]
        for layout, rank in zip(srcs, sources, strict=True):
            rank.fill(paint(layout, noise(layout.region_bytes, 10 + layout.rank), src_blocks, num_tokens).data)
        described = [rank.describe() for rank in sources]
        bases = {layout.rank: region.address for layout, (_, region) in zip(srcs, described, strict=True)}
        for layout in dsts:
            rank = world.start()
            _, local = rank.describe()
            before = noise(REGION_BYTES, 100 + layout.rank)
            rank.fill(before)
            binder = Binder(plan_transfer(layout, srcs), layout, srcs, dst_base=local.address, src_bases=bases)
            bound = binder.bind(src_blocks, dst_blocks, num_tokens, first_tokens)
            outcome = rank.read([Read(*described[copies.src_rank], copies) for copies in bound])
            assert outcome == Outcome((), sum(map(len, bound)), sum(copies.total_bytes for copies in bound))
            want = paint(layout, before, dst_blocks, num_tokens, first_tokens)
            wrong = np.flatnonzero((rank.contents() != want.data) & ~want.is_tail)
            assert not wrong.size, f"D rank {layout.rank}: {wrong.size} bytes are wrong, the first at {wrong[0]}"

    @pytest.mark.parametrize(("num_src", "num_dst"), [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2)])
    def test_state_arrives(self, world: World, num_src: int, num_dst: int) -> None:
        self.transfer(world, Storage(num_src, padding=40), Storage(num_dst, padding=8))

    def test_state_arrives_in_another_storage(self, world: World) -> None:
        src = Storage(2, token_first=True, channel_first=False, padding=16)
        self.transfer(world, src, Storage(1, page_tokens=12, pages_per_block=1, padding=4))

    @pytest.mark.parametrize("first_tokens", [8, 24, 40])
    def test_only_what_d_lacks_arrives(self, world: World, first_tokens: int) -> None:
        self.transfer(world, Storage(1), Storage(1), first_tokens=first_tokens)

    def test_the_same_peer_again(self, world: World) -> None:
        source, target = world.start(), world.start()
        identity, _ = source.describe()
        assert target.add_peer(identity) == target.add_peer(identity)
        for seed in (1, 2):
            source.fill(data := noise(4096, seed))
            assert target.read([read_slice(source, target)]).errors == ()
            assert (target.contents()[:4096] == data).all()

    def test_a_removed_peer_can_come_back(self, world: World) -> None:
        source, target = world.start(), world.start()
        read = read_slice(source, target)
        peer = target.add_peer(read.identity)
        target.remove_peer(peer)
        target.remove_peer(peer)
        target.remove_peer("nobody")
        source.fill(data := noise(4096, 3))
        assert target.read([read]).errors == ()
        assert (target.contents()[:4096] == data).all()

    def test_rubbish_is_no_identity(self, world: World) -> None:
        source, target = world.start(), world.start()
        identity, _ = source.describe()
        flipped = bytearray(identity)
        flipped[len(flipped) // 2] ^= 0xFF
        cut = [identity[:length] for length in (0, 1, 8, len(identity) // 2, len(identity) - 1)]
        for rubbish in (*cut, bytes(flipped), identity + b"\0", b"\0" * 64, noise(4096, 4).tobytes(), b"x" * (1 << 21)):
            with pytest.raises((WireError, PeerError)):
                target.add_peer(rubbish)
        assert target.read([read_slice(source, target)]).errors == ()

    def test_addresses_outside_the_regions_are_refused(self, world: World) -> None:
        source, target = world.start(), world.start()
        identity, remote = source.describe()
        _, local = target.describe()
        before = target.contents()
        src, dst = remote.address, local.address
        for outside in (
            one_copy(src - 1, dst, 16),
            one_copy(src + REGION_BYTES - 15, dst, 16),
            one_copy(src + REGION_BYTES, dst, 1),
            one_copy(2**64 - 16, dst, 16),
            one_copy(src, dst - 1, 16),
            one_copy(src, dst + REGION_BYTES - 15, 16),
            one_copy(src, dst, REGION_BYTES + 1),
            one_copy(src, dst, 2**64 - 1),
        ):
            with pytest.raises(TransferError, match="outside DRAM"):
                target.read([Read(identity, remote, outside)])
        assert (target.contents() == before).all()

    def test_memory_the_peer_has_not_registered_is_refused(self, world: World) -> None:
        source, target = world.start(), world.start()
        identity, remote = source.describe()
        _, local = target.describe()
        elsewhere = Region(remote.address + 64 * REGION_BYTES, 4096)
        with pytest.raises(TransferError):
            target.read([Read(identity, elsewhere, one_copy(elsewhere.address, local.address, 64))])

    def test_nothing_to_read_is_refused(self, world: World) -> None:
        source, target = world.start(), world.start()
        identity, remote = source.describe()
        nothing = np.zeros(0, dtype=np.uint64)
        with pytest.raises(TransferError, match="nothing to read"):
            target.read([Read(identity, remote, BoundCopies(0, nothing, nothing, nothing))])

    def test_a_dead_peer_fails_its_own_reads_only(self, world: World) -> None:
        dead, healthy, target = world.start(), world.start(), world.start()
        from_dead, from_healthy = read_slice(dead, target), read_slice(healthy, target)
        assert target.read([from_dead, from_healthy]).errors == ()
        world.kill(dead)
        assert fails(target, from_dead)
        healthy.fill(data := noise(4096, 5))
        assert target.read([from_healthy]).errors == ()
        assert (target.contents()[:4096] == data).all()
        assert fails(target, from_dead)

    def test_a_peer_that_died_before_the_first_read(self, world: World) -> None:
        dead, target = world.start(), world.start()
        read = read_slice(dead, target)
        target.add_peer(read.identity)
        world.kill(dead)
        assert fails(target, read)

    def test_a_restarted_peer_is_another_peer(self, world: World) -> None:
        first, target = world.start(), world.start()
        assert target.read([read_slice(first, target)]).errors == ()
        world.kill(first)
        second = world.start()
        second.fill(data := noise(4096, 6))
        assert target.read([read_slice(second, target)]).errors == ()
        assert (target.contents()[:4096] == data).all()
