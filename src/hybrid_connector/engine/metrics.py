"""What moved, how fast, and what failed: sums over an interval, as vLLM's statistics want them."""

from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from hybrid_connector.engine.exchange import LoadRecord
from hybrid_connector.engine.published import METRICS

_MIB = 2**20


@dataclass
class HybridConnectorStats(KVConnectorStats):
    """Sums by name: ``loads``, ``failed_loads``, ``num_descriptors``, ``post_s``, ``transfer_s``, ``bytes_<kind>``,
    ``read_bytes_direct``, ``read_bytes_staged``, ``verified_loads``, ``failed_verifications``.

    One load is one rank's share of one request.
    """

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def record(self, load: LoadRecord) -> None:
        """Count one rank's load, or the verdict on one that was counted before."""
        if load.verified is not None:
            self._add("verified_loads" if load.verified else "failed_verifications", 1)
            if load.verified:
                return
        if load.error is not None:
            self._add("failed_loads", 1)
            return
        self._add("loads", 1)
        self._add("num_descriptors", load.num_descriptors)
        self._add("post_s", load.post_s)
        self._add("transfer_s", load.transfer_s)
        for kind, num_bytes in load.kind_bytes:
            self._add(f"bytes_{kind}", num_bytes)
        self._add("read_bytes_direct", load.direct_bytes)
        self._add("read_bytes_staged", load.staged_bytes)

    def aggregate(self, other: KVConnectorStats) -> "HybridConnectorStats":
        for name, value in other.data.items():
            self._add(name, value)
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line of the engine's log: counts, MiB by kind, and means per load."""
        loads = self.data.get("loads", 0)
        line: dict[str, int | float] = {"Loads": loads, "Failed loads": self.data.get("failed_loads", 0)}
        for name, value in sorted(self.data.items()):
            if name.startswith("bytes_"):
                line[f"MiB {name.removeprefix('bytes_')}"] = round(value / _MIB, 3)
        if staged := self.data.get("read_bytes_staged"):
            line["MiB staged"] = round(staged / _MIB, 3)
        for name, text in (("verified_loads", "Verified loads"), ("failed_verifications", "Failed verifications")):
            if name in self.data:
                line[text] = self.data[name]
        if loads:
            line["Avg descriptors"] = round(self.data["num_descriptors"] / loads, 1)
            line["Avg post time (ms)"] = round(self.data["post_s"] / loads * 1e3, 3)
            line["Avg transfer time (ms)"] = round(self.data["transfer_s"] / loads * 1e3, 3)
        return line

    def is_empty(self) -> bool:
        return not self.data

    def _add(self, name: str, value: Any) -> None:
        self.data[name] = self.data.get(name, 0) + value


class HybridConnectorPromMetrics(KVConnectorPromMetrics):
    """The same sums as Prometheus counters, ``vllm:hybrid_connector_*``; see `METRICS`."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            metric.stat: metric_types[Counter](
                name=metric.full_name, documentation=metric.text, labelnames=[*labelnames, *metric.labels]
            )
            for metric in METRICS
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            stat = next((stat for stat in ("bytes_", "read_bytes_") if name.startswith(stat)), name)
            rest = [name.removeprefix(stat)] if stat != name else []
            self._counters[stat].labels(*labels, *rest).inc(value)
