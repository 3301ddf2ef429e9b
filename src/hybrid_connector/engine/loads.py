"""How does a D worker fill a request's blocks? (invariants I3 and I5)

1. ``start`` marks the compute stream: the blocks may still be written by work queued before.
2. The plan is bound to the request's blocks; for each P rank and pair of cache groups, the cost model says whether its
   runs are read directly, or whole pages through the staging area. ``engine.reading`` reads, writing after the mark.
3. A load ends when *all* its reads and scatters have ended, well or not; only then may its blocks be given back.
4. Where it is to be verified, the bytes are digested before it is reported; the verdict comes with a later step.

``poll`` drives all loads and never waits.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress

from hybrid_connector.core.blocks import RankLayout
from hybrid_connector.core.errors import HybridConnectorError
from hybrid_connector.core.geometry import StateKind
from hybrid_connector.core.planning import plan_transfer
from hybrid_connector.engine.exchange import LoadOrder, LoadRecord, ReadDigest
from hybrid_connector.engine.ordering import ComputeStream, Mark
from hybrid_connector.engine.reading import Clock, Job, Limits, Peer, Reads, cut_direct
from hybrid_connector.transport.base import Region, Transport
from hybrid_connector.transport.binding import Binder, BoundPart, join_parts, kind_bytes
from hybrid_connector.transport.cost import DEFAULTS, START, Cost, Staging, is_staged
from hybrid_connector.transport.digest import Digester, DigestJob, HostDigester, PairedRuns, run_lists
from hybrid_connector.transport.staging import StagingArea, cut
from hybrid_connector.wire.manifest import EngineManifest

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Load:
    order: LoadOrder
    mark: Mark
    started_at: float
    job: Job | None = None
    kinds: dict[StateKind, int] = field(default_factory=dict)
    runs: list[PairedRuns] = field(default_factory=list)
    jobs: list[DigestJob] | None = None
    digests: tuple[ReadDigest, ...] = ()
    error: str | None = None
    failed_at: float = 0.0


class Loads:
    """The loads of one D rank.

    ``on_loaded`` is called with the order and the record of each load that ended well, before the load is reported.
    ``digester``: of the region; by default for one in host memory. ``staging``: where pages may be read whole, and
    ``use_staging`` whether they are; without an area everything is read directly. ``cost``: what reads cost before any
    was seen; by default the figures of the memory's own transport.
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
        staging: StagingArea | None = None,
        use_staging: Staging = "auto",
        cost: Cost | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._layout = layout
        self._region = region
        self._transport = transport
        self._stream = stream
        self._clock = clock
        self._on_loaded = on_loaded
        self._peers: dict[tuple[str, str], Peer] = {}
        self._unusable: dict[tuple[str, str], str] = {}
        self._loads: dict[str, _Load] = {}
        self._digester = digester or HostDigester(region)
        self._decided: list[LoadRecord] = []
        self._staging = staging
        self._use_staging: Staging = use_staging
        self._cost = cost or DEFAULTS[START[region.memory]]
        self._limits = limits or Limits()
        self._reads = Reads(region, transport, staging, clock, self._limits)

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
        self._peers[key] = Peer(manifest, binder, self._cost)
        if self._staging is not None and self._use_staging != "never" and binder.can_stage:
            self._open(self._staging)

    def _open(self, staging: StagingArea) -> None:
        """Where the area cannot be had, say so once; everything is read directly then."""
        had_problem = staging.problem is not None
        staging.open(self._transport)
        if staging.problem is not None and not had_problem:
            logger.warning("%s", staging.problem)

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
            peer.is_gone = True
            for handle in peer.handles.values():
                self._transport.remove_peer(handle)

    def drain(self) -> int:
        """Poll what was posted, post nothing more; returns how many loads may still write."""
        return self._reads.drain()

    def poll(self) -> list[LoadRecord]:
        """Read what may be read now; returns the loads that have ended, or were decided on, since the last call."""
        records, self._decided = self._decided, []
        deadline = self._clock() + self._limits.post_s
        for load in self._loads.values():
            if load.job is None and load.error is None:
                self._bind(load)
                if self._clock() >= deadline:
                    break
        self._reads.advance()
        for load in list(self._loads.values()):
            if self._has_ended(load) and self._is_digested(load):
                del self._loads[load.order.request_id]
                records.append(self._record(load))
        return records

    def _bind(self, load: _Load) -> None:
        order = load.order
        try:
            peer = self._peers.get(order.peer)
            if peer is None:
                raise HybridConnectorError(f"engine {order.peer[0]} restarted before the read was posted")
            bound = peer.binder.bind_parts(
                order.src_block_ids, order.dst_block_ids, order.num_tokens, order.first_tokens
            )
            load.kinds = kind_bytes(part.copies for parts in bound for part in parts)
            job = Job(peer, load.mark)
            for parts in bound:
                self._sort(job, parts)
            if order.verify:
                for copies in map(join_parts, bound):
                    remote = peer.manifest.ranks[copies.src_rank]
                    region = Region(remote.region_address, remote.layout.region_bytes, remote.memory, remote.device)
                    load.runs.extend(run_lists(copies, self._region, region))
        except (HybridConnectorError, ValueError) as error:
            load.error = str(error)
            load.failed_at = self._clock()
            return
        load.job = job
        self._reads.add(job)

    def _sort(self, job: Job, parts: Sequence[BoundPart]) -> None:
        """Give ``job`` what it reads from one P rank, each part the way the cost model says."""
        staging = self._staging
        if staging is None or staging.scatter is None:
            job.pieces.extend(cut_direct(join_parts(parts), self._limits))
            return
        transfer = job.peer.cost(parts[0].copies.src_rank)
        scatter = self._reads.scatter_cost
        ways = [is_staged(part, transfer, scatter, self._use_staging) for part in parts]
        if len(set(ways)) > 1:
            join_parts(parts)  # refuses a block that two groups share, of which each way sees but one
        if staged := list(compress(parts, ways)):
            job.chunks.extend(cut(staged, staging.chunk_bytes))
        if direct := [part for part, way in zip(parts, ways, strict=True) if not way]:
            job.pieces.extend(cut_direct(join_parts(direct), self._limits))

    def _has_ended(self, load: _Load) -> bool:
        """Whether nothing of the load can write any more, and nobody else what it was to fill."""
        if load.job is None:
            return load.error is not None and load.mark.has_passed()
        if load.job.ended_at is None or not load.mark.has_passed():
            return False
        load.error = load.error or load.job.error
        return True

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
        job = load.job
        if job is None or job.posted_at is None or job.ended_at is None:
            posted_at = ended_at = load.failed_at
        else:
            posted_at, ended_at = job.posted_at, job.ended_at
        record = LoadRecord(
            load.order.request_id,
            self._layout.rank,
            tuple(sorted(load.kinds.items())) if load.error is None else (),
            job.num_descriptors if job is not None else 0,
            posted_at - load.started_at,
            ended_at - posted_at,
            load.error,
            load.digests,
            direct_bytes=job.direct_bytes if job is not None else 0,
            staged_bytes=job.staged_bytes if job is not None else 0,
            cost=job.peer.cost(min(job.peer.connected)) if job is not None and job.peer.connected else None,
            staging_in_use_bytes=self._staging.num_used_bytes if self._staging is not None else 0,
        )
        if load.error is None and self._on_loaded is not None:
            try:
                self._on_loaded(load.order, record)
            except Exception:  # whoever looks on must not keep the load from being reported
                logger.exception("request %s, rank %d: after the load", record.request_id, record.rank)
        return record
