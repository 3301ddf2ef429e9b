"""What moved, how fast, and what failed, over an interval, as vLLM's statistics want it.

Everything is counted in the scheduler's process, which alone knows peers, leases and every rank's report. One load is
one rank's share of one request.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from hybrid_connector.engine.exchange import LoadRecord
from hybrid_connector.engine.published import METRICS, SECONDS, Failure, Metric

_MIB = 2**20
_BY_STAT: Mapping[str, Metric] = {metric.stat: metric for metric in METRICS}
MAX_PEERS = 64
"""Peers with a label of their own; the others share one: a label must not grow with what clients name."""


@dataclass
class HybridConnectorStats(KVConnectorStats):
    """By metric and labels, ``stat|label|...``: a sum (counter), the last value (gauge), a list (histogram)."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def record(self, load: LoadRecord, peer: str = "", failure: Failure = Failure.TRANSFER) -> None:
        """Count one rank's load, or the verdict on one that was counted before."""
        if load.verified is not None:
            self.count("verified_loads" if load.verified else "failed_verifications", 1)
            if load.verified:
                return
        if load.error is not None:
            self.count("failed_loads", 1, failure)
            return
        self.count("loads", 1, peer)
        self.count("num_descriptors", load.num_descriptors, peer)
        for kind, num_bytes in load.kind_bytes:
            self.count("bytes", num_bytes, kind, peer)
        self.count("read_bytes", load.direct_bytes, "direct")
        self.count("read_bytes", load.staged_bytes, "staged")
        self.observe("post_s", [load.post_s])
        self.observe("transfer_s", [load.transfer_s])

    def count(self, stat: str, more: int, *labels: str) -> None:
        key = "|".join((stat, *labels))
        self.data[key] = self.data.get(key, 0) + more

    def observe(self, stat: str, seconds: Iterable[float]) -> None:
        self.data.setdefault(stat, []).extend(seconds)

    def set(self, stat: str, value: int) -> None:
        self.data[stat] = value

    def aggregate(self, other: KVConnectorStats) -> "HybridConnectorStats":
        for key, value in other.data.items():
            kind = _BY_STAT[key.partition("|")[0]].kind
            if kind == "gauge" or key not in self.data:
                self.data[key] = value
            else:
                self.data[key] = self.data[key] + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line of the engine's log: counts, MiB by kind, and means."""
        sums: dict[str, float] = {}
        line: dict[str, int | float] = {}
        for key, value in sorted(self.data.items()):
            stat, *labels = key.split("|")
            if _BY_STAT[stat].kind == "counter":
                sums[stat] = sums.get(stat, 0) + value
            if stat == "bytes":
                name = f"MiB {labels[0]}"
                line[name] = round(line.get(name, 0) + value / _MIB, 3)
            if (stat, *labels) == ("read_bytes", "staged") and value:
                line["MiB staged"] = round(value / _MIB, 3)
            if stat in ("failed_loads", "refused", "leases_ended"):
                line[f"{stat.replace('_', ' ').capitalize()} ({labels[0]})"] = value
        loads = sums.get("loads", 0)
        shown = {"Loads": loads, **line}
        for stat in ("verified_loads", "failed_verifications", "grants_lost", "breaker_opened"):
            if sums.get(stat):
                shown[stat.replace("_", " ").capitalize()] = sums[stat]
        if loads:
            shown["Avg descriptors"] = round(sums["num_descriptors"] / loads, 1)
        for stat, text in (("post_s", "post"), ("transfer_s", "transfer"), ("acquire_s", "acquire")):
            if times := self.data.get(stat):
                shown[f"Avg {text} time (ms)"] = round(sum(times) / len(times) * 1e3, 3)
        if margins := self.data.get("lease_margin_s"):
            shown["Least lease margin (s)"] = round(min(margins), 3)
        return shown

    def is_empty(self) -> bool:
        return not self.data


class HybridConnectorPromMetrics(KVConnectorPromMetrics):
    """The same as Prometheus metrics, ``vllm:hybrid_connector_*``; see `METRICS`."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        types = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
        self._metrics = {
            metric.stat: metric_types[types[metric.kind]](
                name=metric.full_name,
                documentation=metric.text,
                labelnames=[*labelnames, *metric.labels],
                **({"buckets": SECONDS} if metric.kind == "histogram" else {}),
            )
            for metric in METRICS
        }
        for metric in METRICS:
            for engine_values in per_engine_labelvalues.values():
                for values in metric.first_series:
                    self._metrics[metric.stat].labels(*engine_values, *values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, value in transfer_stats_data.items():
            stat, *labels = key.split("|")
            metric = self._metrics[stat].labels(*self.per_engine_labelvalues[engine_idx], *labels)
            match _BY_STAT[stat].kind:
                case "counter":
                    metric.inc(value)
                case "gauge":
                    metric.set(value)
                case "histogram":
                    for seconds in value:
                        metric.observe(seconds)
