"""Octavo's metrics under vLLM's names, for dashboards, autoscalers and gateways that read those.

Nothing is counted twice: at each scrape the service's own metrics are rendered again, renamed and
labelled with `model_name`. A service exports those names whose truth it owns. Must not know:
values. Entry points: `add_to_router`, `add_to_scheduler`, `add_to_worker`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample

from octavo.metrics import RouterMetrics, SchedulerMetrics, WorkerMetrics

# vLLM counts what it took on: a rejected request has no reason there.
_FINISHED_REASONS = {
    "stop": "stop",
    "length": "length",
    "cancelled": "abort",
    "deadline": "abort",
    "error": "error",
}


class Alias(NamedTuple):
    """A family's name there (`_total`, `_bucket` follow by its type) and where it comes from.

    `label`: an own label, the name of it there, and its values there; samples of other values are
    left out, samples that become alike are summed.
    """

    name: str
    source: Collector
    label: tuple[str, str, Mapping[str, str]] | None = None


class CacheShape(NamedTuple):
    """What `vllm:cache_config_info` says."""

    block_size: int
    num_blocks: int
    enable_prefix_caching: bool


def router_aliases(metrics: RouterMetrics) -> Sequence[Alias]:
    reasons = ("outcome", "finished_reason", _FINISHED_REASONS)
    return (
        Alias("vllm:prompt_tokens", metrics.prompt_tokens),
        Alias("vllm:generation_tokens", metrics.generation_tokens),
        Alias("vllm:request_success", metrics.requests, reasons),
        Alias("vllm:time_to_first_token_seconds", metrics.time_to_first_token),
        Alias("vllm:inter_token_latency_seconds", metrics.inter_token),
        Alias("vllm:e2e_request_latency_seconds", metrics.request_latency),
        Alias("vllm:request_prompt_tokens", metrics.request_prompt_tokens),
        Alias("vllm:request_generation_tokens", metrics.request_generation_tokens),
    )


def scheduler_aliases(metrics: SchedulerMetrics) -> Sequence[Alias]:
    return (
        Alias("vllm:num_requests_running", metrics.running),
        Alias("vllm:num_requests_waiting", metrics.waiting),
        Alias("vllm:kv_cache_usage_perc", metrics.kv_usage),
        Alias("vllm:prefix_cache_queries", metrics.prefix_queries),
        Alias("vllm:prefix_cache_hits", metrics.prefix_hits),
        Alias("vllm:num_preemptions", metrics.preemptions),
        Alias("vllm:request_queue_time_seconds", metrics.queue_time),
        Alias("vllm:request_prefill_time_seconds", metrics.prefill_time),
        Alias("vllm:request_decode_time_seconds", metrics.decode_time),
    )


def worker_aliases(metrics: WorkerMetrics) -> Sequence[Alias]:
    # There too the histogram's name ends in _total.
    return (Alias("vllm:iteration_tokens_total", metrics.step_tokens),)


def add_to_router(metrics: RouterMetrics, model_name: Callable[[], str]) -> None:
    """`model_name` is asked at each scrape; empty = not known yet, then nothing is exported."""
    metrics.add_collector(_Renamed(router_aliases(metrics), model_name))


def add_to_scheduler(
    metrics: SchedulerMetrics,
    model_name: Callable[[], str],
    cache_shape: Callable[[], CacheShape],
) -> None:
    """`model_name` as for the router; `cache_shape` of all workers of the cell."""
    metrics.add_collector(_Renamed(scheduler_aliases(metrics), model_name))
    metrics.add_collector(_CacheConfig(model_name, cache_shape))


def add_to_worker(metrics: WorkerMetrics, model_name: Callable[[], str]) -> None:
    """`model_name` as for the router."""
    metrics.add_collector(_Renamed(worker_aliases(metrics), model_name))


class _Renamed(Collector):
    def __init__(self, aliases: Iterable[Alias], model_name: Callable[[], str]) -> None:
        self._aliases = tuple(aliases)
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        if model_name := self._model_name():
            for alias in self._aliases:
                for family in alias.source.collect():
                    yield _rename(family, alias, model_name)


class _CacheConfig(Collector):
    def __init__(self, model_name: Callable[[], str], shape: Callable[[], CacheShape]) -> None:
        self._model_name, self._shape = model_name, shape

    def collect(self) -> Iterable[Metric]:
        if model_name := self._model_name():
            shape = self._shape()
            labels = {
                "model_name": model_name,
                "block_size": str(shape.block_size),
                "num_gpu_blocks": str(shape.num_blocks),
                "enable_prefix_caching": str(shape.enable_prefix_caching),
            }
            text = "Always 1; the labels say what the KV cache of the cell's workers is"
            family = GaugeMetricFamily("vllm:cache_config_info", text, labels=tuple(labels))
            family.add_metric(tuple(labels.values()), 1)
            yield family


def _rename(family: Metric, alias: Alias, model_name: str) -> Metric:
    renamed = Metric(alias.name, family.documentation, family.type)
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
    exemplars: dict[tuple[str, tuple[tuple[str, str], ...]], Exemplar | None] = {}
    for sample in family.samples:
        labels = _labels(sample, alias)
        if labels is None:
            continue
        name = alias.name + sample.name.removeprefix(family.name)
        key = (name, (("model_name", model_name), *labels.items()))
        values[key] += sample.value
        exemplars[key] = sample.exemplar
    for (name, labels), value in values.items():
        exemplar = exemplars[name, labels]
        renamed.samples.append(Sample(name, dict(labels), value, None, exemplar))
    return renamed


def _labels(sample: Sample, alias: Alias) -> dict[str, str] | None:
    """The sample's labels there: a histogram's `le`, and what the alias names."""
    if alias.label is None:
        return dict(sample.labels)
    own, there, values = alias.label
    value = values.get(sample.labels[own])
    return None if value is None else {there: value}
