"""Every Prometheus metric of Octavo: name, type, unit, labels and meaning, in one place.

One class per service, built once by its entry point on a registry of its own. No request id
and no tenant is ever a label. `make docs` writes the table of all of them, `k8s/METRICS.md`. Must
not know: any service.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from octavo.metric_kinds import STEP_BUCKETS_S, TOKEN_BUCKETS, Metrics

# Every request received, and every accepted sequence, ends in exactly one of these; in a scheduler
# a sequence may also leave for another one, where it ends.
OUTCOMES = ("stop", "length", "cancelled", "deadline", "rejected", "error")
# Those of requests that were answered in full.
ANSWERED = ("stop", "length")
ENDPOINTS = ("chat_completions", "completions", "grpc_generate")
# Why prompt tokens of a first start weren't in the prefix cache, in order of precedence.
MISS_REASONS = (
    "disabled",  # prefix caching is off
    "prompt_logprobs",  # the prompt's own log-probabilities need all of it computed
    "elsewhere",  # another worker of the cell has them
    "evicted",  # this worker had them: their blocks were given to others
    "cold",  # nobody had them, as far as is known
    "tail",  # no full block, or the last token, which is always computed
)
SEQUENCE_OUTCOMES = (*OUTCOMES, "moved")
# Why a worker's sequences moved: its stream broke, its steps stopped, it drained, another
# scheduler leads it.
MOVE_REASONS = ("crash", "hang", "left", "taken")
# Why tokens that were computed before are computed again. `resume`: a scheduler was lost.
RECOMPUTE_REASONS = ("preemption", "move", "resume")
BLOCK_STATES = ("used", "cached", "free")
_PLAN_LEAD_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)


class RouterMetrics(Metrics):
    """What clients experience."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "router")
        self.requests = self._counter(
            "requests_total",
            "Requests ended, each in one outcome",
            {"endpoint": ENDPOINTS, "outcome": OUTCOMES},
        )
        self.in_flight = self._gauge("requests_in_flight", "Requests received and not yet ended")
        self.prompt_tokens = self._counter("prompt_tokens_total", "Prompt tokens of requests")
        self.cached_tokens = self._counter(
            "cached_prompt_tokens_total", "Prompt tokens found in a prefix cache"
        )
        self.generation_tokens = self._counter(
            "generation_tokens_total", "Tokens generated for clients, every outcome included"
        )
        self.request_prompt_tokens = self._tally(
            "request_prompt_tokens", "Prompt tokens of a request", TOKEN_BUCKETS
        )
        self.request_generation_tokens = self._tally(
            "request_generation_tokens", "Tokens of an answer in full", TOKEN_BUCKETS
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From request to its first token"
        )
        self.inter_token = self._tally(
            "inter_token_latency_seconds", "Between the frames of a sequence, per token"
        )
        self.request_latency = self._histogram(
            "request_latency_seconds", "From request to its end, of those answered in full"
        )
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


class SchedulerMetrics(Metrics):
    """What the cell does."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "scheduler")
        self.running = self._gauge("num_requests_running", "Sequences that hold a row")
        self.waiting = self._gauge("num_requests_waiting", "Sequences that wait for a row")
        self.queue_tokens = self._gauge("queue_tokens", "Prompt tokens of sequences that wait")
        self.backlog_tokens = self._gauge("backlog_tokens", "Tokens still to compute, upper bound")
        self.blocks = self._gauge(
            "kv_blocks", "KV blocks of a worker by state", {"worker": (), "state": BLOCK_STATES}
        )
        self.kv_usage = self._gauge("kv_cache_usage_ratio", "Used blocks over all, 0 to 1")
        self.kv_utilization = self._gauge(
            "kv_utilization_ratio",
            "Filled KV slots over slots of used blocks, 0 to 1",
            {"worker": ()},
        )
        self.prefix_queries = self._counter(
            "prefix_cache_queries_total",
            "Prompt tokens looked up in the prefix cache, once a sequence",
            unit="tokens",
        )
        self.prefix_hits = self._counter(
            "prefix_cache_hits_total", "Of the tokens looked up, those found", unit="tokens"
        )
        self.prefix_misses = self._counter(
            "prefix_cache_misses_total",
            "Of the tokens looked up, those not found; hits and misses add up to the queries",
            {"reason": MISS_REASONS},
            unit="tokens",
        )
        self.preemptions = self._counter("preemptions_total", "Sequences preempted by recompute")
        self.recomputed_tokens = self._counter(
            "recomputed_tokens_total",
            "Tokens computed again; those found in the cache again are neither here nor hits",
            {"reason": RECOMPUTE_REASONS},
        )
        self.moves = self._counter(
            "moves_total", "Sequences taken off a worker that was lost", {"reason": MOVE_REASONS}
        )
        self.outcomes = self._counter(
            "sequence_outcomes_total",
            "Sequences ended, each in one outcome",
            {"outcome": SEQUENCE_OUTCOMES},
        )
        self.queue_time = self._histogram("queue_time_seconds", "From Submit to the first row")
        self.prefill_time = self._histogram(
            "prefill_time_seconds", "From the first row to the first token"
        )
        self.decode_time = self._histogram(
            "decode_time_seconds", "From the first token to the sequence's end"
        )
        self.plan_time = self._tally("plan_seconds", "CPU time to compose one plan", STEP_BUCKETS_S)
        self.result_time = self._tally(
            "result_seconds", "CPU time to read one step's result", STEP_BUCKETS_S
        )
        self.steps = self._counter(
            "steps_total", "Steps whose results were read", {"worker": ()}, unit="steps"
        )
        self.workers = self._gauge("workers", "Workers led")
        self.redis_lag = self._redis_lag()


class GpuReading(NamedTuple):
    """A card now; None where it doesn't say (a slice of one has no utilisation)."""

    device: str
    utilization: float | None
    memory_used_bytes: int
    memory_total_bytes: int
    process_memory_bytes: int


class WorkerMetrics(Metrics):
    """What the device does."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "worker")
        self.steps = self._counter("worker_steps_total", "Steps run")
        self.step_time = self._tally("step_seconds", "One step on the device", STEP_BUCKETS_S)
        self.step_gap = self._tally(
            "step_gap_seconds",
            "Before a step, the time in which the device idled although rows were live",
            STEP_BUCKETS_S,
        )
        self.step_tokens = self._tally("step_tokens", "Tokens computed in a step", TOKEN_BUCKETS)
        self.step_launch = self._tally(
            "step_launch_seconds",
            "The host's time to launch a step (on a CPU, to run it); a compiler's or a graph "
            "capture's is in it, and all rows wait",
            STEP_BUCKETS_S,
        )
        self.late_compile = self._tally(
            "late_compile_seconds", "Compiling a kernel that warming up missed", STEP_BUCKETS_S
        )
        self.plan_wait = self._tally(
            "plan_wait_seconds", "From a plan's arrival to its launch", STEP_BUCKETS_S
        )
        self.plan_launch = self._tally(
            "plan_launch_seconds",
            "From when a plan was here and the device had room for its step, to its launch",
            STEP_BUCKETS_S,
        )
        self.plan_lead = self._tally(
            "plan_lead_steps",
            "Steps that can still run, when one is launched, before the scheduler is heard again",
            _PLAN_LEAD_BUCKETS,
        )
        self.tokens = self._counter(
            "worker_tokens_total", "Tokens computed", {"kind": ("prefill", "decode")}
        )
        self.rows = self._gauge("worker_rows", "Live rows")
        self.row_errors = self._counter("worker_row_errors_total", "Rows failed by the worker")
        self.epoch = self._gauge("worker_epoch", "Current epoch")
        self.is_led = self._gauge("worker_is_led", "1 while a leader's stream is live")
        self.redis_lag = self._redis_lag()
        self._read_gpus: Callable[[], Iterable[GpuReading]] = tuple
        self._sampled(
            {
                "gpu_utilization_ratio": (
                    "Share of the last sample period in which a kernel ran, 0 to 1 (NVML)",
                    lambda gpu: gpu.utilization,
                ),
                "gpu_memory_used_bytes": (
                    "Device memory in use by all processes (NVML)",
                    lambda gpu: gpu.memory_used_bytes,
                ),
                "gpu_memory_total_bytes": (
                    "Device memory (NVML)",
                    lambda gpu: gpu.memory_total_bytes,
                ),
                "gpu_process_memory_bytes": (
                    "Device memory that this process's allocator holds",
                    lambda gpu: gpu.process_memory_bytes,
                ),
            },
            {"device": ()},
            lambda: (((gpu.device,), gpu) for gpu in self._read_gpus()),
        )

    def sample_gpus(self, read: Callable[[], Iterable[GpuReading]]) -> None:
        """From now on `read` is asked at each scrape; without it no `gpu_` metric is there."""
        self._read_gpus = read
