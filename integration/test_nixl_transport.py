"""Does ``NixlTransport`` do what every transport must, between real agents in separate processes?"""

import os
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from hybrid_connector.core.errors import PeerError, TransferError, WireError
from hybrid_connector.transport.base import Region, Transfer, TransferState, host_region
from hybrid_connector.transport.nixl import NixlTransport

from nixl_peer import NixlRank
from transport_suite import REGION_BYTES, Rank, TransportSuite, noise, one_copy

PENDING, DONE, FAILED = TransferState
SETTLE_S = 5.0


class NixlWorld:
    """Ranks are reused from test to test, as a process takes seconds to start; a killed one is not."""

    def __init__(self) -> None:
        self._idle: list[NixlRank] = []
        self._taken: list[NixlRank] = []

    def start(self) -> Rank:
        if not self._idle:
            started = [NixlRank() for _ in range(2)]
            for rank in started:
                rank.wait_until_started()
            self._idle.extend(started)
        self._taken.append(self._idle.pop(0))
        return self._taken[-1]

    def kill(self, rank: Rank) -> None:
        assert isinstance(rank, NixlRank)
        self._taken.remove(rank)
        rank.kill()

    def end_test(self) -> None:
        self._idle.extend(self._taken)
        self._taken.clear()

    def close(self) -> list[int | None]:
        for rank in self._idle:
            rank.close()
        return [rank.wait_until_ended() for rank in self._idle]


@pytest.fixture(scope="module")
def processes() -> Iterator[NixlWorld]:
    world = NixlWorld()
    yield world
    exit_codes = world.close()
    assert exit_codes == [0] * len(exit_codes), f"ranks ended with {exit_codes}"


class TestNixlTransport(TransportSuite):
    @pytest.fixture
    def world(self, processes: NixlWorld) -> Iterator[NixlWorld]:
        yield processes
        processes.end_test()


class Reader:
    """A transport in this process, to look at reads while they are under way."""

    def __init__(self) -> None:
        self.now = 0.0
        self.transport = NixlTransport(settle_s=SETTLE_S, clock=lambda: self.now)
        self.memory = np.zeros(REGION_BYTES, dtype=np.uint8)
        self.local = host_region(self.memory)
        self.transport.register(self.local)
        self.transport.register(self.local)

    def read(self, source: Rank, num_bytes: int = 4096) -> Transfer:
        identity, remote = source.describe()
        copies = one_copy(remote.address, self.local.address, num_bytes)
        return self.transport.read(self.transport.add_peer(identity), copies, self.local, remote)


def poll_until(transfer: Transfer, state: TransferState, limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while transfer.poll() is not state:
        assert time.monotonic() < deadline, f"{transfer.poll()} and not {state} after {limit_s} s"
        time.sleep(0.001)


@pytest.fixture
def world(processes: NixlWorld) -> Iterator[NixlWorld]:
    yield processes
    processes.end_test()


def stopped(rank: Rank) -> NixlRank:
    """A peer that is there but does not answer: its first read stays under way."""
    assert isinstance(rank, NixlRank)
    os.kill(rank.pid, signal.SIGSTOP)
    return rank


def test_a_read_from_a_peer_that_sleeps_ends_when_it_wakes(world: NixlWorld) -> None:
    source, reader = world.start(), Reader()
    source.fill(data := noise(4096, 1))
    identity, remote = source.describe()
    peer = reader.transport.add_peer(identity)
    sleeper = stopped(source)
    copies = one_copy(remote.address, reader.local.address, 4096)
    transfer = reader.transport.read(peer, copies, reader.local, remote)
    for _ in range(100):
        assert transfer.poll() is PENDING
        time.sleep(0.001)
    with pytest.raises(TransferError, match="1 reads under way"):
        reader.transport.close()
    reader.transport.remove_peer(peer)
    with pytest.raises(TransferError, match="not a peer, or its connection is lost"):
        reader.transport.read(peer, copies, reader.local, remote)
    with pytest.raises(PeerError, match="1 reads over its lost connection have not ended yet"):
        reader.transport.add_peer(identity)
    os.kill(sleeper.pid, signal.SIGCONT)
    poll_until(transfer, DONE)
    assert (reader.memory[:4096] == data).all()
    poll_until(reader.read(source), DONE)
    reader.transport.close()
    reader.transport.close()


def test_a_peer_killed_during_a_read(world: NixlWorld) -> None:
    victim, healthy, reader = world.start(), world.start(), Reader()
    identity, remote = victim.describe()
    peer = reader.transport.add_peer(identity)
    copies = one_copy(remote.address, reader.local.address, 4096)
    stopped(victim)
    transfer = reader.transport.read(peer, copies, reader.local, remote)
    assert transfer.poll() is PENDING
    world.kill(victim)
    poll_until(reader.read(healthy), DONE)
    deadline = time.monotonic() + 30
    while transfer.poll() is PENDING:
        assert transfer.error is None
        assert time.monotonic() < deadline
        reader.now += 0.01
        time.sleep(0.001)
    assert transfer.poll() is FAILED
    assert reader.now >= SETTLE_S
    assert transfer.error is not None
    assert transfer.error.startswith(peer)
    with pytest.raises(TransferError, match="connection is lost"):
        reader.transport.read(peer, copies, reader.local, remote)
    poll_until(reader.read(healthy), DONE)
    reader.transport.close()


def test_peers_come_and_go_while_another_thread_reads(world: NixlWorld) -> None:
    source, guest, reader = world.start(), world.start(), Reader()
    identity, _ = guest.describe()
    has_ended = threading.Event()
    errors: list[Exception] = []

    def come_and_go() -> None:
        try:
            while not has_ended.is_set():
                reader.transport.remove_peer(reader.transport.add_peer(identity))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for seed in range(20):
            source.fill(data := noise(4096, seed))
            poll_until(reader.read(source), DONE)
            assert (reader.memory[:4096] == data).all()
    finally:
        has_ended.set()
        thread.join()
    assert not errors
    reader.transport.close()


def test_identity_grows_with_the_registered_regions(world: NixlWorld) -> None:
    """A staging buffer may be registered after the first handshake; the new identity then replaces the old one."""
    source, reader = NixlTransport(), Reader()
    memory = [noise(4096, 2), noise(4096, 3)]
    for data in memory:
        source.register(host_region(data))
        peer = reader.transport.add_peer(source.identity())
        copies = one_copy(data.ctypes.data, reader.local.address, 4096)
        poll_until(reader.transport.read(peer, copies, reader.local, host_region(data)), DONE)
        assert (reader.memory[:4096] == data).all()
    reader.transport.close()
    source.close()


def test_memory_that_is_not_there_cannot_be_registered() -> None:
    reader = Reader()
    with pytest.raises(TransferError, match="NIXL cannot register VRAM"):
        reader.transport.register(Region(1 << 40, 4096, "VRAM", 7))
    reader.transport.close()


def test_an_agent_is_not_its_own_peer() -> None:
    reader = Reader()
    with pytest.raises(PeerError):
        reader.transport.add_peer(reader.transport.identity())
    reader.transport.close()


def test_another_transport_s_identity_is_refused() -> None:
    reader = Reader()
    with pytest.raises(WireError, match="no identity of a NixlTransport"):
        reader.transport.add_peer(b"hybrid-connector-memory:P")
    reader.transport.close()
