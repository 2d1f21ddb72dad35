"""Handing a cell's work to another scheduler: nothing is lost, no session ends without a word.

    drain        stop planning -> results in flight land -> rows go, blocks are sealed ->
                 workers are released -> MOVED(successor) to every session
    superseded   another scheduler leads the last worker: MOVED(its address)
    empty        no worker is left while other cells have some: MOVED(successor)

Routers submit everything again, with the ids that they have. Must not know: protos, how plans
are made. Entry points: `HandOver.run`, `HandOver.move`, `HandOver.check_empty`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from octavo.registry import Registry, SchedulerRecord
from octavo.succession import successor
from octavo_scheduler.core import Cell
from octavo_scheduler.worker_links import WorkerLinks

logger = logging.getLogger(__name__)

# A worker that hangs must not keep the others' work.
_LAND_S = 2.0
_RELEASE_S = 1.0
_LOOK_S = 0.005
# A link that broke for a moment is back by then.
_EMPTY_S = 1.0

MoveSessions = Callable[[str, Mapping[tuple[int, int], int]], Awaitable[None]]
IsServing = Callable[[str], Awaitable[bool]]


class HandOver:
    """Of one scheduler. `move_sessions(address, suspicions)` ends every session with MOVED;
    `is_serving(address)` asks another scheduler itself whether it takes work."""

    def __init__(
        self,
        cell: Cell,
        links: WorkerLinks,
        registry: Registry,
        scheduler_id: str,
        move_sessions: MoveSessions,
        is_serving: IsServing,
    ) -> None:
        self._cell = cell
        self._links = links
        self._registry = registry
        self._scheduler_id = scheduler_id
        self._move_sessions = move_sessions
        self._is_serving = is_serving
        self._empty_since: float | None = None

    def find_successor(self, *, with_workers: bool = False) -> SchedulerRecord | None:
        """The scheduler that takes this one's work over; None without another."""
        others = {
            record.scheduler_id: record
            for record in self._registry.schedulers()
            if not record.draining and (record.num_workers or not with_workers)
        }
        return others.get(successor(others, self._scheduler_id) or "")

    async def find_heir(self) -> SchedulerRecord | None:
        """The successor, if it takes work this very moment. Take no requests any more before.

        The registry may not know yet that it is leaving too: of two that leave at once, at least
        one sees the other's closed door, and finishes its work itself.
        """
        heir = self.find_successor()
        return heir if heir is not None and await self._is_serving(heir.address) else None

    async def run(self, heir: SchedulerRecord) -> None:
        """Hand everything over, workers and requests; the cell is empty afterwards."""
        cell = self._cell
        logger.info("handing over to %s at %s", heir.scheduler_id, heir.address)
        cell.is_paused = True
        until = cell.clock() + _LAND_S
        while (  # noqa: ASYNC110 - rare, and short
            any(m.state.owes_steps for m in cell.members) and cell.clock() < until
        ):
            await asyncio.sleep(_LOOK_S)
        suspicions = cell.suspicions()
        num_requests = cell.let_go_all()
        cell.is_paused = False
        cell.pump()  # the last plans: rows that go, and blocks that are sealed
        await self._links.release(_RELEASE_S)
        await self._move_sessions(heir.address, suspicions)
        logger.info("handed over %d requests", num_requests)

    async def move(self, heir_id: str, why: str) -> None:
        """The cell has no worker: its requests go to `heir_id`."""
        addresses = {r.scheduler_id: r.address for r in self._registry.schedulers()}
        suspicions = self._cell.suspicions()
        num_requests = self._cell.let_go_all()
        logger.warning("%s: %d requests go to %s", why, num_requests, heir_id)
        await self._move_sessions(addresses.get(heir_id, ""), suspicions)

    async def check_empty(self) -> None:
        """Call now and then: requests don't wait for a worker here while others have some."""
        cell = self._cell
        if cell.members or not cell.requests:
            self._empty_since = None
            return
        now = cell.clock()
        self._empty_since = self._empty_since or now
        if now - self._empty_since < _EMPTY_S and self._links.expects_any:
            return
        heir = self.find_successor(with_workers=True)
        if heir is not None:
            await self.move(heir.scheduler_id, "no worker is left")
