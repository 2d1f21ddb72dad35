"""Every Prometheus metric of Octavo: name, type, unit, labels and meaning, in one place.

One class per service, built once by its entry point on a registry of its own. No request id
and no tenant is ever a label. Must not know: any service.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

# Fine enough for inter-token times of 1 ms, wide enough for a minute's queue.
LATENCY_BUCKETS_S = (
    *(0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04),
    *(0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 60.0),
)
STEP_BUCKETS_S = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)
# Every accepted request ends in exactly one of these.
OUTCOMES = ("stop", "length", "cancelled", "deadline", "rejected", "error")


class Tally(Collector):
    """A histogram for what happens once per token: plain counts, rendered when scraped.

    An `observe` costs a tenth of Histogram's, which locks three times; so one thread only.
    """

    def __init__(self, name: str, text: str, buckets: Sequence[float]) -> None:
        self._name, self._text = name, text
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        bounds = [*map(str, self._bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets, self._sum)


class _Metrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"octavo_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(f"octavo_{name}", text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: Sequence[float] = LATENCY_BUCKETS_S
    ) -> Histogram:
        return Histogram(f"octavo_{name}", text, buckets=buckets, registry=self.registry)

    def _tally(self, name: str, text: str) -> Tally:
        tally = Tally(f"octavo_{name}", text, LATENCY_BUCKETS_S)
        self.registry.register(tally)
        return tally

    def _redis_lag(self) -> Gauge:
        return self._gauge("redis_lag_seconds", "Age of the oldest state not in Redis; 0 = none")

    def add_collector(self, collector: Collector) -> None:
        """Values computed at scrape time."""
        self.registry.register(collector)


class RouterMetrics(_Metrics):
    """What clients experience."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.requests = self._counter(
            "requests_total", "Requests received, by endpoint and outcome", ("endpoint", "outcome")
        )
        self.in_flight = self._gauge("requests_in_flight", "Requests received and not yet ended")
        self.prompt_tokens = self._counter("prompt_tokens_total", "Prompt tokens of requests")
        self.cached_tokens = self._counter(
            "cached_prompt_tokens_total", "Prompt tokens found in a prefix cache"
        )
        self.generation_tokens = self._counter(
            "generation_tokens_total", "Tokens generated for clients, every outcome included"
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From request to its first token"
        )
        self.inter_token = self._tally(
            "inter_token_latency_seconds", "Between the frames of a sequence, per token"
        )
        self.request_latency = self._histogram("request_latency_seconds", "From request to its end")
        self.tokenize_time = self._histogram(
            "tokenize_seconds", "Rendering and tokenizing a prompt"
        )
        self.moves = self._counter(
            "router_moves_total", "Requests submitted again after a scheduler was lost"
        )
        self.sessions = self._gauge("router_sessions", "Schedulers connected")
        self.quota_refusals = self._counter(
            "quota_refusals_total", "Requests refused by their tenant's quota"
        )
        self.redis_lag = self._redis_lag()


class SchedulerMetrics(_Metrics):
    """What the cell does."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.running = self._gauge("num_requests_running", "Sequences that hold a row")
        self.waiting = self._gauge("num_requests_waiting", "Sequences that wait for a row")
        self.backlog_tokens = self._gauge("backlog_tokens", "Tokens still to compute, upper bound")
        self.blocks = self._gauge(
            "kv_blocks", "KV blocks by worker and state (used, cached, free)", ("worker", "state")
        )
        self.kv_usage = self._gauge("kv_cache_usage_ratio", "Used blocks over all, 0 to 1")
        self.kv_utilization = self._gauge(
            "kv_utilization_ratio", "Filled KV slots over slots of used blocks, 0 to 1", ("worker",)
        )
        self.prefix_queries = self._counter(
            "prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache"
        )
        self.prefix_hits = self._counter(
            "prefix_cache_hits_total", "Prompt tokens found in the prefix cache"
        )
        self.preemptions = self._counter("preemptions_total", "Sequences preempted by recompute")
        self.moves = self._counter("moves_total", "Sequences moved to another worker")
        self.outcomes = self._counter(
            "sequence_outcomes_total", "Sequences ended, by outcome", ("outcome",)
        )
        self.queue_time = self._histogram("queue_time_seconds", "From Submit to a row")
        self.prefill_time = self._histogram("prefill_time_seconds", "From a row to the first token")
        self.plan_time = self._histogram(
            "plan_seconds", "CPU time to compose one plan", STEP_BUCKETS_S
        )
        self.result_time = self._histogram(
            "result_seconds", "CPU time to read one step's result", STEP_BUCKETS_S
        )
        self.steps = self._counter("steps_total", "Steps whose results were read", ("worker",))
        self.workers = self._gauge("workers", "Workers led")
        self.redis_lag = self._redis_lag()


class WorkerMetrics(_Metrics):
    """What the device does."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.steps = self._counter("worker_steps_total", "Steps run")
        self.step_time = self._histogram("step_seconds", "One step", STEP_BUCKETS_S)
        self.plan_wait = self._histogram(
            "plan_wait_seconds", "From a plan's arrival to its launch", STEP_BUCKETS_S
        )
        self.tokens = self._counter(
            "worker_tokens_total", "Tokens computed, by kind (prefill, decode)", ("kind",)
        )
        self.rows = self._gauge("worker_rows", "Live rows")
        self.row_errors = self._counter("worker_row_errors_total", "Rows failed by the worker")
        self.epoch = self._gauge("worker_epoch", "Current epoch")
        self.is_led = self._gauge("worker_is_led", "1 while a leader's stream is live")
        self.redis_lag = self._redis_lag()
