"""Does an engine publish exactly the metrics of our table, and vLLM those that the dashboard asks it for?"""

import warnings
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hybrid_connector.engine.exchange import LoadRecord
from hybrid_connector.engine.published import METRICS
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
    stats = HybridConnectorStats()
    kinds = (("attention", 10), ("conv", 20), ("temporal", 30))
    times = {"post_s": 0.5, "transfer_s": 0.25}
    stats.record(LoadRecord("r", 0, kind_bytes=kinds, num_descriptors=3, **times, direct_bytes=40, staged_bytes=50))
    stats.record(LoadRecord("s", 0, error="gone"))
    stats.record(LoadRecord("r", 0, verified=True))
    stats.record(LoadRecord("t", 0, error="another digest", verified=False))
    published.observe(stats.data)

    text = generate_latest(registry).decode()
    names = {line.split("{")[0] for line in text.splitlines() if not line.startswith("#")}
    names = {name for name in names if not name.endswith("_created")}
    assert names == {series for metric in METRICS for series in metric.series}
    for metric in METRICS:
        assert metric.text in text
    assert 'vllm:hybrid_connector_bytes_total{engine="0",kind="conv",model_name="m"} 20.0' in text
    for way, num_bytes in (("direct", 40.0), ("staged", 50.0)):
        assert f'vllm:hybrid_connector_read_bytes_total{{engine="0",model_name="m",way="{way}"}} {num_bytes}' in text


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
