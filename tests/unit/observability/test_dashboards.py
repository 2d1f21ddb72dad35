"""Dashboards and rules as files: whole, valid, and naming only what is exported."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from octavo.metrics import RouterMetrics, SchedulerMetrics, WorkerMetrics
from tests.prometheus_server import promtool
from tests.unit.observability.queries import (
    RULES,
    alert_expressions,
    dashboards,
    panel_queries,
    selectors_of,
)

RULE_TESTS = Path(__file__).parent / "octavo_rules_test.yaml"


def exported() -> dict[str, set[str]]:
    """Series names and the labels they may have."""
    names: dict[str, set[str]] = {"up": set()}
    for build in (RouterMetrics, SchedulerMetrics, WorkerMetrics):
        metrics = build(CollectorRegistry())
        for spec in metrics.specs:
            suffixes = ("_bucket", "_sum", "_count") if spec.kind == "histogram" else ("",)
            for suffix in suffixes:
                names[spec.name + suffix] = set(spec.labels) | {"le"}
        for family in metrics.registry.collect():
            names |= {s.name: set() for s in family.samples if s.name.startswith("process_")}
    return names


def test_queries_name_what_is_exported() -> None:
    known = exported()
    expressions = [query.expression for query in panel_queries()]
    expressions += alert_expressions().values()
    assert len(expressions) > 80
    for expression in expressions:
        selectors = selectors_of(expression)
        assert selectors, expression
        for selector in selectors:
            name, _, matchers = selector.partition("{")
            assert name in known, expression
            labels = set(re.findall(r"(\w+)\s*=", matchers)) - {"instance", "job"}
            assert labels <= known[name], selector


def test_every_metric_is_shown_somewhere() -> None:
    shown = {
        re.sub(r"_(bucket|sum|count)$", "", selector.split("{")[0])
        for query in panel_queries()
        for selector in selectors_of(query.expression)
    }
    specs = [
        spec
        for build in (RouterMetrics, SchedulerMetrics, WorkerMetrics)
        for spec in build(CollectorRegistry()).specs
    ]
    # What the router sums up per request is there as the cells' own counts.
    alike = {
        "octavo_prompt_tokens_total",
        "octavo_cached_prompt_tokens_total",
        "octavo_generation_tokens_total",
    }
    assert {spec.name for spec in specs} - shown == alike


@pytest.mark.parametrize("name", dashboards())
def test_a_dashboard_is_whole(name: str) -> None:
    dashboard = dashboards()[name]
    assert dashboard["uid"] == f"octavo-{name}"
    variables = {item["name"]: item for item in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    panels: list[dict[str, Any]] = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 10
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        legends = [target["legendFormat"] for target in panel["targets"]]
        assert len(set(legends)) == len(legends), panel["title"]
        used = set(re.findall(r"\$(\w+)", str(panel["targets"]))) - {"__rate_interval"}
        assert used <= variables.keys()


def test_rules_are_valid_and_tested() -> None:
    promtool("check", "rules", RULES)
    promtool("test", "rules", RULE_TESTS)
    tests = yaml.safe_load(RULE_TESTS.read_text(encoding="utf-8"))["tests"]
    fired = {
        case["alertname"] for t in tests for case in t["alert_rule_test"] if case.get("exp_alerts")
    }
    assert fired == alert_expressions().keys()
