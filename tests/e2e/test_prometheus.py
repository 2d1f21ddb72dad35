"""A real Prometheus scrapes all services: every query of a dashboard or alert returns data."""

import math
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer

from octavo.metrics import GpuReading, WorkerMetrics
from octavo.metrics_http import serve_metrics
from tests.e2e.generation import request, run_all
from tests.e2e.prompts import prompt_ids
from tests.e2e.stack import Service, Stack
from tests.fakes.otlp_receiver import OtlpReceiver
from tests.prometheus_server import Prometheus, promtool
from tests.unit.observability.queries import (
    RULES,
    alert_expressions,
    panel_queries,
    scaler_queries,
    selectors_of,
)

# Until Prometheus has seen twice all that a rate needs.
PATIENCE_S = 90.0


@pytest.fixture(scope="module")
def card() -> Iterator[str]:
    """The address of a worker's metrics with a card, which this machine may not have."""
    metrics = WorkerMetrics(CollectorRegistry())
    metrics.sample_gpus(lambda: [GpuReading("0", 0.5, 6 << 30, 8 << 30, 5 << 30)])
    server = serve_metrics(metrics.registry, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def prometheus(
    metered_stack: Stack, card: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    stack = metered_stack

    def metrics_of(services: Sequence[Service]) -> list[str]:
        return [f"127.0.0.1:{service.ports['metrics_port']}" for service in services]

    targets = {
        "router": [router.address for router in stack.routers],
        "scheduler": metrics_of(stack.schedulers),
        "worker": [*metrics_of(stack.workers), card],
    }
    folder = tmp_path_factory.mktemp("prometheus")
    with Prometheus(folder, targets, [RULES]) as prometheus:
        promtool("check", "config", prometheus.config_path)
        yield prometheus


@pytest.fixture
def load(metered_stack: Stack, tiny_folder: Path) -> Iterator[None]:
    """Some requests all the time, prompts that come again among them."""
    tokenizer = Tokenizer.from_file(str(tiny_folder / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    prompts = prompt_ids(encode, [40, 70, 40, 100])
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            run_all(metered_stack.grpc_address, [request(ids, max_tokens=20) for ids in prompts])
            is_over.wait(0.2)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    is_over.set()
    thread.join()


def until_all(pending: dict[str, str], prometheus: Prometheus) -> None:
    """Ask again until every expression (by its place) returned a number."""
    deadline = time.monotonic() + PATIENCE_S
    while pending:
        for place, expression in list(pending.items()):
            values = [float(sample["value"][1]) for sample in prometheus.query(expression)]
            if any(math.isfinite(value) for value in values):
                del pending[place]
        if pending and time.monotonic() > deadline:
            raise AssertionError(f"no data for {pending}")
        time.sleep(0.5 if pending else 0)


@pytest.mark.usefixtures("load")
def test_every_panel_has_data(prometheus: Prometheus) -> None:
    queries = {f"{place}: {text}": text for place, text in panel_queries()}
    assert len(queries) > 80
    until_all(queries, prometheus)


@pytest.mark.usefixtures("load")
def test_every_alert_reads_series_that_are_there(prometheus: Prometheus) -> None:
    expressions = alert_expressions()
    selectors = {
        f"{name}: {selector}": f"last_over_time({selector}[1m])"
        for name, expression in expressions.items()
        for selector in selectors_of(expression)
    }
    assert len(selectors) > len(expressions)
    until_all(selectors, prometheus)
    deadline = time.monotonic() + PATIENCE_S
    while {rule["health"] for rule in prometheus.rules()} != {"ok"}:
        assert time.monotonic() < deadline, prometheus.rules()
        time.sleep(0.5)
    assert {rule["name"] for rule in prometheus.rules()} == expressions.keys()


@pytest.mark.usefixtures("load")
def test_the_autoscaler_gets_one_number_whatever_there_is(prometheus: Prometheus) -> None:
    # The operator adds the label to what it scrapes.
    queries = {query: query.replace('{namespace="octavo"}', "") for query in scaler_queries()}
    assert len(queries) == 3
    selectors = {name: name for query in queries.values() for name in selectors_of(query)}
    until_all({name: f"last_over_time({name}[1m])" for name in selectors}, prometheus)
    for query, without_label in queries.items():
        (sample,) = prometheus.query(without_label)
        assert math.isfinite(float(sample["value"][1]))
        # No series at all.
        (sample,) = prometheus.query(query)
        assert float(sample["value"][1]) == 0


def test_every_service_is_scraped(prometheus: Prometheus) -> None:
    until_all({"up": "count by (job) (up == 1)"}, prometheus)
    jobs = {
        (sample["metric"]["job"], sample["metric"]["service"])
        for sample in prometheus.query("octavo_build_info")
    }
    assert jobs == {(service, service) for service in ("router", "scheduler", "worker")}


@pytest.mark.usefixtures("load")
def test_vllm_names_are_stored_as_they_are(prometheus: Prometheus) -> None:
    names = ("vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:cache_config_info")
    names += ("vllm:request_success_total", "vllm:time_to_first_token_seconds_count")
    until_all({name: f'{name}{{model_name!=""}}' for name in names}, prometheus)
    # Of one truth: the router's.
    (sample,) = prometheus.query("sum(octavo_prompt_tokens_total) - sum(vllm:prompt_tokens_total)")
    assert float(sample["value"][1]) == 0


@pytest.mark.usefixtures("load")
@pytest.mark.parametrize(
    "name", ["time_to_first_token", "inter_token_latency", "request_latency", "queue_time"]
)
def test_exemplars_lead_to_traces(
    name: str, prometheus: Prometheus, metered_traces: OtlpReceiver
) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := prometheus.exemplars(f"octavo_{name}_seconds_bucket")):
        assert time.monotonic() < deadline, "no exemplars"
        time.sleep(0.5)
    trace_ids = {item["labels"]["trace_id"] for series in found for item in series["exemplars"]}
    # A request's spans leave when it ends, its exemplars when they are scraped.
    metered_traces.wait(lambda spans: trace_ids <= {span.trace_id for span in spans})
