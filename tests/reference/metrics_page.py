"""The page of all metrics: a table a service, and the names that vLLM has for them."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from octavo import vllm_metrics
from octavo.metric_kinds import Metrics, MetricSpec
from octavo.metrics import RouterMetrics, SchedulerMetrics, WorkerMetrics
from octavo.vllm_metrics import Alias
from tests.reference.markdown import page, table

_HEAD = """# Metrics

This page is generated from `protos/octavo/metrics.py` by `make docs`; don't edit it.

Every service answers `GET /metrics`: the router on its HTTP port (without a key), scheduler and
worker on `--metrics-port`. A scraper that asks for OpenMetrics, as Prometheus does, gets it, and
with it exemplars: the trace ids of sampled requests on the latency histograms (Prometheus keeps
them with `--enable-feature=exemplar-storage`). No prompt, answer, request id or tenant is ever in a
metric. Labels whose values are listed start at 0.

Each number has one owner: clients' times and outcomes are the router's, the queue and the blocks
the scheduler's, steps and the card the worker's. Sum over the instances of a service. Dashboards
for Grafana and alert rules for Prometheus are in `components/observability`.

Each process also exports `process_cpu_seconds_total`, `process_resident_memory_bytes`,
`process_virtual_memory_bytes`, `process_start_time_seconds`, `process_open_fds` and
`process_max_fds` (Linux)."""

_MISSES = """**Misses by reason**, in this order: `disabled` the prefix cache is off;
`prompt_logprobs` the request scores its prompt, so all of it is computed; `elsewhere` another
worker of the cell has the block; `evicted` this worker had it and gave its memory to others; `cold`
nobody is known to have had it; `tail` it is in no full block, or is the last token, which is always
computed. A request that needs a block which is being computed for another one waits and hits."""

_VLLM = """Dashboards, autoscalers and gateways that read vLLM's names find them, with the label
`model_name` (`--served-model-name`), rendered from the same values at each scrape;
`--vllm-metrics false` leaves them out. A gateway's endpoint picker reads a scheduler's: one
endpoint is one cell."""


class _Section(NamedTuple):
    title: str
    metrics: Metrics
    aliases: Sequence[Alias]


def write_page() -> str:
    """The whole page."""
    router = RouterMetrics(CollectorRegistry())
    scheduler = SchedulerMetrics(CollectorRegistry())
    worker = WorkerMetrics(CollectorRegistry())
    sections = [
        _Section("Router", router, vllm_metrics.router_aliases(router)),
        _Section("Scheduler", scheduler, vllm_metrics.scheduler_aliases(scheduler)),
        _Section("Worker", worker, vllm_metrics.worker_aliases(worker)),
    ]
    paragraphs = [[_HEAD]]
    heads = ("name", "type", "unit", "labels", "meaning")
    for section in sections:
        paragraphs += [[f"## {section.title}"], table(heads, map(_row, section.metrics.specs))]
        if section.title == "Scheduler":
            paragraphs.append([_MISSES])
    paragraphs += [["## Under vLLM's names"], [_VLLM]]
    paragraphs.append(table(("vLLM's", "Octavo's", "service"), _alias_rows(sections)))
    return page(paragraphs)


def _row(spec: MetricSpec) -> Sequence[str]:
    labels = ", ".join(
        f"`{name}` ({', '.join(values)})" if values else f"`{name}`"
        for name, values in spec.labels.items()
    )
    if spec.name == "octavo_build_info":
        # Its values are this version's.
        labels = ", ".join(f"`{name}`" for name in spec.labels)
    return f"`{spec.name}`", spec.kind, spec.unit, labels, spec.text


def _alias_rows(sections: Iterable[_Section]) -> Iterable[Sequence[str]]:
    for section in sections:
        for alias in section.aliases:
            (family,) = alias.source.collect()
            suffix = "_total" if family.type == "counter" else ""
            label = f" by `{alias.label[1]}`" if alias.label else ""
            names = f"`{alias.name}{suffix}`{label}", f"`{family.name}{suffix}`"
            yield *names, section.title.lower()
    note = "block size, blocks of the cell's workers, whether prefixes are cached"
    yield "`vllm:cache_config_info`", note, "scheduler"
