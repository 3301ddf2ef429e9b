"""Does ``MemoryTransport`` do what every transport must, and go wrong on demand?"""

from collections.abc import Sequence

import numpy as np
import pytest

from hybrid_connector.core.errors import PeerError, TransferError
from hybrid_connector.transport.base import Region, TransferState, Transport, host_region
from hybrid_connector.transport.binding import BoundCopies
from hybrid_connector.transport.memory import Fabric, MemoryTransfer, MemoryTransport

from transport_suite import REGION_BYTES, LocalRank, Rank, TransportSuite, noise

PENDING, DONE, FAILED = TransferState


class MemoryWorld:
    def __init__(self) -> None:
        self._fabric = Fabric()
        self._names: dict[int, str] = {}

    def start(self) -> Rank:
        transport = MemoryTransport(self._fabric)
        rank = LocalRank(transport, REGION_BYTES)
        self._names[id(rank)] = transport.name
        return rank

    def kill(self, rank: Rank) -> None:
        self._fabric.vanish(self._names[id(rank)])


class TestMemoryTransport(TransportSuite):
    @pytest.fixture
    def world(self) -> MemoryWorld:
        return MemoryWorld()


class Pair:
    """Sources P0, P1, ... with 1 KiB of noise each, and a target with 1 KiB of zeros for each of them."""

    def __init__(self, num_sources: int = 1) -> None:
        self.fabric = Fabric()
        self.target = MemoryTransport(self.fabric, "D")
        self.received = np.zeros((num_sources, 1024), dtype=np.uint8)
        self.local = host_region(self.received.reshape(-1))
        self.target.register(self.local)
        self.sent = noise(num_sources * 1024, 1).reshape(num_sources, 1024)
        self.remotes = [host_region(row) for row in self.sent]
        self.sources = [MemoryTransport(self.fabric, f"P{i}") for i in range(num_sources)]
        for i, source in enumerate(self.sources):
            source.register(self.remotes[i])
            self.meet(i)

    def meet(self, source: int) -> None:
        assert self.target.add_peer(self.sources[source].identity()) == f"P{source}"

    def read(self, source: int = 0, pieces: Sequence[tuple[int, int]] = ((0, 512), (512, 512))) -> MemoryTransfer:
        """``pieces``: start and size of each copy."""
        start, size = np.array(pieces, dtype=np.uint64).T
        src = start + np.uint64(self.remotes[source].address)
        dst = start + np.uint64(self.local.address + 1024 * source)
        return self.target.read(
            f"P{source}", BoundCopies(source, src, dst, size.copy()), self.local, self.remotes[source]
        )


def test_bytes_move_with_the_poll_that_ends_the_read() -> None:
    pair = Pair()
    transfer = pair.read()
    assert not pair.received.any()
    assert (transfer.num_descriptors, transfer.num_bytes, transfer.error) == (2, 1024, None)
    assert transfer.poll() is DONE
    assert (pair.received == pair.sent).all()
    assert transfer.poll() is DONE


def test_held_reads_stay_pending() -> None:
    pair = Pair(2)
    pair.fabric.hold("P0")
    held, free = pair.read(0), pair.read(1)
    assert [held.poll(), free.poll()] == [PENDING, DONE]
    assert not pair.received[0].any()
    pair.fabric.release("P0")
    assert held.poll() is DONE
    pair.fabric.hold()
    held = pair.read(1)
    assert held.poll() is PENDING
    pair.fabric.release()
    assert held.poll() is DONE


def test_a_read_fails_once_after_part_of_its_bytes() -> None:
    pair = Pair(2)
    pair.fabric.fail_next(700, peer="P0")
    other, failing, again = pair.read(1), pair.read(0), pair.read(0)
    assert other.poll() is DONE
    assert failing.poll() is FAILED
    assert failing.error == "P0: failed on purpose after 700 bytes"
    assert (pair.received[0, :700] == pair.sent[0, :700]).all()
    assert not pair.received[0, 700:].any()
    assert again.poll() is DONE
    assert (pair.received == pair.sent).all()


@pytest.mark.parametrize("byte", [0, 511, 512, 1023])
def test_a_byte_arrives_changed(byte: int) -> None:
    pair = Pair()
    pair.fabric.flip_next(byte)
    assert pair.read().poll() is DONE
    assert np.flatnonzero(pair.received[0] ^ pair.sent[0]).tolist() == [byte]
    assert pair.read().poll() is DONE
    assert (pair.received == pair.sent).all()


def test_a_failed_read_loses_the_peer() -> None:
    pair = Pair()
    pair.fabric.fail_next()
    assert pair.read().poll() is FAILED
    with pytest.raises(TransferError, match="P0: not a peer of D, or lost; add it again"):
        pair.read()
    pair.meet(0)
    assert pair.read().poll() is DONE


def test_siblings_of_a_failed_read_run_on() -> None:
    pair = Pair(4)
    pair.fabric.fail_next(peer="P0")
    for peer in ("P1", "P2", "P3"):
        pair.fabric.hold(peer)
    reads = [pair.read(i) for i in range(4)]
    assert [read.poll() for read in reads] == [FAILED, PENDING, PENDING, PENDING]
    with pytest.raises(TransferError, match="3 reads under way"):
        pair.target.close()
    pair.fabric.release()
    assert [read.poll() for read in reads] == [FAILED, DONE, DONE, DONE]
    pair.target.close()


def test_a_peer_vanishes_during_a_read() -> None:
    pair = Pair()
    transfer = pair.read()
    pair.fabric.vanish("P0")
    assert transfer.poll() is FAILED
    assert transfer.error == "P0: gone"
    assert not pair.received.any()


def test_a_closed_transport_is_gone() -> None:
    fabric = Fabric()
    source, target = MemoryTransport(fabric, "P"), MemoryTransport(fabric, "D")
    source.close()
    source.close()
    with pytest.raises(PeerError, match="P: not in this process, or gone"):
        target.add_peer(source.identity())


def test_names_are_used_once() -> None:
    fabric = Fabric()
    MemoryTransport(fabric, "P").close()
    with pytest.raises(ValueError, match="already joined"):
        MemoryTransport(fabric, "P")


def test_device_memory_is_refused() -> None:
    with pytest.raises(TransferError, match="VRAM"):
        MemoryTransport(Fabric()).register(Region(4096, 4096, "VRAM"))


def test_local_memory_must_be_registered() -> None:
    pair = Pair()
    elsewhere = np.zeros(64, dtype=np.uint8)
    src, dst = (np.array([address], dtype=np.uint64) for address in (pair.remotes[0].address, elsewhere.ctypes.data))
    copies = BoundCopies(0, src, dst, np.array([64], dtype=np.uint64))
    with pytest.raises(TransferError, match="D has not registered DRAM"):
        pair.target.read("P0", copies, host_region(elsewhere), pair.remotes[0])


def test_an_unknown_peer_is_refused() -> None:
    pair = Pair()
    pair.target.remove_peer("P0")
    with pytest.raises(TransferError, match="P0: not a peer of D"):
        pair.read()


@pytest.mark.parametrize("arguments", [(0, 1), (4096, 0), (-1, 8), (4096, 2**63), (4096, 1, "VRAM", -1)])
def test_impossible_regions_cannot_be_built(arguments: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected a positive address"):
        Region(*arguments)  # type: ignore[arg-type]


def test_a_region_needs_contiguous_memory() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        host_region(np.zeros(64, dtype=np.uint8)[::2])


def test_memory_transport_is_a_transport() -> None:
    transport: Transport = MemoryTransport(Fabric(), "P")
    assert transport.name == "P"
