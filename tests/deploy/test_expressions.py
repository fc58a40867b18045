"""Every expression in the manifests against a scrape: names, labels and label values that do not exist are refused."""

import json
import re
from collections.abc import Iterator
from functools import cache

import promql_parser
import pytest
import yaml

from deploy.k8s.builds import K8S
from shared.errors import BY_REASON
from tests.deploy.scraped import ANY, Series, scraped

COMPONENTS = K8S / "components"
# What Grafana and the metrics adapter put in, as something that can be parsed.
VARIABLES = {"$__rate_interval": "5m", "$namespace": "any"}


@cache
def series() -> dict[str, Series]:
    return scraped()


def expressions() -> Iterator[tuple[str, str]]:
    """(where, expression) of alerts, the dashboard and both autoscalers."""
    alerts = yaml.safe_load((COMPONENTS / "monitoring" / "alerts.yaml").read_text())
    for group in alerts["spec"]["groups"]:
        yield from ((rule["alert"], rule["expr"]) for rule in group["rules"])
    dashboard = json.loads((COMPONENTS / "monitoring" / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        yield from ((panel["title"], target["expr"]) for target in panel["targets"])
    for variable in dashboard["templating"]["list"]:
        if found := re.fullmatch(r"label_values\((.*), \w+\)", variable["query"]):
            yield f"variable {variable['name']}", found[1]
    scaled = yaml.safe_load((COMPONENTS / "keda" / "autoscaler.yaml").read_text())
    yield from (("keda", trigger["metadata"]["query"]) for trigger in scaled["spec"]["triggers"])
    for rule in adapter_rules():
        yield "prometheus-adapter", rule["seriesQuery"]
        name = rule["seriesQuery"].partition("{")[0]
        query = rule["metricsQuery"].replace("<<.Series>>", name).replace("<<.GroupBy>>", "pod")
        yield "prometheus-adapter", query.replace("<<.LabelMatchers>>", 'namespace="any"')


def adapter_rules() -> list[dict]:
    return yaml.safe_load((COMPONENTS / "hpa" / "prometheus-adapter-rules.yaml").read_text())["rules"]


def expression_errors(text: str) -> list[str]:
    """What of an expression a scrape does not show."""
    for variable, value in VARIABLES.items():
        text = text.replace(variable, value)
    try:
        tree = promql_parser.parse(text)
    except ValueError as error:
        return [f"{error}"]
    errors: list[str] = []
    _check(tree, errors)
    return errors


def _check(node, errors: list[str]) -> list[Series]:
    """Checks a part of an expression; the series that its value comes from."""
    match type(node).__name__:
        case "VectorSelector":
            return [_selected(node, errors)]
        case "MatrixSelector":
            return _check(node.vector_selector, errors)
        case "AggregateExpr":
            below = _check(node.expr, errors)
            _check_labels(node.modifier.labels if node.modifier else [], below, errors)
            return below
        case "BinaryExpr":
            below = [*_check(node.lhs, errors), *_check(node.rhs, errors)]
            matching = node.modifier.matching if node.modifier else None
            _check_labels(matching.labels if matching else [], below, errors)
            return below
        case "Call":
            return [found for arg in node.args for found in _check(arg, errors)]
        case "ParenExpr" | "UnaryExpr" | "SubqueryExpr":
            return _check(node.expr, errors)
        case "NumberLiteral" | "StringLiteral":
            return []
    raise AssertionError(f"{type(node).__name__} is not checked")


def _selected(selector, errors: list[str]) -> Series:
    found = series().get(selector.name)
    if found is None:
        errors.append(f"no metric {selector.name}")
        return Series([{}], set())
    for matcher in selector.matchers.matchers:
        if not found.has(matcher.name):
            errors.append(f"{selector.name} has no label {matcher.name}")
        elif matcher.name == "job" and matcher.value not in found.jobs:
            errors.append(f"no job {matcher.value} has {selector.name}")
        elif values := found.values(matcher.name) - {ANY}:
            # An alternative that no series has is as wrong as a value.
            wanted = matcher.value.split("|") if str(matcher.op).endswith("Re") else [matcher.value]
            errors += [f"{selector.name} has no {matcher.name}={value}" for value in wanted if value not in values]
    return found


def _check_labels(labels, below: list[Series], errors: list[str]) -> None:
    for label in labels:
        errors += [f"no label {label} to group or match by" for found in below if not found.has(label)]


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_what_it_asks_for_is_there(where: str, expression: str) -> None:
    assert expression_errors(expression) == []


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("rate(vllm:num_request_waiting[5m])", "no metric"),
        ('loraplex_up{proces="engine"}', "no label proces"),
        ('loraplex_up{process="engin"}', "no process=engin"),
        ('loraplex_up{process=~"engine|apis"}', "no process=apis"),
        ("sum by (model) (vllm:num_requests_waiting)", "no label model"),
        ("a_b / on (pool) vllm:num_requests_waiting", "no label pool"),
        ('up{job="inference"}', "no job"),
        ('vllm:num_requests_waiting{job="loraplex-registry"}', "no job"),
        ('loraplex_registry_requests_total{rpc="ResolveAdapters"}', "no rpc=ResolveAdapters"),
        ('vllm:request_success_total{finished_reason="eror"}', "no finished_reason"),
        ("sum(rate(vllm:num_requests_waiting[5m])", "paren"),
    ],
)
def test_what_is_not_there_is_found(expression: str, words: str) -> None:
    assert any(words in error for error in expression_errors(expression)), expression_errors(expression)


def unscoped(expression: str) -> list[str]:
    """Selectors of a name that other servers show as well, without the job that says whose series they are."""
    text = re.sub(r'"[^"]*"', '""', expression)
    selectors = re.findall(r"(vllm:\w+)(\{[^}]*\})?", text)
    return [name for name, labels in selectors if not re.search(r"[{,]\s*job=\"", labels)]


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_names_that_others_show_too_are_those_of_our_replicas(where: str, expression: str) -> None:
    assert unscoped(expression) == []


@pytest.mark.parametrize(
    "expression",
    [
        "avg(vllm:num_requests_waiting) > 3",
        'rate(vllm:request_success_total{finished_reason="stop"}[5m])',
        'vllm:request_success_total{myjob="loraplex-inference"}',
        'vllm:num_requests_waiting{job="loraplex-inference"} / vllm:num_requests_running',
        'vllm:num_requests_waiting{namespace=",job="}',
    ],
)
def test_a_name_without_its_job_is_found(expression: str) -> None:
    assert len(unscoped(expression)) == 1


def test_the_alert_of_failed_requests_counts_what_callers_are_not_to_blame_for() -> None:
    """Requests that never reached the engine are among them: `vllm:request_success` knows of none of these."""
    expression = dict(expressions())["LoraplexRequestsFail"]
    found = re.search(r'loraplex_request_errors_total\{reason=~"([^"]*)"', expression)
    assert found
    counted = set(found[1].split("|"))
    ours = {name for name, error in BY_REASON.items() if error.passes == "always"} - {"DRAINING"}  # a rollout's
    assert counted == ours | {"INTERNAL", "QUEUE_FULL", "ADAPTER_MEMORY", "DEADLINE_UNREACHABLE", "DIGEST_MISMATCH"}
    assert "vllm:" not in expression


def test_the_documented_metrics_are_those_that_there_are() -> None:
    """Tables of docs/observe.md: names without their service's prefix, in the first column."""
    shown = {re.sub(r"_(bucket|count|sum)$", "", name) for name in series() if name.startswith("loraplex_")}
    text = (K8S.parents[1] / "docs" / "observe.md").read_text()
    replica, registry = text.partition("## Traces")[0].split("**A registry**")
    documented = {
        f"{prefix}{name}"
        for part, prefix in ((replica, "loraplex_"), (registry, "loraplex_registry_"))
        for row in re.findall(r"^\| (`.*?) \|", part, re.MULTILINE)
        for name in re.findall(r"`([a-z_]+)`", row)
    }
    assert documented == shown


def test_quantiles_are_of_buckets_and_keep_their_bounds() -> None:
    for where, expression in expressions():
        for quantile in re.findall(r"histogram_quantile\((.*)\)", expression, re.DOTALL):
            assert "_bucket" in quantile, where
            assert re.search(r"by \([^)]*\ble\b", quantile), where


def test_the_autoscaler_asks_for_metrics_that_the_adapter_gives() -> None:
    autoscaler = yaml.safe_load((COMPONENTS / "hpa" / "autoscaler.yaml").read_text())
    asked = {metric["pods"]["metric"]["name"] for metric in autoscaler["spec"]["metrics"]}
    assert asked == {rule["name"]["as"] for rule in adapter_rules()}


def test_the_dashboard_is_laid_out() -> None:
    dashboard = json.loads((COMPONENTS / "monitoring" / "dashboard.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) == len({panel["title"] for panel in panels})
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
