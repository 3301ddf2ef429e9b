"""Which metrics does an engine publish about its transfers? One table, which the code, the documentation, the
dashboard and the alerts share.

It needs neither vLLM nor the Prometheus client, so that whatever names a metric can be held against it anywhere.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from hybrid_connector.core.leases import LeaseRefusal
from hybrid_connector.wire.messages import RefusalReason

PREFIX = "vllm:hybrid_connector_"

Kind = Literal["counter", "gauge", "histogram"]

_SUFFIXES: dict[Kind, tuple[str, ...]] = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
}


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. ``stat`` is what `HybridConnectorStats` calls it.

    ``labels``: beside those that vLLM gives every metric of an engine (model name and engine index).
    ``values``: all that its label can be, where that is known. A series that is known from the start begins at 0;
    one that began at 1 would hide its first count from ``rate`` and ``increase``.
    """

    stat: str
    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()

    @property
    def first_series(self) -> tuple[tuple[str, ...], ...]:
        """The label values of each series that an engine publishes before anything happened."""
        return tuple((value,) for value in self.values) if self.labels else ((),)

    @property
    def full_name(self) -> str:
        """What the Prometheus client is told."""
        return PREFIX + self.name

    @property
    def series(self) -> tuple[str, ...]:
        """What a Prometheus server stores, and a query names."""
        return tuple(self.full_name + suffix for suffix in _SUFFIXES[self.kind])


class Failure(StrEnum):
    """Why a load failed, in the few words that a label may have; D's log has the sentence."""

    BAD_REFERENCE = "bad_reference"  # the request's parameters, or a prompt they do not belong to
    NO_GRANT = "no_grant"  # P did not answer in time
    INCOMPATIBLE = "incompatible"  # the engines cannot exchange state
    REFUSED = "refused"  # P does not grant the lease
    RESTARTED = "restarted"  # P is another than the one that gave the reference
    LEASE_LOST = "lease_lost"  # the grant was not kept until the last byte
    TRANSFER = "transfer"  # a read could not be posted, or failed
    VERIFICATION = "verification"  # P's digest differs, or did not come


LEASE_ENDS = (LeaseRefusal.CONSUMED, LeaseRefusal.EXPIRED, LeaseRefusal.WITHDRAWN)
"""How a lease can end."""

SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the buckets of every histogram."""

METRICS = (
    Metric("loads", "loads", "counter", "Loads that ended well, one per rank and request.", ("peer",)),
    Metric(
        "failed_loads",
        "failed_loads",
        "counter",
        "Loads that failed, one per rank and request.",
        ("reason",),
        tuple(Failure),
    ),
    Metric("verified_loads", "verified_loads", "counter", "Loads whose digest equals P's, one per rank and request."),
    Metric(
        "failed_verifications",
        "failed_verifications",
        "counter",
        "Loads whose digest did not agree with P's, or that P did not confirm, one per rank and request.",
    ),
    Metric("num_descriptors", "descriptors", "counter", "NIXL descriptors of loads that ended well.", ("peer",)),
    Metric("bytes", "bytes", "counter", "Bytes of state loaded, by kind.", ("kind", "peer")),
    Metric(
        "read_bytes",
        "read_bytes",
        "counter",
        "Bytes read from P: direct into place, or staged as whole pages, which hold more than is wanted.",
        ("way",),
    ),
    Metric("post_s", "post_seconds", "histogram", "Seconds from a load's order until its last read was posted."),
    Metric("transfer_s", "transfer_seconds", "histogram", "Seconds from there until its last byte."),
    Metric("acquire_s", "acquire_seconds", "histogram", "Seconds from a request's arrival on D until its grant."),
    Metric("handshake_s", "handshake_seconds", "histogram", "Seconds until a peer's manifest came."),
    Metric(
        "lease_margin_s",
        "lease_margin_seconds",
        "histogram",
        "Seconds that the grant would have lasted still when the load had ended.",
    ),
    Metric("handshakes", "handshakes", "counter", "Handshakes that D began."),
    Metric("handshakes_failed", "failed_handshakes", "counter", "Handshakes without a manifest that D can read from."),
    Metric("grants", "grants", "counter", "Leases granted to D."),
    Metric("renewals", "renewals", "counter", "Renewals that P confirmed."),
    Metric("grants_lost", "lost_grants", "counter", "Grants that ended before D was done."),
    Metric("breaker_opened", "breaker_openings", "counter", "Times D gave up on a silent peer for a while."),
    Metric("refused", "refusals", "counter", "What P refused its peers, by reason.", ("reason",), tuple(RefusalReason)),
    Metric("leases_ended", "leases_ended", "counter", "Leases of P that ended, by how.", ("how",), LEASE_ENDS),
    Metric("leases", "leases", "gauge", "Leases of P that are out."),
)
