"""Metrics: names with units, label values from 0, exemplars, both exposition formats."""

import re
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from octavo.errors import ConfigurationError
from octavo.metric_kinds import Metrics
from octavo.metrics import (
    ENDPOINTS,
    MISS_REASONS,
    MOVE_REASONS,
    OUTCOMES,
    RECOMPUTE_REASONS,
    SEQUENCE_OUTCOMES,
    GpuReading,
    RouterMetrics,
    SchedulerMetrics,
    WorkerMetrics,
)
from octavo.metrics_http import exposition, serve_metrics
from octavo_router.requests import Endpoint
from octavo_scheduler.recovery import Loss
from octavo_scheduler.sequence import FinishReason, Lost

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
# What Prometheus 2 sends.
ACCEPT = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
TRACE = {"trace_id": "4bf92f3577b34da6a3ce929d0e0e4736"}
BUILD: dict[str, Callable[[CollectorRegistry], Metrics]] = {
    cls.__name__: cls for cls in (RouterMetrics, SchedulerMetrics, WorkerMetrics)
}


def values(metrics: Metrics) -> dict[str, float]:
    return {
        sample.name + "".join(f"{{{v}}}" for v in sample.labels.values()): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
    }


@pytest.mark.parametrize("service", BUILD)
def test_names_say_what_they_are(service: str) -> None:
    metrics = BUILD[service](CollectorRegistry())
    assert len({spec.name for spec in metrics.specs}) == len(metrics.specs) > 10
    for spec in metrics.specs:
        assert re.fullmatch(r"octavo(_[a-z]+)+", spec.name), spec
        assert (spec.kind == "counter") == spec.name.endswith("_total"), spec
        # A time, a size or a share that doesn't say its unit is a trap.
        if not spec.unit:
            assert not re.search(r"time|latency|memory|utiliz|usage|lag", spec.name), spec
        assert not {"request_id", "tenant"} & set(spec.labels), spec
        assert spec.text.rstrip(".") == spec.text


@pytest.mark.parametrize("service", BUILD)
def test_each_service_says_who_it_is_and_what_it_takes(service: str) -> None:
    found = values(BUILD[service](CollectorRegistry()))
    name = service.removesuffix("Metrics").lower()
    assert [key for key in found if key.startswith(f"octavo_build_info{{{name}}}")]
    assert found["process_cpu_seconds_total"] > 0
    assert found["process_resident_memory_bytes"] > 1e6


def test_known_labels_start_at_zero() -> None:
    router = values(RouterMetrics(CollectorRegistry()))
    for endpoint in ENDPOINTS:
        for outcome in OUTCOMES:
            assert router[f"octavo_requests_total{{{endpoint}}}{{{outcome}}}"] == 0
    scheduler = values(SchedulerMetrics(CollectorRegistry()))
    for reason in MISS_REASONS:
        assert scheduler[f"octavo_prefix_cache_misses_total{{{reason}}}"] == 0
    # Which workers there are, only time tells.
    assert not [key for key in scheduler if key.startswith("octavo_steps_total")]


def test_label_values_are_those_of_the_services() -> None:
    assert {endpoint.value for endpoint in Endpoint} == set(ENDPOINTS)
    assert {reason.value for reason in FinishReason} | {"rejected"} == set(SEQUENCE_OUTCOMES)
    assert {loss.value for loss in Loss} == set(MOVE_REASONS)
    assert {lost.value for lost in Lost} == set(RECOMPUTE_REASONS)


def test_exemplars_travel_in_openmetrics_alone() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    metrics.time_to_first_token.observe(0.012, TRACE)
    metrics.inter_token.observe(0.0012, TRACE)
    metrics.inter_token.observe(0.0012)
    metrics.request_latency.observe(3.3)
    body, media_type = exposition(metrics.registry, ACCEPT)
    assert media_type == OPENMETRICS
    found = {
        (sample.name, sample.labels.get("le")): sample.exemplar
        for family in parse_openmetrics(body.decode())
        for sample in family.samples
        if sample.exemplar is not None
    }
    assert {key: (item.labels, item.value) for key, item in found.items()} == {
        ("octavo_time_to_first_token_seconds_bucket", "0.015"): (TRACE, 0.012),
        ("octavo_inter_token_latency_seconds_bucket", "0.0015"): (TRACE, 0.0012),
    }
    text, media_type = exposition(metrics.registry, "text/plain")
    assert media_type.startswith("text/plain; version=0.0.4")
    assert TRACE["trace_id"] not in text.decode()


@pytest.mark.parametrize("service", BUILD)
@pytest.mark.parametrize("accept", ["", "*/*", "text/plain; version=1.0.0", ACCEPT])
def test_both_formats_say_the_same(service: str, accept: str) -> None:
    metrics = BUILD[service](CollectorRegistry())
    body, _ = exposition(metrics.registry, accept)
    parse = parse_openmetrics if "openmetrics" in accept else parse_text
    names = {sample.name for family in parse(body.decode()) for sample in family.samples}
    assert {name for name in names if name.startswith("octavo_")} == {
        key.split("{")[0] for key in values(metrics) if key.startswith("octavo_")
    }
    assert not [name for name in names if name.endswith("_created")]


def test_a_card_is_read_when_scraped_and_absent_without_one() -> None:
    metrics = WorkerMetrics(CollectorRegistry())
    assert not [key for key in values(metrics) if key.startswith("octavo_gpu_")]
    reads: list[int] = []

    def read() -> list[GpuReading]:
        reads.append(1)
        whole = GpuReading("0", 0.25, 3 << 30, 8 << 30, 2 << 30)
        # A slice of a card doesn't tell its utilisation.
        return [whole, GpuReading("1", None, 1 << 30, 4 << 30, 1 << 29)]

    metrics.sample_gpus(read)
    assert not reads
    found = {key: value for key, value in values(metrics).items() if key.startswith("octavo_gpu_")}
    assert len(reads) == 1
    assert found == {
        "octavo_gpu_utilization_ratio{0}": 0.25,
        "octavo_gpu_memory_used_bytes{0}": 3 << 30,
        "octavo_gpu_memory_used_bytes{1}": 1 << 30,
        "octavo_gpu_memory_total_bytes{0}": 8 << 30,
        "octavo_gpu_memory_total_bytes{1}": 4 << 30,
        "octavo_gpu_process_memory_bytes{0}": 2 << 30,
        "octavo_gpu_process_memory_bytes{1}": 1 << 29,
    }


def test_a_server_answers_scrapes_and_nothing_else() -> None:
    metrics = WorkerMetrics(CollectorRegistry())
    server = serve_metrics(metrics.registry, "127.0.0.1", 0)
    port = server.server_address[1]
    try:
        for accept, media_type in ((ACCEPT, OPENMETRICS), ("*/*", "text/plain; version=0.0.4")):
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept}
            )
            with urllib.request.urlopen(request, timeout=30) as answer:
                assert answer.headers["Content-Type"].startswith(media_type)
                assert b"octavo_worker_steps_total 0.0" in answer.read()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30)
        with pytest.raises(ConfigurationError, match=f"OCTAVO_METRICS_PORT={port}: can't listen"):
            serve_metrics(metrics.registry, "127.0.0.1", port)
    finally:
        server.shutdown()
        server.server_close()
