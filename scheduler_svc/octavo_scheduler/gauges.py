"""Gauges of the cell, told by their owners: at scrape time, blocks by worker once a second.

Must not know: HTTP. Entry points: `bind`, `set_blocks`.
"""

from collections.abc import Callable

from octavo.metrics import SchedulerMetrics
from octavo_scheduler.core import Cell


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


def set_blocks(metrics: SchedulerMetrics, cell: Cell) -> None:
    """Blocks by worker and state; workers that left have none."""
    metrics.blocks.clear()
    for member in cell.members:
        pool = member.state.pool
        states = {
            "used": pool.num_used,
            "cached": pool.num_cached,
            "free": pool.num_free - pool.num_cached,
        }
        for state, count in states.items():
            metrics.blocks.labels(member.state.worker_id, state).set(count)
