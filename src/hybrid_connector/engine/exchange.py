"""What do the scheduler's and the workers' halves of the connector tell each other each step?

``StepOrders`` goes down with every engine step, ``StepReport`` comes back; reports of all ranks are aggregated.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hybrid_connector.core.blocks import BlockIds
from hybrid_connector.core.digests import RunList
from hybrid_connector.core.geometry import StateKind
from hybrid_connector.transport.cost import Cost
from hybrid_connector.wire.manifest import EngineManifest


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Fill a request's local blocks from a peer's.

    ``peer`` names a manifest by (engine id, incarnation). ``first_tokens`` tokens are held locally already.
    ``verify``: digest what arrived, and wait for the scheduler's verdict.
    """

    request_id: str
    remote_request_id: str
    peer: tuple[str, str]
    src_block_ids: BlockIds
    dst_block_ids: BlockIds
    num_tokens: int
    first_tokens: int
    verify: bool = False


@dataclass(frozen=True, slots=True)
class CaptureOrder:
    """Write down the state of a finished request before its lease is sealed (P)."""

    request_id: str
    block_ids: BlockIds
    num_tokens: int


@dataclass(frozen=True, slots=True)
class DigestOrder:
    """Digest bytes of a leased request on rank ``rank`` (P). ``number``: D's for this run list, among the request's.

    ``block_ids`` and ``num_tokens`` are the lease's: only bytes of that state may be digested.
    """

    request_id: str
    number: int
    rank: int
    runs: RunList
    block_ids: BlockIds
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepOrders:
    """What the workers do in engine step ``step``.

    ``manifests``: peers not named before. ``gone``: peers whose place another engine took.
    ``failures``: requests to report as failed, with the reason. ``is_idle``: the step computes nothing.
    ``frees``: leased requests whose blocks go back to the pool. ``passed``: verified requests to report as loaded.
    ``refuted``: those that P did not confirm, with the reason. ``digests``: what P's ranks are to digest.
    """

    step: int
    manifests: tuple[EngineManifest, ...] = ()
    loads: tuple[LoadOrder, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)
    frees: tuple[str, ...] = ()
    captures: tuple[CaptureOrder, ...] = ()
    gone: tuple[tuple[str, str], ...] = ()
    is_idle: bool = False
    passed: tuple[str, ...] = ()
    refuted: Mapping[str, str] = field(default_factory=dict)
    digests: tuple[DigestOrder, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadDigest:
    """What D rank ``dst_rank`` has read from P rank ``src_rank``: where it lies there, and the digest of what came."""

    src_rank: int
    dst_rank: int
    src: RunList
    digest: int


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """How one rank's load of one request went. ``error`` is ``None`` for a load that ended well.

    ``post_s``: from the order until the last read was posted; ``transfer_s``: from there until the last byte.
    ``digests``: of a load to be verified. ``verified``: the verdict on a load that was recorded before.
    ``direct_bytes``, ``staged_bytes``: read from P straight into place, and as whole pages into the staging area, which
    hold more than was wanted. ``cost``: what the cost model makes of reads from that peer by now.
    """

    request_id: str
    rank: int
    kind_bytes: tuple[tuple[StateKind, int], ...] = ()
    num_descriptors: int = 0
    post_s: float = 0.0
    transfer_s: float = 0.0
    error: str | None = None
    digests: tuple[ReadDigest, ...] = ()
    verified: bool | None = None
    direct_bytes: int = 0
    staged_bytes: int = 0
    cost: Cost | None = None
    staging_in_use_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.kind_bytes)


@dataclass(frozen=True, slots=True)
class DigestRecord:
    """The answer to a ``DigestOrder``: the digest, or why there is none."""

    request_id: str
    number: int
    digest: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a worker (or, aggregated, all workers) say after a step.

    Every step up to ``completed_step`` has completed on the device, on all reporting ranks.
    """

    completed_step: int
    loads: tuple[LoadRecord, ...] = ()
    digests: tuple[DigestRecord, ...] = ()

    def aggregate(self, other: "StepReport") -> "StepReport":
        completed_step = min(self.completed_step, other.completed_step)
        return StepReport(completed_step, self.loads + other.loads, self.digests + other.digests)
