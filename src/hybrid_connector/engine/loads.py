"""How does a D worker fill a request's blocks? (invariants I3 and I5)

1. ``start`` marks the compute stream: the blocks may still be written by work queued before.
2. Once the mark has passed, the plan is bound to the request's blocks and one read per P rank is posted.
3. A load ends when *all* its reads have ended, well or not; only then may its blocks be given back.
4. Where it is to be verified, the bytes are digested before it is reported; the verdict comes with a later step.

``poll`` drives all loads and never waits.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from hybrid_connector.core.blocks import RankLayout
from hybrid_connector.core.errors import HybridConnectorError
from hybrid_connector.core.geometry import StateKind
from hybrid_connector.core.planning import plan_transfer
from hybrid_connector.engine.exchange import LoadOrder, LoadRecord, ReadDigest
from hybrid_connector.engine.ordering import ComputeStream, Mark
from hybrid_connector.transport.base import Region, Transfer, TransferState, Transport
from hybrid_connector.transport.binding import Binder, kind_bytes
from hybrid_connector.transport.digest import Digester, DigestJob, HostDigester, PairedRuns, run_lists
from hybrid_connector.wire.manifest import EngineManifest

logger = logging.getLogger(__name__)

Clock = Callable[[], float]


@dataclass(slots=True)
class _Peer:
    """A P engine this rank reads from; its ranks are added to the transport with each read."""

    manifest: EngineManifest
    binder: Binder
    handles: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Load:
    order: LoadOrder
    mark: Mark
    started_at: float
    posted_at: float | None = None
    ended_at: float | None = None
    reads: list[Transfer] = field(default_factory=list)
    ended: list[Transfer] = field(default_factory=list)
    kinds: dict[StateKind, int] = field(default_factory=dict)
    runs: list[PairedRuns] = field(default_factory=list)
    jobs: list[DigestJob] | None = None
    digests: tuple[ReadDigest, ...] = ()
    error: str | None = None


class Loads:
    """The loads of one D rank.

    ``on_loaded`` is called with the order and the record of each load that ended well, before the load is reported.
    ``digester``: of the region; by default for one in host memory.
    """

    def __init__(
        self,
        layout: RankLayout,
        region: Region,
        transport: Transport,
        stream: ComputeStream,
        clock: Clock,
        on_loaded: Callable[[LoadOrder, LoadRecord], None] | None = None,
        digester: Digester | None = None,
    ) -> None:
        self._layout = layout
        self._region = region
        self._transport = transport
        self._stream = stream
        self._clock = clock
        self._on_loaded = on_loaded
        self._peers: dict[tuple[str, str], _Peer] = {}
        self._unusable: dict[tuple[str, str], str] = {}
        self._loads: dict[str, _Load] = {}
        self._digester = digester or HostDigester(region)
        self._decided: list[LoadRecord] = []

    def __len__(self) -> int:
        return len(self._loads)

    def add_peer(self, manifest: EngineManifest) -> None:
        """Make a P engine known, by (engine id, incarnation).

        One that cannot be read from fails the loads that need it, each with the reason.
        """
        key = manifest.engine_id, manifest.incarnation
        if key in self._peers:
            return
        srcs = [rank.layout for rank in manifest.ranks]
        bases = {rank.rank: rank.region_address for rank in manifest.ranks}
        try:
            plan = plan_transfer(self._layout, srcs)
            binder = Binder(plan, self._layout, srcs, dst_base=self._region.address, src_bases=bases)
        except (HybridConnectorError, ValueError) as error:
            self._unusable[key] = f"engine {key[0]} cannot be read from: {error}"
            logger.error("%s", self._unusable[key])
            return
        self._peers[key] = _Peer(manifest, binder)

    def start(self, order: LoadOrder) -> None:
        """Begin a load; everything queued on the compute stream so far is waited for before the first byte moves."""
        assert order.request_id not in self._loads, f"{order.request_id}: its last load has not ended yet"
        if order.peer not in self._peers:
            restarted = f"engine {order.peer[0]} restarted after it granted the lease"
            self.fail(order.request_id, self._unusable.get(order.peer, restarted))
            return
        self._loads[order.request_id] = _Load(order, self._stream.mark(), self._clock())

    def fail(self, request_id: str, reason: str) -> None:
        """Report a request as failed that never started to load here, or that was loaded and must not count."""
        self._decided.append(LoadRecord(request_id, self._layout.rank, error=reason))

    def refute(self, request_id: str, reason: str) -> None:
        """Report a request as failed that was loaded here, but that P did not confirm."""
        self._decided.append(LoadRecord(request_id, self._layout.rank, error=reason, verified=False))

    def accept(self, request_id: str) -> None:
        """Report a request as loaded whose digests agree with P's."""
        self._decided.append(LoadRecord(request_id, self._layout.rank, verified=True))

    def forget_peer(self, key: tuple[str, str]) -> None:
        """A P engine is gone for good. Its loads that were not posted fail; those that were run on to their end."""
        self._unusable.pop(key, None)
        peer = self._peers.pop(key, None)
        if peer is not None:
            for handle in peer.handles.values():
                self._transport.remove_peer(handle)

    def drain(self) -> int:
        """Poll what was posted, post nothing more; returns how many loads may still write."""
        running = 0
        for load in self._loads.values():
            if load.posted_at is not None and not self._has_ended(load):
                running += 1
        return running

    def poll(self) -> list[LoadRecord]:
        """Post what may be posted and return the loads that have ended, or were decided on, since the last call."""
        records, self._decided = self._decided, []
        for load in list(self._loads.values()):
            if load.posted_at is None and load.mark.has_passed():
                self._post(load)
            if load.posted_at is not None and self._has_ended(load) and self._is_digested(load):
                del self._loads[load.order.request_id]
                records.append(self._record(load))
        return records

    def _post(self, load: _Load) -> None:
        order = load.order
        try:
            peer = self._peers.get(order.peer)
            if peer is None:
                raise HybridConnectorError(f"engine {order.peer[0]} restarted before the read was posted")
            bound = peer.binder.bind(order.src_block_ids, order.dst_block_ids, order.num_tokens, order.first_tokens)
            load.kinds = kind_bytes(bound)
            for copies in bound:
                remote = peer.manifest.ranks[copies.src_rank]
                # Each time: cheap for a known peer, and after a failed read it is what connects again.
                handle = peer.handles[copies.src_rank] = self._transport.add_peer(remote.identity)
                region = Region(remote.region_address, remote.layout.region_bytes, remote.memory, remote.device)
                load.reads.append(self._transport.read(handle, copies, self._region, region))
                if order.verify:
                    load.runs.extend(run_lists(copies, self._region, region))
        except (HybridConnectorError, ValueError) as error:
            load.error = str(error)
        load.posted_at = self._clock()

    def _has_ended(self, load: _Load) -> bool:
        """Whether no read of the load can write any more. An error of one read does not end the others."""
        running = []
        for read in load.reads:
            state = read.poll()
            if state is TransferState.PENDING:
                running.append(read)
                continue
            if state is TransferState.FAILED:
                load.error = load.error or read.error or "read failed"
            load.ended.append(read)
        load.reads = running
        if not running and load.ended_at is None:
            load.ended_at = self._clock()
        return not running

    def _is_digested(self, load: _Load) -> bool:
        """Whether the digests are there that the load's order asks for; those of a failed load are of no use."""
        if load.error is not None or not load.order.verify:
            return True
        try:
            if load.jobs is None:
                load.jobs = [self._digester.begin(pair.dst) for pair in load.runs]
            digests = [job.poll() for job in load.jobs]
        except Exception as error:  # a device may have no memory left; that costs the request, not the engine
            load.error = f"what arrived cannot be digested: {error}"
            return True
        if None in digests:
            return False
        load.digests = tuple(
            ReadDigest(pair.src_rank, self._layout.rank, pair.src, digest)
            for pair, digest in zip(load.runs, digests, strict=True)
            if digest is not None
        )
        return True

    def _record(self, load: _Load) -> LoadRecord:
        assert load.posted_at is not None
        assert load.ended_at is not None
        record = LoadRecord(
            load.order.request_id,
            self._layout.rank,
            tuple(sorted(load.kinds.items())) if load.error is None else (),
            sum(read.num_descriptors for read in load.ended),
            load.posted_at - load.started_at,
            load.ended_at - load.posted_at,
            load.error,
            load.digests,
        )
        if load.error is None and self._on_loaded is not None:
            try:
                self._on_loaded(load.order, record)
            except Exception:  # whoever looks on must not keep the load from being reported
                logger.exception("request %s, rank %d: after the load", record.request_id, record.rank)
        return record
