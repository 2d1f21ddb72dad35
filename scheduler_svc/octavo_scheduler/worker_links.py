"""All links of one scheduler: who is led is decided here, by a list or by the registry.

A scheduler with a list of workers leads those and no other. One without claims what `claims` says,
twice a second: free workers, those of lost schedulers; and it gives away what is beyond its share
once it is idle. What the registry doesn't show is never a reason to drop a worker that is led.

Must not know: requests, sessions. Entry points: `WorkerLinks.start`, `lead`, `release`.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from octavo.registry import Registry, WorkerRecord
from octavo.security import OPEN, Security
from octavo_scheduler.claims import Fleet
from octavo_scheduler.core import Cell
from octavo_scheduler.members import Member
from octavo_scheduler.worker_link import WorkerLink

logger = logging.getLogger(__name__)

_CLAIM_S = 0.5
# So long a surplus is seen before anything is given away: a registry that was just emptied shows
# only a part.
_SURPLUS_S = 2.0
# Time for a worker that was given away to find its new leader, before we claim it again.
_GIVEN_S = 5.0
# What is told lives on for a lease: so long a lost scheduler is known to be lost.
_LOST_S = 4.0


class WorkerLinks:
    """Links by address. `static`: addresses of the list; empty = the registry's."""

    def __init__(
        self,
        cell: Cell,
        scheduler_id: str,
        registry: Registry,
        static: Sequence[str],
        max_workers: int,
        *,
        on_attached: Callable[[], None],
        on_taken: Callable[[str], None],
        security: Security = OPEN,
    ) -> None:
        self.by_address: dict[str, WorkerLink] = {}
        self.takes_workers = not static
        self._cell = cell
        self._scheduler_id = scheduler_id
        self._registry = registry
        self._static = static
        self._max_workers = max_workers
        self._on_attached = on_attached
        self._on_taken = on_taken
        self._security = security
        self._tasks: dict[WorkerLink, asyncio.Task[None]] = {}
        self._claiming: asyncio.Task[None] | None = None
        self._free_since: dict[str, float] = {}
        self._given_at: dict[str, float] = {}
        self._lost_at: dict[str, float] = {}
        self._even_at = cell.clock()
        self._is_closed = False
        # Others lead all workers that there are: there is nothing to wait for.
        self.is_spare = False

    def start(self) -> None:
        """Begin to lead, or to look for what to lead."""
        for address in self._static:
            self.lead(address)
        if self.takes_workers:
            self._claiming = asyncio.create_task(self._claim_forever(), name="claims")

    def lead(self, address: str) -> None:
        """Lead the worker there as soon as it lets us; nothing new if that is so already."""
        if address in self.by_address or self._is_closed:
            return
        link = WorkerLink(
            address,
            self._cell,
            self._scheduler_id,
            self._on_attached,
            self._security,
            self._on_taken,
        )
        self.by_address[address] = link
        task = asyncio.create_task(link.run(), name=f"link {address}")
        self._tasks[link] = task
        task.add_done_callback(lambda _: self._tasks.pop(link))

    def leads(self, address: str) -> bool:
        """Whether the worker there is attached."""
        link = self.by_address.get(address)
        return link is not None and link.member is not None

    async def release(self, timeout_s: float) -> None:
        """Let all workers go, after the plans that are queued; takes no new ones."""
        self._is_closed = True
        for link, task in self._tasks.items():
            link.release()
            if link.member is None:
                task.cancel()  # it has nobody to tell
        if self._tasks:
            await asyncio.wait([*self._tasks.values()], timeout=timeout_s)

    async def close(self) -> None:
        """End every link at once."""
        tasks = [*self._tasks.values()]
        if self._claiming is not None:
            tasks.append(self._claiming)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def note_lost(self, scheduler_id: str) -> None:
        """A router lost that scheduler: sooner than its record says so."""
        if scheduler_id != self._scheduler_id:
            self._lost_at[scheduler_id] = self._cell.clock()

    def fleet(self) -> Fleet:
        """Everybody's workers and schedulers as they are seen now."""
        now = self._cell.clock()
        self._lost_at = {name: at for name, at in self._lost_at.items() if now - at < _LOST_S}
        return Fleet.seen_by(
            self._scheduler_id,
            self._registry.schedulers(),
            self._registry.workers(),
            lost=self._lost_at,
            max_workers=self._max_workers,
        )

    def awaited_of(self, lost_id: str) -> list[str]:
        """Addresses of the workers that a lost scheduler led and nobody leads yet.

        Those that are its successor's to lead, ours, are dialled; one that can't be reached is
        not waited for.
        """
        records = [
            record
            for record in self._registry.workers()
            if (record.leader_id or record.last_leader_id) == lost_id
        ]
        if self.takes_workers and self.fleet().heir_of(lost_id) == self._scheduler_id:
            for record in records:
                self.lead(record.address)
        return [r.address for r in records if not (self.leads(r.address) or self._is_away(r))]

    @property
    def expects_any(self) -> bool:
        """Whether a worker that isn't led may be in a moment."""
        return any(link.member is None and not link.is_away for link in self.by_address.values())

    def _is_away(self, record: WorkerRecord) -> bool:
        link = self.by_address.get(record.address)
        return link is not None and link.is_away

    # ---- claiming

    async def _claim_forever(self) -> None:
        while not self._is_closed:
            try:
                self._claim(self.fleet())
            except Exception:
                logger.exception("claiming workers")  # the next round may go better
            await asyncio.sleep(_CLAIM_S)

    def _claim(self, fleet: Fleet) -> None:
        now = self._cell.clock()
        free = fleet.free()
        known = self._free_since
        self._free_since = {r.worker_id: known.get(r.worker_id, now) for r in free}
        self._given_at = {a: at for a, at in self._given_at.items() if now - at < _GIVEN_S}
        waited = {worker_id: now - since for worker_id, since in self._free_since.items()}
        own = [r for r in fleet.workers if r.leader_id == self._scheduler_id]
        for record in (*own, *fleet.claims(self._scheduler_id, waited)):
            if record.address not in self._given_at:
                self.lead(record.address)
        self._forget(keep={record.address for record in (*own, *free)})
        is_told = sum(record.address in self._given_at for record in own)
        surplus = fleet.num_to_give(self._scheduler_id) - is_told
        if surplus <= 0:
            self._even_at = now
        self._give(surplus if now - self._even_at >= _SURPLUS_S else 0)
        self.is_spare = bool(fleet.workers) and not free and not own

    def _forget(self, keep: Iterable[str]) -> None:
        """Drop links that lead nothing to workers that are gone, or another's."""
        for address in self.by_address.keys() - set(keep):
            # A live stream outranks the registry.
            if not self.leads(address):
                task = self._tasks.get(self.by_address.pop(address))
                if task is not None:
                    task.cancel()

    def _give(self, num: int) -> None:
        """Let `num` workers run dry, and go: the emptiest, and always the same ones."""
        led = [(link, link.member) for link in self.by_address.values() if link.member is not None]
        led.sort(key=lambda pair: (not pair[1].is_parting, pair[1].state.rows.num_held))
        for i, (link, member) in enumerate(led):
            member.is_parting = i < num
            if member.is_parting and _is_idle(member):
                logger.info("worker %s is given to another scheduler", link.worker_id)
                link.release()
                self._given_at[link.address] = self._cell.clock()
                del self.by_address[link.address]


def _is_idle(member: Member) -> bool:
    state = member.state
    return not (state.rows.num_held or state.owes_steps or state.leaving or state.pending_seals)
