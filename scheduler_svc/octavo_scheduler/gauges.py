"""Gauges of the cell: sums at scrape time, those of each worker once a second.

Scrapes come in a thread of their own, so what takes several looks is told from the event loop.

Must not know: HTTP. Entry points: `bind`, `WorkerGauges.tell`.
"""

from collections.abc import Callable

from octavo.metrics import SchedulerMetrics
from octavo_scheduler.core import Cell

_BLOCK_STATES = ("used", "cached", "free")


def bind(metrics: SchedulerMetrics, cell: Cell, redis_lag_s: Callable[[], float]) -> None:
    """Let the gauges of `metrics` tell the state of `cell`."""
    metrics.running.set_function(lambda: cell.members.num_running)
    metrics.waiting.set_function(lambda: cell.num_waiting)
    metrics.backlog_tokens.set_function(cell.backlog_tokens)
    metrics.kv_usage.set_function(
        lambda: cell.members.num_used_blocks / max(cell.members.num_blocks, 1)
    )
    metrics.workers.set_function(lambda: len(cell.members))
    metrics.redis_lag.set_function(redis_lag_s)


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
            for state, count in zip(_BLOCK_STATES, counts, strict=True):
                metrics.blocks.labels(worker_id, state).set(count)
            metrics.kv_utilization.labels(worker_id).set(member.state.utilization())
        for worker_id in self._told - here:
            for state in _BLOCK_STATES:
                metrics.blocks.remove(worker_id, state)
            metrics.kv_utilization.remove(worker_id)
        self._told = here
