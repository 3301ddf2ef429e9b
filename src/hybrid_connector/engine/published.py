"""Which metrics does an engine publish about its transfers? One table, which the code, the documentation, the
dashboard and the alerts share.

It needs neither vLLM nor the Prometheus client, so that whatever names a metric can be held against it anywhere.
"""

from dataclasses import dataclass
from typing import Literal

PREFIX = "vllm:hybrid_connector_"

Kind = Literal["counter", "gauge", "histogram"]

_SUFFIXES: dict[Kind, tuple[str, ...]] = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
}


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. ``stat`` is what `HybridConnectorStats` calls it, or begins with where ``labels`` has the rest.

    ``labels``: beside those that vLLM gives every metric of an engine (model name and engine index).
    """

    stat: str
    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """What the Prometheus client is told."""
        return PREFIX + self.name

    @property
    def series(self) -> tuple[str, ...]:
        """What a Prometheus server stores, and a query names."""
        return tuple(self.full_name + suffix for suffix in _SUFFIXES[self.kind])


METRICS = (
    Metric("loads", "loads", "counter", "Loads that ended well, one per rank and request."),
    Metric("failed_loads", "failed_loads", "counter", "Loads that failed, one per rank and request."),
    Metric("verified_loads", "verified_loads", "counter", "Loads whose digest equals P's, one per rank and request."),
    Metric(
        "failed_verifications",
        "failed_verifications",
        "counter",
        "Loads whose digest did not agree with P's, or that P did not confirm, one per rank and request.",
    ),
    Metric("num_descriptors", "descriptors", "counter", "NIXL descriptors of loads that ended well."),
    Metric("post_s", "post_seconds", "counter", "Seconds from a load's order until its last read was posted."),
    Metric("transfer_s", "transfer_seconds", "counter", "Seconds from there until its last byte."),
    Metric("bytes_", "bytes", "counter", "Bytes of state loaded, by kind.", labels=("kind",)),
    Metric(
        "read_bytes_",
        "read_bytes",
        "counter",
        "Bytes read from P: direct into place, or staged as whole pages, which hold more than is wanted.",
        labels=("way",),
    ),
)
