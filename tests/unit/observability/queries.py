"""Every PromQL expression of dashboards, alert rules and the autoscaler, and what it names.

Entry points: `dashboards`, `panel_queries`, `alert_expressions`, `scaler_queries`, `selectors_of`.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

FOLDER = Path(__file__).parents[3] / "k8s/components/observability"
RULES = FOLDER / "rules/octavo.yaml"
SCALER = FOLDER.parent / "autoscaling/worker.yaml"
_SERIES = re.compile(r"\b(?:octavo|process|vllm)[a-z_:]+\b(?:\{[^}]*\})?|\bup\b")
# A range for rates over scrapes that come once a second.
_INTERVAL = "20s"


class Query(NamedTuple):
    """An expression, variables filled in, and where it stands."""

    place: str
    expression: str


def dashboards() -> dict[str, dict[str, Any]]:
    """By file name without its ending."""
    paths = sorted((FOLDER / "dashboards").glob("*.json"))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def panel_queries() -> Iterator[Query]:
    """Of all panels of all dashboards."""
    for name, dashboard in dashboards().items():
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                expression = target["expr"].replace("$__rate_interval", _INTERVAL)
                yield Query(f"{name}: {panel['title']}", expression.replace("$instance", ".*"))


def alert_expressions() -> dict[str, str]:
    """By the alert's name."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def scaler_queries() -> list[str]:
    """What KEDA asks to scale the workers."""
    scaled = yaml.safe_load(SCALER.read_text(encoding="utf-8"))
    return [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]


def selectors_of(expression: str) -> list[str]:
    """The series that an expression reads, with their matchers."""
    return _SERIES.findall(expression)
