"""How do bytes move without a network?

1. ``Fabric``: where the transports of one process meet, and where things are made to go wrong on purpose.
2. ``MemoryTransport``: copies real bytes between real buffers, in the ``poll`` that ends a read.
"""

import ctypes
import secrets
from collections import deque
from dataclasses import dataclass

import numpy as np

from hybrid_connector.core.errors import PeerError, TransferError, WireError
from hybrid_connector.transport.base import Region, TransferState, check_inside
from hybrid_connector.transport.binding import BoundCopies

IDENTITY_PREFIX = b"hybrid-connector-memory:"


@dataclass(frozen=True, slots=True)
class _Fault:
    """What goes wrong with one read: it ends after ``fail_after_bytes``, or the byte ``flip_byte`` arrives changed."""

    peer: str | None
    fail_after_bytes: int | None = None
    flip_byte: int | None = None


class Fabric:
    """The transports of one process. ``peer`` is a transport's name, ``None`` stands for all."""

    def __init__(self) -> None:
        self._present: dict[str, MemoryTransport] = {}
        self._used_names: set[str] = set()
        self._all_held = False
        self._held: set[str] = set()
        self._faults: deque[_Fault] = deque()

    def hold(self, peer: str | None = None) -> None:
        """Keep reads from ``peer`` pending until ``release``."""
        if peer is None:
            self._all_held = True
        else:
            self._held.add(peer)

    def release(self, peer: str | None = None) -> None:
        """Let held reads go on with their next ``poll``; ``None`` ends every ``hold``."""
        if peer is None:
            self._all_held = False
            self._held.clear()
        else:
            self._held.discard(peer)

    def fail_next(self, after_bytes: int = 0, peer: str | None = None) -> None:
        """Let the next read from ``peer`` fail after that many bytes have moved."""
        self._faults.append(_Fault(peer, fail_after_bytes=after_bytes))

    def flip_next(self, byte: int = 0, peer: str | None = None) -> None:
        """Let byte number ``byte`` of the next read from ``peer`` arrive with its lowest bit changed."""
        self._faults.append(_Fault(peer, flip_byte=byte))

    def vanish(self, peer: str) -> None:
        """Take a transport away as if its process had died: reads from it fail, its memory is not touched again."""
        self._present.pop(peer, None)

    def _join(self, transport: "MemoryTransport") -> None:
        if transport.name in self._used_names:
            raise ValueError(f"{transport.name}: a transport of this name has already joined the fabric")
        self._used_names.add(transport.name)
        self._present[transport.name] = transport

    def _find(self, peer: str) -> "MemoryTransport | None":
        return self._present.get(peer)

    def _is_held(self, peer: str) -> bool:
        return self._all_held or peer in self._held

    def _take_fault(self, peer: str) -> _Fault | None:
        for fault in self._faults:
            if fault.peer in (None, peer):
                self._faults.remove(fault)
                return fault
        return None


class MemoryTransport:
    """A ``Transport`` inside one process; buffers must be in DRAM and outlive the transport."""

    def __init__(self, fabric: Fabric, name: str | None = None) -> None:
        self._fabric = fabric
        self._name = name or f"memory-{secrets.token_hex(8)}"
        self._regions: set[Region] = set()
        self._peers: set[str] = set()
        self._in_flight: set[MemoryTransfer] = set()
        fabric._join(self)

    @property
    def kind(self) -> str:
        return "memory"

    @property
    def name(self) -> str:
        return self._name

    def register(self, region: Region) -> None:
        if region.memory != "DRAM":
            raise TransferError(f"MemoryTransport moves bytes in DRAM, got {region}")
        self._regions.add(region)

    def identity(self) -> bytes:
        return IDENTITY_PREFIX + self._name.encode()

    def add_peer(self, identity: bytes) -> str:
        if not identity.startswith(IDENTITY_PREFIX):
            raise WireError(f"no identity of a MemoryTransport: {identity[:40]!r}")
        try:
            peer = identity.removeprefix(IDENTITY_PREFIX).decode()
        except UnicodeDecodeError as error:
            raise WireError(f"no identity of a MemoryTransport: {identity[:40]!r}") from error
        if peer not in self._peers and self._fabric._find(peer) is None:
            raise PeerError(f"{peer}: not in this process, or gone")
        self._peers.add(peer)
        return peer

    def remove_peer(self, peer: str) -> None:
        self._peers.discard(peer)

    def read(self, peer: str, copies: BoundCopies, local: Region, remote: Region) -> "MemoryTransfer":
        if peer not in self._peers:
            raise TransferError(f"{peer}: not a peer of {self._name}, or lost; add it again")
        check_inside(copies, local, remote)
        if local not in self._regions:
            raise TransferError(f"{self._name} has not registered {local}")
        source = self._fabric._find(peer)
        if source is not None and remote not in source._regions:
            raise TransferError(f"{peer} has not registered {remote}")
        transfer = MemoryTransfer(self, peer, copies, self._fabric._take_fault(peer))
        self._in_flight.add(transfer)
        return transfer

    def close(self) -> None:
        if self._in_flight:
            raise TransferError(f"{self._name}: {len(self._in_flight)} reads under way; poll them to their end first")
        self._fabric.vanish(self._name)
        self._regions.clear()
        self._peers.clear()


class MemoryTransfer:
    """A read that copies when it is polled."""

    def __init__(self, transport: MemoryTransport, peer: str, copies: BoundCopies, fault: _Fault | None) -> None:
        self._transport = transport
        self._peer = peer
        self._copies = copies
        self._fault = fault
        self._state = TransferState.PENDING
        self._error: str | None = None

    @property
    def num_descriptors(self) -> int:
        return len(self._copies)

    @property
    def num_bytes(self) -> int:
        return self._copies.total_bytes

    @property
    def error(self) -> str | None:
        return self._error

    def poll(self) -> TransferState:
        fabric = self._transport._fabric
        if self._state is not TransferState.PENDING or fabric._is_held(self._peer):
            return self._state
        limit = None if self._fault is None else self._fault.fail_after_bytes
        if fabric._find(self._peer) is None:
            self._end(f"{self._peer}: gone")
        elif limit is not None:
            self._move(limit)
            self._end(f"{self._peer}: failed on purpose after {limit} bytes")
        else:
            self._move(self.num_bytes)
            self._end(None)
        return self._state

    def _move(self, limit: int) -> None:
        """Copy the first ``limit`` bytes, in the order of the copies."""
        flip = None if self._fault is None else self._fault.flip_byte
        done = 0
        columns = (self._copies.src.tolist(), self._copies.dst.tolist(), self._copies.num_bytes.tolist())
        for src, dst, num_bytes in zip(*columns, strict=True):
            size = min(num_bytes, limit - done)
            ctypes.memmove(dst, src, size)
            if flip is not None and done <= flip < done + size:
                np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(dst))[flip - done] ^= 1
            done += size

    def _end(self, error: str | None) -> None:
        self._error = error
        self._state = TransferState.DONE if error is None else TransferState.FAILED
        self._transport._in_flight.discard(self)
        if error is not None:
            self._transport._peers.discard(self._peer)
