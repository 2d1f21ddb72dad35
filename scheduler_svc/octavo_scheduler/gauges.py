"""Gauges of the cell: sums at scrape time, those of each worker once a second.

Scrapes come in a thread of their own, so what takes several looks is told from the event loop.

Must not know: HTTP. Entry points: `bind`, `bind_vllm`, `WorkerGauges.tell`.
"""

from collections.abc import Callable

from octavo import vllm_metrics
from octavo.metrics import BLOCK_STATES, SchedulerMetrics
from octavo.vllm_metrics import CacheShape
from octavo_scheduler.core import Cell


def bind(metrics: SchedulerMetrics, cell: Cell, redis_lag_s: Callable[[], float]) -> None:
    """Let the gauges of `metrics` tell the state of `cell`."""
    metrics.running.set_function(lambda: cell.members.num_running)
    metrics.waiting.set_function(lambda: cell.num_waiting)
    metrics.queue_tokens.set_function(lambda: cell.queue.num_tokens)
    metrics.backlog_tokens.set_function(cell.backlog_tokens)
    metrics.kv_usage.set_function(
        lambda: cell.members.num_used_blocks / max(cell.members.num_blocks, 1)
    )
    metrics.workers.set_function(lambda: len(cell.members))
    metrics.redis_lag.set_function(redis_lag_s)


def bind_vllm(metrics: SchedulerMetrics, cell: Cell) -> None:
    """Export the cell under vLLM's names too, as soon as a worker said what its model is."""
    names = cell.settings.served_model_name

    def model_name() -> str:
        if cell.model is None:
            return ""
        return names[0] if names else cell.model.name

    def cache_shape() -> CacheShape:
        assert cell.model is not None, "asked only with a model name"
        is_caching = cell.settings.enable_prefix_caching
        return CacheShape(cell.model.block_size, cell.members.num_blocks, is_caching)

    vllm_metrics.add_to_scheduler(metrics, model_name, cache_shape)


class WorkerGauges:
    """What each worker of a cell holds; workers that left have no gauges."""

    def __init__(self, metrics: SchedulerMetrics, cell: Cell) -> None:
        self._metrics = metrics
        self._cell = cell
        self._told: set[str] = set()

    def tell(self) -> None:
        """Set the gauges to the state of now."""
        metrics = self._metrics
        here: set[str] = set()
        for member in self._cell.members:
            worker_id, pool = member.state.worker_id, member.state.pool
            here.add(worker_id)
            counts = (pool.num_used, pool.num_cached, pool.num_free - pool.num_cached)
            for state, count in zip(BLOCK_STATES, counts, strict=True):
                metrics.blocks.labels(worker_id, state).set(count)
            metrics.kv_utilization.labels(worker_id).set(member.state.utilization())
        for worker_id in self._told - here:
            for state in BLOCK_STATES:
                metrics.blocks.remove(worker_id, state)
            metrics.kv_utilization.remove(worker_id)
        self._told = here
