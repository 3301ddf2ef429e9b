"""Do dashboard, alerts and pages ask only for metrics that exist, and does Grafana know all that the dashboard says?"""

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

from hybrid_connector.engine.published import METRICS, PREFIX, SECONDS, Failure

DOCKER = Path(__file__).parent.parent / "docker"
DOCS = DOCKER.parent / "docs"
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
    for page in ("metrics.md", "operations.md"):
        for query in re.findall(r"`([^`\n]*\(vllm:[^`\n]*)`", (DOCS / page).read_text()):
            yield f"{page}: {query}", query


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
                assert query[: match.start()].endswith(("rate(", "increase(")), place


def labels_in(query):
    """Each label that a query names of one of our series, with the value it must have or ``None``."""
    found = set()

    def visit(node, groups):
        if isinstance(node, promql_parser.AggregateExpr):
            groups = groups | set(node.modifier.labels if node.modifier else ())
        if isinstance(node, promql_parser.VectorSelector):
            found.update((node.name, label, None) for label in groups)
            found.update((node.name, matcher.name, matcher.value) for matcher in node.matchers.matchers)
        children = (getattr(node, name, None) for name in ("expr", "vector_selector", "lhs", "rhs"))
        for child in (*children, *getattr(node, "args", ())):
            if child is not None:
                visit(child, groups)

    visit(promql_parser.parse(query), frozenset())
    return found


def unknown_labels(query):
    """What a query asks of one of our series that it does not have."""
    for name, label, value in labels_in(query):
        for metric in METRICS:
            if name in metric.series:
                values = dict.fromkeys(metric.labels, metric.values)
                values |= dict.fromkeys(("job", "instance", "engine", "model_name"), ())
                values |= {"le": tuple(map(str, SECONDS))} if name.endswith("_bucket") else {}
                if label not in values or (value is not None and values[label] and value not in values[label]):
                    yield name, label, value


@pytest.mark.parametrize(("place", "query"), list(expressions()))
def test_a_query_names_only_labels_and_values_that_exist(place, query):
    assert list(unknown_labels(query)) == [], place


@pytest.mark.parametrize(
    ("query", "label", "value"),
    [
        (f"sum by (peer) (rate({PREFIX}failed_loads_total[5m]))", "peer", None),
        (f"sum by (kind, rank) (rate({PREFIX}bytes_total[5m])) / 2", "rank", None),
        (f'1 + sum(rate({PREFIX}failed_loads_total{{reason="lost"}}[5m]))', "reason", "lost"),
        (f'histogram_quantile(0.5, rate({PREFIX}post_seconds_bucket{{le="5"}}[5m]))', "le", "5"),
        (f"sum by (le) ({PREFIX}leases)", "le", None),
    ],
)
def test_a_label_or_value_that_no_series_has_is_noticed(query, label, value):
    ((_, *found),) = unknown_labels(query)
    assert found == [label, value]


def test_every_metric_is_on_the_dashboard():
    shown = {
        name
        for panel in PANELS
        for target in panel["targets"]
        for name in names_in(target["expr"].replace("$__rate_interval", "5m"))
    }
    assert [metric.name for metric in METRICS if not shown & set(metric.series)] == []


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
    operations = (DOCS / "operations.md").read_text()
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "runbook"}
        assert f"| `{rule['alert']}` |" in operations


def test_every_reason_of_a_failed_load_has_its_runbook_and_its_row():
    (rule,) = [rule for rule in RULES if rule["alert"] == "LoadsFailing"]
    assert re.findall(r'eq \$labels\.reason "(\w+)"', rule["annotations"]["runbook"]) == list(Failure)
    operations = (DOCS / "operations.md").read_text()
    table = operations.partition("## Failed loads")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(Failure)
