"""What must a transport be able to do?

1. ``Region``: memory that is registered once and then read from, or read into.
2. ``Transport``: knows its own regions and its peers, and reads from a peer.
3. ``Transfer``: one read under way; polled until it has ended.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from hybrid_connector.core.errors import TransferError
from hybrid_connector.transport.binding import Addresses, BoundCopies


@dataclass(frozen=True, slots=True)
class Region:
    """A registered range of memory. ``device`` is the GPU's number, 0 for DRAM. Whoever names it keeps it alive."""

    address: int
    num_bytes: int
    memory: Literal["DRAM", "VRAM"] = "DRAM"
    device: int = 0

    def __post_init__(self) -> None:
        if not (self.address > 0 and 0 < self.num_bytes <= 2**63 - self.address and self.device >= 0):
            raise ValueError(f"expected a positive address and size and a device >= 0, got {self}")

    def __str__(self) -> str:
        return f"{self.memory} [{self.address:#x}, {self.address + self.num_bytes:#x})"


def host_region(array: NDArray[np.uint8]) -> Region:
    """The region of a contiguous array, which the caller keeps alive."""
    if not array.flags.c_contiguous:
        raise ValueError("expected a contiguous array")
    return Region(array.ctypes.data, array.nbytes)


class TransferState(StrEnum):
    """Where a read stands. ``DONE`` and ``FAILED`` are final, and no byte lands after either."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class Transfer(Protocol):
    """One read under way.

    There is no cancel: while the state is ``PENDING`` bytes may land, so the blocks stay taken and the caller polls on.
    What the transport keeps for a read is freed by the ``poll`` that ends it.
    """

    @property
    def num_descriptors(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def error(self) -> str | None:
        """Why the read ``FAILED``; ``None`` in every other state."""
        ...

    def poll(self) -> TransferState:
        """Look without waiting. Never raises."""
        ...


class Transport(Protocol):
    """One worker's end of the data plane.

    One thread reads and polls; another one may add and remove peers meanwhile.
    """

    @property
    def kind(self) -> str:
        """What peers must have in common: ``nixl``, ``memory``."""
        ...

    @property
    def name(self) -> str:
        """This end's own name among its peers."""
        ...

    def register(self, region: Region) -> None:
        """Let peers read ``region`` and reads land in it, until ``close``. Raises ``TransferError``."""
        ...

    def identity(self) -> bytes:
        """What a peer needs to read from the regions registered so far."""
        ...

    def add_peer(self, identity: bytes) -> str:
        """Meet a peer by its ``identity``; returns its name. Cheap for a known peer, so call it before every read.

        A read that ``FAILED`` loses the peer, which must be added again. Raises ``WireError`` for bytes that are
        no identity, ``PeerError`` for a peer that is not there.
        """
        ...

    def remove_peer(self, peer: str) -> None:
        """Start no more reads from ``peer``; those under way run on. Unknown names are ignored."""
        ...

    def read(self, peer: str, copies: BoundCopies, local: Region, remote: Region) -> Transfer:
        """Start reading; ``copies`` hold absolute addresses, ``src`` inside ``remote``, ``dst`` inside ``local``.

        Raises ``TransferError``, and then has not touched a byte.
        """
        ...

    def close(self) -> None:
        """Give back everything. Raises ``TransferError``, with nothing given back, while a read is under way."""
        ...


def check_inside(copies: BoundCopies, local: Region, remote: Region) -> None:
    """Raise ``TransferError`` for the first copy that leaves its regions, and for an empty list."""
    if not len(copies):
        raise TransferError(f"nothing to read from P rank {copies.src_rank}")
    for verb, addresses, region in (("reads", copies.src, remote), ("writes", copies.dst, local)):
        if (i := _first_outside(addresses, copies.num_bytes, region)) is not None:
            start, size = int(addresses[i]), int(copies.num_bytes[i])
            raise TransferError(
                f"copy {i} of {len(copies)} from P rank {copies.src_rank} {verb} [{start:#x}, {start + size:#x}), "
                f"outside {region}"
            )


def _first_outside(addresses: Addresses, num_bytes: Addresses, region: Region) -> int | None:
    offset = addresses - np.uint64(region.address)  # an address below the region wraps to beyond its end
    size = np.uint64(region.num_bytes)
    outside = (offset >= size) | (num_bytes > size - np.minimum(offset, size))
    return int(outside.argmax()) if outside.any() else None
