"""Does an engine publish exactly the metrics of our table, and vLLM those that the dashboard asks it for?"""

import warnings
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hybrid_connector.engine.exchange import LoadRecord
from hybrid_connector.engine.published import METRICS, Failure
from hybrid_connector.tools import nursery

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what vLLM's dependencies think of each other
    nursery.import_vllm()
    from vllm.v1.metrics import loggers

    from hybrid_connector.engine.metrics import HybridConnectorPromMetrics, HybridConnectorStats


def test_what_an_engine_publishes_is_the_table():
    registry = CollectorRegistry()
    types = {
        kind: lambda kind=kind, **arguments: kind(registry=registry, **arguments)
        for kind in (Counter, Gauge, Histogram)
    }
    published = HybridConnectorPromMetrics(
        SimpleNamespace(kv_transfer_config=None), types, ["model_name", "engine"], {0: ["m", "0"]}
    )
    for metric in METRICS:
        for values in metric.first_series:
            labels = {"model_name": "m", "engine": "0", **dict(zip(metric.labels, values, strict=True))}
            assert registry.get_sample_value(metric.series[-1], labels) == 0, (metric.name, values)

    stats = HybridConnectorStats()
    kinds = (("attention", 7_000_000), ("conv", 1_000_000), ("temporal", 2_000_000))
    for rank in range(4):  # four ranks of 10 MB each, reported a step apart
        step = HybridConnectorStats()
        load = LoadRecord(
            "r", rank, kinds, num_descriptors=3, post_s=0.5, transfer_s=0.25, direct_bytes=4, staged_bytes=5
        )
        step.record(load, "p:5600")
        stats = stats.aggregate(step)
    stats.record(LoadRecord("s", 0, error="gone"), "p:5600", Failure.LEASE_LOST)
    seen = {key.partition("|")[0] for key in stats.data}
    for metric in METRICS:
        if metric.stat not in seen:
            if metric.kind == "histogram":
                stats.observe(metric.stat, [0.5])
            elif metric.kind == "gauge":
                stats.set(metric.stat, 1, *metric.labels)
            else:
                stats.count(metric.stat, 1, *metric.labels)
    published.observe(stats.data)

    text = generate_latest(registry).decode()
    names = {line.split("{")[0] for line in text.splitlines() if not line.startswith("#")}
    names = {name for name in names if not name.endswith("_created")}
    assert names == {series for metric in METRICS for series in metric.series}
    for metric in METRICS:
        assert metric.text in text
    for kind, num_bytes in kinds:
        labels = f'engine="0",kind="{kind}",model_name="m",peer="p:5600"'
        (line,) = [
            line for line in text.splitlines() if line.startswith(f"vllm:hybrid_connector_bytes_total{{{labels}}}")
        ]
        assert float(line.rpartition(" ")[2]) == 4 * num_bytes
    for way, num_bytes in (("direct", 16.0), ("staged", 20.0)):
        assert f'vllm:hybrid_connector_read_bytes_total{{engine="0",model_name="m",way="{way}"}} {num_bytes}' in text
    assert 'vllm:hybrid_connector_transfer_seconds_sum{engine="0",model_name="m"} 1.0' in text
    assert 'vllm:hybrid_connector_failed_loads_total{engine="0",model_name="m",reason="lease_lost"} 1.0' in text


def test_vllm_publishes_what_the_dashboard_asks_it_for(request):
    from importlib.util import module_from_spec, spec_from_file_location
    from pathlib import Path

    path = Path(request.config.rootpath) / "tests" / "test_dashboards.py"
    spec = spec_from_file_location("dashboards", path)
    dashboards = module_from_spec(spec)
    spec.loader.exec_module(dashboards)
    source = Path(loggers.__file__).read_text()
    for name in dashboards.VLLMS:
        assert f'"{name.removesuffix("_bucket").removesuffix("_total")}"' in source
