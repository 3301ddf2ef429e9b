"""How do bytes move over NIXL?

1. ``NixlTransport``: one agent with the UCX backend per worker, every region registered once.
2. ``read``: arrays of (address, bytes, device) become descriptors for this read alone; none are prepared per block.
3. ``NixlTransfer.poll``: asks NIXL, and frees the handle when the read has ended.

Seen with NIXL 1.5.1: releasing a handle in flight succeeds, and the bytes land all the same; a read is reported as
failed with the first request that fails, while its others may still land. So no handle is released in flight,
and a failed read stays pending for ``settle_s`` more.
"""

import hashlib
import logging
import secrets
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from nixl import _bindings
from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

from hybrid_connector.core.errors import PeerError, TransferError, WireError
from hybrid_connector.transport.base import Region, TransferState, check_inside
from hybrid_connector.transport.binding import Addresses, BoundCopies

logger = logging.getLogger(__name__)

IDENTITY_MAGIC = b"hybrid-connector-nixl-1:"
MAX_IDENTITY_BYTES = 1 << 20
DEFAULT_SETTLE_S = 1.0

# NIXL's exceptions have no base of their own; the others are what its bindings make of bad arguments and C++ ones.
NIXL_ERRORS: tuple[type[Exception], ...] = (
    *(value for value in vars(_bindings).values() if isinstance(value, type) and issubclass(value, Exception)),
    RuntimeError,
    ValueError,
    TypeError,
    OverflowError,
    MemoryError,
)


@dataclass(slots=True)
class _Peer:
    """``retired``: read no more, disconnect when the last read has ended."""

    identity: bytes
    num_in_flight: int = 0
    retired: bool = False


class NixlTransport:
    """A ``Transport`` over one NIXL agent.

    NIXL locks the agent while a peer comes or goes, so ``read`` and ``poll`` may wait for another thread's
    ``add_peer``: up to 100 ms were seen for the first peer, below 1 ms for the next. On one machine without GPUs
    ``read`` itself copies the bytes before it returns.

    ``is_read_from``: peers read from here, so a thread of NIXL's serves them. An end that only reads does without: it
    polls its reads anyway, and the thread's lock was seen to hold up a poll, and Python with it, for seconds while a
    connection came up on a busy machine.
    """

    def __init__(
        self,
        *,
        is_read_from: bool = True,
        settle_s: float = DEFAULT_SETTLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = f"hybrid-{secrets.token_hex(16)}"
        self._settle_s = settle_s
        self._clock = clock
        sync = nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
        self._agent = nixl_agent(self._name, nixl_agent_config(is_read_from, backends=["UCX"], sync_mode=sync))
        if "UCX" not in self._agent.backends:
            raise TransferError("this NIXL has no UCX plugin")
        self._registered: dict[Region, Any] = {}
        self._peers: dict[str, _Peer] = {}
        self._in_flight: set[NixlTransfer] = set()
        self._lock = threading.Lock()  # the three above; never held while NIXL is called
        self._handshake = threading.Lock()  # one peer comes or goes at a time

    @property
    def kind(self) -> str:
        return "nixl"

    @property
    def name(self) -> str:
        return self._name

    def register(self, region: Region) -> None:
        if region in self._registered:
            return
        try:
            descriptors = self._agent.register_memory(
                [(region.address, region.num_bytes, region.device, "")], region.memory, backends=["UCX"]
            )
        except NIXL_ERRORS as error:
            raise TransferError(f"NIXL cannot register {region}: {_describe(error)}") from error
        self._registered[region] = descriptors

    def identity(self) -> bytes:
        return _pack(self._name, self._agent.get_agent_metadata())

    def add_peer(self, identity: bytes) -> str:
        name, metadata = _unpack(identity)
        with self._handshake:
            self._disconnect_retired()
            known = self._peers.get(name)
            if known is not None and known.retired:
                raise PeerError(f"{name}: {known.num_in_flight} reads over its lost connection have not ended yet")
            if known is not None and known.identity == identity:
                return name
            try:
                loaded = self._agent.add_remote_agent(metadata)
            except NIXL_ERRORS as error:
                raise PeerError(f"{name}: NIXL cannot reach it: {_describe(error)}") from error
            if loaded not in (name, name.encode()):
                raise WireError(f"{name}: its NIXL metadata belongs to {loaded!r}")
            with self._lock:
                if known is None:
                    self._peers[name] = _Peer(identity)
                else:
                    known.identity = identity
        return name

    def remove_peer(self, peer: str) -> None:
        with self._handshake:
            with self._lock:
                if peer in self._peers:
                    self._peers[peer].retired = True
            self._disconnect_retired()

    def read(self, peer: str, copies: BoundCopies, local: Region, remote: Region) -> "NixlTransfer":
        check_inside(copies, local, remote)
        with self._lock:
            known = self._peers.get(peer)
            if known is None or known.retired:
                raise TransferError(f"{peer}: not a peer, or its connection is lost; add it again")
            known.num_in_flight += 1
        try:
            handle = self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs(_rows(copies.dst, copies.num_bytes, local), local.memory),
                self._agent.get_xfer_descs(_rows(copies.src, copies.num_bytes, remote), remote.memory),
                peer,
                backends=["UCX"],
            )
        except NIXL_ERRORS as error:
            with self._lock:
                known.num_in_flight -= 1
            raise TransferError(
                f"{peer}: NIXL refuses to read {len(copies)} copies from {remote} to {local}: {_describe(error)}"
            ) from error
        transfer = NixlTransfer(self, peer, copies, handle)
        with self._lock:
            self._in_flight.add(transfer)
        transfer._start()
        return transfer

    def close(self) -> None:
        with self._handshake:
            with self._lock:
                if self._in_flight:
                    raise TransferError(f"{self._name}: {len(self._in_flight)} reads under way; poll them to their end")
                for peer in self._peers.values():
                    peer.retired = True
            self._disconnect_retired()
            while self._registered:
                region, descriptors = self._registered.popitem()
                try:
                    self._agent.deregister_memory(descriptors, backends=["UCX"])
                except NIXL_ERRORS as error:
                    logger.warning("NIXL cannot deregister %s: %s", region, _describe(error))

    def _disconnect_retired(self) -> None:
        """Forget retired peers from which nothing is under way; not done in ``poll``, because NIXL locks the agent."""
        with self._lock:
            idle = [name for name, peer in self._peers.items() if peer.retired and not peer.num_in_flight]
            for name in idle:
                del self._peers[name]
        for name in idle:
            try:
                self._agent.remove_remote_agent(name)
            except NIXL_ERRORS as error:
                logger.warning("%s: NIXL cannot disconnect: %s", name, _describe(error))

    def _ended(self, transfer: "NixlTransfer", peer: str, failed: bool) -> None:
        with self._lock:
            self._in_flight.discard(transfer)
            known = self._peers[peer]
            known.num_in_flight -= 1
            known.retired = known.retired or failed


class NixlTransfer:
    """A read under way. After the first error it stays pending for ``settle_s``: what was posted may still land."""

    def __init__(self, transport: NixlTransport, peer: str, copies: BoundCopies, handle: Any) -> None:
        self._transport = transport
        self._peer = peer
        self._handle = handle
        self._num_descriptors = len(copies)
        self._num_bytes = copies.total_bytes
        self._state = TransferState.PENDING
        self._failure: str | None = None
        self._failed_at = 0.0

    @property
    def num_descriptors(self) -> int:
        return self._num_descriptors

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def error(self) -> str | None:
        return self._failure if self._state is TransferState.FAILED else None

    def poll(self) -> TransferState:
        if self._state is not TransferState.PENDING:
            return self._state
        if self._failure is None:
            self._ask(self._transport._agent.check_xfer_state)
        elif self._transport._clock() - self._failed_at >= self._transport._settle_s:
            self._end(TransferState.FAILED)
        return self._state

    def _start(self) -> None:
        """Post the read. It may be done when this returns; if it fails, part of it may have been posted."""
        self._ask(self._transport._agent.transfer)

    def _ask(self, call: Callable[[Any], str]) -> None:
        try:
            status = call(self._handle)
        except NIXL_ERRORS as error:
            self._fail(_describe(error))
        else:
            if status == "DONE":
                self._end(TransferState.DONE)
            elif status != "PROC":
                self._fail(status)

    def _fail(self, reason: str) -> None:
        self._failure = f"{self._peer}: {reason}"
        self._failed_at = self._transport._clock()

    def _end(self, state: TransferState) -> None:
        handle, self._handle = self._handle, None
        try:
            handle.release()
        except NIXL_ERRORS as error:
            logger.warning("%s: NIXL cannot release a handle: %s", self._peer, _describe(error))
        self._state = state
        self._transport._ended(self, self._peer, failed=state is TransferState.FAILED)


def _rows(addresses: Addresses, num_bytes: Addresses, region: Region) -> Addresses:
    """What NIXL copies into a descriptor list without a loop: rows of address, bytes, device."""
    rows = np.empty((len(addresses), 3), dtype=np.uint64)
    rows[:, 0] = addresses
    rows[:, 1] = num_bytes
    rows[:, 2] = region.device
    return rows


def _pack(name: str, metadata: bytes) -> bytes:
    """NIXL and UCX believe every byte of the metadata, so a digest keeps damaged ones from them."""
    encoded = name.encode()
    body = struct.pack("<H", len(encoded)) + encoded + metadata
    return IDENTITY_MAGIC + hashlib.sha256(body).digest() + body


def _unpack(identity: bytes) -> tuple[str, bytes]:
    start = len(IDENTITY_MAGIC)
    if not identity.startswith(IDENTITY_MAGIC) or len(identity) > MAX_IDENTITY_BYTES:
        raise WireError(f"no identity of a NixlTransport: {len(identity)} bytes, {identity[:40]!r}")
    digest, body = identity[start : start + 32], identity[start + 32 :]
    if hashlib.sha256(body).digest() != digest:
        raise WireError(f"the identity of a NixlTransport is damaged: {len(identity)} bytes do not fit their digest")
    try:
        (size,) = struct.unpack_from("<H", body)
        name = body[2 : 2 + size].decode()
    except (struct.error, UnicodeDecodeError) as error:
        raise WireError(f"no name in the identity of a NixlTransport: {body[:40]!r}") from error
    return name, body[2 + size :]


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
