"""What this cell tells the registry: itself, its workers' usage, a filter of its blocks.

Written by a timer, never inside a step; the registry coalesces and never blocks.

Must not know: Redis, streams. Entry point: `Ledger.publish`.
"""

import asyncio
from collections.abc import Sequence

from octavo.bloom import build_filter
from octavo.registry import Registry, SchedulerRecord, UsageRecord
from octavo_scheduler.core import Cell
from octavo_scheduler.worker_link import WorkerLink

# A filter is rebuilt at most every so many publications, and only if blocks changed.
_FILTER_EVERY = 3


class Ledger:
    """Publishes the state of one cell."""

    def __init__(self, registry: Registry, cell: Cell, scheduler_id: str, address: str) -> None:
        self._registry = registry
        self._cell = cell
        self._scheduler_id = scheduler_id
        self._address = address
        self._sequence = 0
        self._published: set[str] = set()
        self._filter_state: tuple[int, ...] = ()

    async def publish(self, links: Sequence[WorkerLink]) -> None:
        """Tell the registry the present state; only a large filter takes a thread's time."""
        self._sequence += 1
        self._registry.announce_scheduler(self._record())
        led: set[str] = set()
        for link in links:
            if link.member is not None:
                led.add(link.worker_id)
                self._registry.publish_usage(self._usage(link))
        for worker_id in self._published - led:
            self._registry.withdraw_usage(worker_id)
        self._published = led
        if self._sequence % _FILTER_EVERY == 1:
            await self._publish_filter()

    def _record(self) -> SchedulerRecord:
        cell = self._cell
        return SchedulerRecord(
            scheduler_id=self._scheduler_id,
            address=self._address,
            model=cell.model.name if cell.model else "",
            num_workers=len(cell.members),
            backlog_tokens=cell.backlog_tokens(),
            prefill_tokens_per_s=int(cell.members.prefill_tokens_per_s),
            draining=cell.is_draining,
        )

    def _usage(self, link: WorkerLink) -> UsageRecord:
        assert link.member is not None
        state = link.member.state
        num_cached = state.pool.num_cached
        return UsageRecord(
            worker_id=link.worker_id,
            leader_id=self._scheduler_id,
            boot_id=link.boot_id,
            epoch=link.epoch,
            num_blocks=state.pool.num_usable,
            num_used=state.pool.num_used,
            num_cached=num_cached,
            num_free=state.pool.num_free - num_cached,
            num_rows=state.rows.num_held,
            backlog_tokens=state.backlog_tokens + state.num_tokens_to_generate(),
            sequence=self._sequence,
            used_bitmap=state.pool.used_bitmap(),
        )

    async def _publish_filter(self) -> None:
        pools = [member.state.pool for member in self._cell.members]
        state = tuple(pool.num_changes for pool in pools)
        if state == self._filter_state:
            return
        self._filter_state = state
        hashes = [block_hash for pool in pools for block_hash in pool.hashes()]
        data = await asyncio.to_thread(build_filter, hashes)
        self._registry.publish_filter(self._scheduler_id, data)
