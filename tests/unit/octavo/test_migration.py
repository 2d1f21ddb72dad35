"""What MIGRATION.md says of Octavo's own flags, metrics and endpoints is there."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from octavo.metrics import RouterMetrics, SchedulerMetrics, WorkerMetrics
from octavo.settings import RouterSettings, SchedulerSettings, WorkerSettings

REPO = Path(__file__).parents[3]
PAGE = (REPO / "MIGRATION.md").read_text(encoding="utf-8")
# A flag of `octavo serve` itself: how many processes of a service.
SERVE_FLAGS = {"workers"}


def column(section: str, index: int) -> list[str]:
    """The cells of one column of a section's table, head and rule left out."""
    text = PAGE.split(f"## {section}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [row[index].strip() for row in rows[2:]]


def quoted(cells: list[str], pattern: str) -> list[str]:
    return [name for cell in cells for name in re.findall(pattern, cell)]


def test_flags_are_settings() -> None:
    known = {
        item.name
        for cls in (RouterSettings, SchedulerSettings, WorkerSettings)
        for item in fields(cls)
    }
    flags = quoted(column("Flags", 1), r"`--([a-z-]+)")
    assert len(flags) >= 15
    assert {flag.replace("-", "_") for flag in flags} <= known | SERVE_FLAGS


def test_metrics_are_exported() -> None:
    registries = [CollectorRegistry() for _ in range(3)]
    for build, registry in zip(
        (RouterMetrics, SchedulerMetrics, WorkerMetrics), registries, strict=True
    ):
        build(registry)
    known = {metric.name for registry in registries for metric in registry.collect()}
    names = quoted(column("Metrics", 1), r"`(octavo_[a-z_]+)`")
    assert len(names) >= 15
    assert {name.removesuffix("_total") for name in names} <= known


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/livez", "/readyz", "/health"])
def test_endpoints_are_named(path: str) -> None:
    assert path in PAGE
    assert path in (REPO / "router/octavo_router/app.py").read_text(encoding="utf-8")
