"""What this cell tells the registry: itself, its workers' usage, a filter of its blocks.

Written by a timer, never inside a step; the registry coalesces and never blocks. An idle cell
tells nothing new, so that its leases are all that is renewed.

Must not know: Redis, streams. Entry point: `Ledger.publish`.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from octavo.bloom import build_filter
from octavo.registry import Registry, SchedulerRecord, UsageRecord
from octavo_scheduler.core import Cell
from octavo_scheduler.worker_link import WorkerLink

# A filter is rebuilt at most every so many publications, and only if blocks changed.
_FILTER_EVERY = 3
# Blocks looked at between two turns of the event loop, some 0.2 ms.
_SLICE_BLOCKS = 8192


class Ledger:
    """Publishes the state of one cell."""

    def __init__(
        self,
        registry: Registry,
        cell: Cell,
        scheduler_id: str,
        address: str,
        *,
        takes_workers: bool = True,
    ) -> None:
        self._registry = registry
        self._cell = cell
        self._scheduler_id = scheduler_id
        self._address = address
        self._takes_workers = takes_workers
        self._num_publications = 0
        self._usages: dict[str, UsageRecord] = {}
        self._filter_state: tuple[int, ...] = ()

    def announce(self) -> None:
        """Tell the registry that this scheduler is here, and how it is."""
        self._registry.announce_scheduler(self._record())

    async def publish(self, links: Sequence[WorkerLink]) -> None:
        """Tell the registry the present state; only the filter takes time, a thread's."""
        self.announce()
        usages = {link.worker_id: self._usage(link) for link in links if link.member is not None}
        for usage in usages.values():
            self._registry.publish_usage(usage)
        for worker_id in self._usages.keys() - usages.keys():
            self._registry.withdraw_usage(worker_id)
        self._usages = usages
        if self._num_publications % _FILTER_EVERY == 0:
            await self._publish_filter()
        self._num_publications += 1

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
            takes_workers=self._takes_workers,
        )

    def _usage(self, link: WorkerLink) -> UsageRecord:
        """The worker's usage; the very record told last unless something changed."""
        assert link.member is not None
        state = link.member.state
        num_cached = state.pool.num_cached
        last = self._usages.get(link.worker_id)
        now = UsageRecord(
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
            sequence=last.sequence if last else 1,
            used_bitmap=state.pool.used_bitmap(),
        )
        if last is None or now == last:
            return now
        return replace(now, sequence=last.sequence + 1)

    async def _publish_filter(self) -> None:
        pools = [member.state.pool for member in self._cell.members]
        state = tuple(pool.num_changes for pool in pools)
        if state == self._filter_state:
            return
        self._filter_state = state
        # A filter is a hint: blocks that change between two slices may be missed, or told twice.
        hashes: list[bytes] = []
        for pool in pools:
            for start in range(0, pool.num_blocks, _SLICE_BLOCKS):
                hashes += pool.hashes_of(slice(start, start + _SLICE_BLOCKS))
                await asyncio.sleep(0)
        data = await asyncio.to_thread(build_filter, hashes)
        self._registry.publish_filter(self._scheduler_id, data)
