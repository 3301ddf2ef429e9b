"""Do the dashboard and the alerts ask only for metrics that exist, and does Grafana's schema know all they say?"""

import copy
import itertools
import json
import re
from pathlib import Path

import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from hybrid_connector.engine.published import METRICS, PREFIX

DOCKER = Path(__file__).parent.parent / "docker"
DASHBOARD = json.loads((DOCKER / "grafana" / "dashboards" / "hybrid-connector.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = [
    rule
    for group in yaml.safe_load((DOCKER / "prometheus" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
OURS = {series for metric in METRICS for series in metric.series}
VLLMS = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:request_success_total",
}
"""vLLM's own metrics in use; `integration/test_published_metrics.py` looks for each in vLLM."""


def expressions():
    """Every query, named by where it stands, with Grafana's interval in place."""
    for panel in PANELS:
        for target in panel["targets"]:
            yield f"panel {panel['title']}", target["expr"].replace("$__rate_interval", "5m")
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            query = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert query is not None, variable["name"]
            yield f"variable {variable['name']}", query[1]
    for rule in RULES:
        yield f"alert {rule['alert']}", rule["expr"]


def names_in(query):
    """The metrics that a query names, in order; raises ``ValueError`` where it is no PromQL."""
    names = []

    def visit(node):
        if isinstance(node, promql_parser.VectorSelector):
            names.append(node.name)

    promql_parser.walk(promql_parser.parse(query), visit)
    return names


@pytest.mark.parametrize(("place", "query"), list(expressions()))
def test_a_query_names_only_metrics_that_exist(place, query):
    names = names_in(query)
    assert names, place
    assert set(names) <= OURS | VLLMS | {"up"}
    assert {name for name in names if name.startswith(PREFIX)} <= OURS


def test_a_query_for_another_metric_is_noticed():
    assert names_in(f"sum(rate({PREFIX}lods_total[5m])) / 2 > 0 or vector(0)") == [f"{PREFIX}lods_total"]
    assert f"{PREFIX}lods_total" not in OURS
    with pytest.raises(ValueError, match="unexpected"):
        names_in("sum(rate(x[5m]))) > 0")


def test_no_listed_metric_of_vllm_is_unused():
    used = {name for _, query in expressions() for name in names_in(query)}
    assert used >= VLLMS


def test_counters_are_asked_for_their_rate():
    """A counter's own value means nothing: it starts anew with its process."""
    counters = {series for metric in METRICS if metric.kind == "counter" for series in metric.series}
    for place, query in expressions():
        for name in counters:
            for match in re.finditer(rf"{name}\b", query):
                assert query[: match.start()].endswith("rate("), place


def through_grafana(dashboard):
    """What Grafana's own classes keep of a dashboard."""
    register_default_plugins()
    return json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(copy.deepcopy(dashboard))))


def lost(before, after, path="$"):
    """Where ``after`` does not have what ``before`` has; it may have more, which are defaults."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            yield from lost(value, after[key], f"{path}.{key}") if key in after else [f"{path}.{key}"]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, pair in enumerate(zip(before, after, strict=True)):
            yield from lost(*pair, f"{path}[{index}]")
    elif before != after:
        yield path


def test_grafana_s_schema_knows_all_of_the_dashboard():
    assert list(lost(DASHBOARD, through_grafana(DASHBOARD))) == []


def test_a_field_that_grafana_does_not_know_is_noticed():
    misspelt = copy.deepcopy(DASHBOARD)
    panel = next(panel for panel in misspelt["panels"] if panel["type"] == "timeseries")
    panel["options"]["legend"]["placment"] = "bottom"
    panel["targets"][0]["legendFormt"] = "x"
    assert len(list(lost(misspelt, through_grafana(misspelt)))) == 2


def test_panels_do_not_overlap_and_say_what_they_show():
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = set(
            itertools.product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"]))
        )
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in PANELS:
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]


def test_every_alert_is_tested_and_explained():
    """`promtool test rules` runs the tests (integration/); each alert must fire in one of them."""
    cases = yaml.safe_load((DOCKER / "prometheus" / "alerts_test.yml").read_text())["tests"]
    fired = {case["alertname"] for test in cases for case in test["alert_rule_test"] if case.get("exp_alerts")}
    assert fired == {rule["alert"] for rule in RULES}
    operations = (DOCKER.parent / "docs" / "operations.md").read_text()
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        assert f"`{rule['alert']}`" in operations
