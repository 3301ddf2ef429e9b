"""What do the scheduler's and the workers' halves of the connector tell each other each step?

``StepOrders`` goes down with every engine step, ``StepReport`` comes back; reports of all ranks are aggregated.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hybrid_connector.core.blocks import BlockIds
from hybrid_connector.core.geometry import StateKind
from hybrid_connector.wire.manifest import EngineManifest


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Fill a request's local blocks from a peer's.

    ``peer`` names a manifest by (engine id, incarnation). ``first_tokens`` tokens are held locally already.
    """

    request_id: str
    remote_request_id: str
    peer: tuple[str, str]
    src_block_ids: BlockIds
    dst_block_ids: BlockIds
    num_tokens: int
    first_tokens: int


@dataclass(frozen=True, slots=True)
class CaptureOrder:
    """Write down the state of a finished request before its lease is sealed (P)."""

    request_id: str
    block_ids: BlockIds
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepOrders:
    """What the workers do in engine step ``step``.

    ``manifests``: peers not named before. ``gone``: peers whose place another engine took.
    ``failures``: requests to report as failed, with the reason. ``is_idle``: the step computes nothing.
    ``frees``: leased requests whose blocks go back to the pool.
    """

    step: int
    manifests: tuple[EngineManifest, ...] = ()
    loads: tuple[LoadOrder, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)
    frees: tuple[str, ...] = ()
    captures: tuple[CaptureOrder, ...] = ()
    gone: tuple[tuple[str, str], ...] = ()
    is_idle: bool = False


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """How one rank's load of one request went. ``error`` is ``None`` for a load that ended well.

    ``post_s``: from the order until the last read was posted; ``transfer_s``: from there until the last byte.
    """

    request_id: str
    rank: int
    kind_bytes: tuple[tuple[StateKind, int], ...] = ()
    num_descriptors: int = 0
    post_s: float = 0.0
    transfer_s: float = 0.0
    error: str | None = None

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.kind_bytes)


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a worker (or, aggregated, all workers) say after a step.

    Every step up to ``completed_step`` has completed on the device, on all reporting ranks.
    """

    completed_step: int
    loads: tuple[LoadRecord, ...] = ()

    def aggregate(self, other: "StepReport") -> "StepReport":
        return StepReport(min(self.completed_step, other.completed_step), self.loads + other.loads)
