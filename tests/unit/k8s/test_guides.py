"""The guides beside the manifests name only settings and series that exist."""

import re

import pytest

from octavo.settings import RouterSettings, SchedulerSettings, WorkerSettings
from tests.unit.k8s.rendering import K8S, REPOSITORY
from tests.unit.k8s.test_components import known_families, known_series

# The page of metrics is written from the code.
GUIDES = sorted({path.name for path in K8S.glob("*.md")} - {"METRICS.md"})
_WORD = re.compile(r"`([a-z]+(?:_[a-z]+)+)`")
_VARIABLE = re.compile(r"OCTAVO_[A-Z_]*[A-Z]")
_SERIES = re.compile(r"octavo_[a-z_]+")
_PAGE = re.compile(r"`([A-Za-z0-9_/.-]+\.(?:md|py|proto|yaml))`")
# Of others: Prometheus' and gRPC's words, fields of requests and of log lines.
OTHER_WORDS = {
    "round_robin",
    "proxy_buffering",
    "ssl_certfile",
    "ssl_keyfile",
    "internal_error",
    "rate_limit_exceeded",
    "trace_id",
    "span_id",
}


def settings() -> set[str]:
    classes = (RouterSettings, SchedulerSettings, WorkerSettings)
    return {name for cls in classes for name in cls.__dataclass_fields__}


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_names_what_there_is(guide: str) -> None:
    text = (K8S / guide).read_text()
    series = known_series() | known_families()
    words = set(_WORD.findall(text))
    assert words - settings() - series - OTHER_WORDS == set()
    assert set(_SERIES.findall(text)) - series - {"octavo_router"} == set()
    variables = {name.lower().removeprefix("octavo_") for name in _VARIABLE.findall(text)}
    known = settings() | {f"{name}_file" for name in settings()} | {"model", "cache"}
    assert variables - known == set()


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_points_to_files_that_exist(guide: str) -> None:
    for path in _PAGE.findall((K8S / guide).read_text()):
        assert (K8S / path).is_file() or (REPOSITORY / path).is_file(), path
