"""vLLM's names: rendered from our values when scraped, and only by who owns them."""

from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from octavo import vllm_metrics
from octavo.metric_kinds import Metrics
from octavo.metrics import RouterMetrics, SchedulerMetrics, WorkerMetrics
from octavo.metrics_http import exposition
from octavo.vllm_metrics import CacheShape

TRACE = {"trace_id": "00000000000000000000000000000001"}
# What dashboards and gateways ask for, sample names as they are stored.
ROUTER = {
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
}
SCHEDULER = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:request_queue_time_seconds_bucket",
    "vllm:request_prefill_time_seconds_bucket",
    "vllm:request_decode_time_seconds_bucket",
    "vllm:cache_config_info",
}
WORKER = {"vllm:iteration_tokens_total_bucket"}


def scrape(metrics: Metrics) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples under vLLM's names, as a scraper reads them."""
    body, _ = exposition(metrics.registry, "application/openmetrics-text")
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_each_service_exports_what_it_owns() -> None:
    router, scheduler, worker = (
        RouterMetrics(CollectorRegistry()),
        SchedulerMetrics(CollectorRegistry()),
        WorkerMetrics(CollectorRegistry()),
    )
    for metrics in (router, scheduler, worker):
        assert not scrape(metrics)
    vllm_metrics.add_to_router(router, lambda: "m")
    vllm_metrics.add_to_scheduler(scheduler, lambda: "m", lambda: CacheShape(16, 2047, True))
    vllm_metrics.add_to_worker(worker, lambda: "m")
    for metrics, names in ((router, ROUTER), (scheduler, SCHEDULER), (worker, WORKER)):
        found = scrape(metrics)
        assert names <= found.keys()
        extra = {name.rsplit("_", 1)[1] for name in found.keys() - names}
        assert extra <= {"sum", "count"}
        for samples in found.values():
            assert {labels["model_name"] for labels, _ in samples} == {"m"}
    ((labels, value),) = scrape(scheduler)["vllm:cache_config_info"]
    assert value == 1
    assert (labels["block_size"], labels["num_gpu_blocks"]) == ("16", "2047")


def test_values_are_our_own_at_the_time_of_the_scrape() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    vllm_metrics.add_to_router(metrics, lambda: "m")
    for endpoint, outcome, count in (
        ("chat_completions", "stop", 3),
        ("completions", "stop", 2),
        ("completions", "length", 1),
        ("completions", "cancelled", 4),
        ("grpc_generate", "deadline", 5),
        ("completions", "error", 6),
        ("completions", "rejected", 7),
    ):
        metrics.requests.labels(endpoint, outcome).inc(count)
    reasons = {
        labels["finished_reason"]: value
        for labels, value in scrape(metrics)["vllm:request_success_total"]
    }
    # It never began to answer what was rejected.
    assert reasons == {"stop": 5, "length": 1, "abort": 9, "error": 6}
    metrics.prompt_tokens.inc(5)
    metrics.time_to_first_token.observe(0.05)
    found = scrape(metrics)
    assert found["vllm:prompt_tokens_total"] == [({"model_name": "m"}, 5)]
    assert found["vllm:time_to_first_token_seconds_count"] == [({"model_name": "m"}, 1)]


def test_a_model_that_is_not_known_yet_has_no_samples() -> None:
    metrics = SchedulerMetrics(CollectorRegistry())
    names: list[str] = [""]
    vllm_metrics.add_to_scheduler(metrics, lambda: names[0], lambda: CacheShape(16, 9, False))
    assert not scrape(metrics)
    names[0] = "later"
    assert scrape(metrics)["vllm:num_requests_running"] == [({"model_name": "later"}, 0)]


def test_exemplars_are_renamed_too() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    vllm_metrics.add_to_router(metrics, lambda: "m")
    metrics.time_to_first_token.observe(0.05, TRACE)
    body, _ = exposition(metrics.registry, "application/openmetrics-text")
    lines = [line for line in body.decode().splitlines() if TRACE["trace_id"] in line]
    assert {line.split("{")[0] for line in lines} == {
        "octavo_time_to_first_token_seconds_bucket",
        "vllm:time_to_first_token_seconds_bucket",
    }
