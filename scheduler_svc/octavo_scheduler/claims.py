"""Which scheduler leads which worker: pure, the same answer wherever the same picture is seen.

    nobody led it            rendezvous of its id over the schedulers that lead less than a share
    its leader was lost      the lost scheduler's successor, however many that one leads
    its leader lives         that one, which is about to attach again

The worker alone decides whom it follows; a claim is only who should ask first. Others may ask
after `CLAIM_DELAY_S`. A share is an even part of all workers, never above `max_workers`; who leads
more, for it started first or took over, gives the rest away when they are idle.

Must not know: streams, Redis, time. Entry points: `Fleet.owners`, `Fleet.claims`,
`Fleet.heir_of`, `Fleet.num_to_give`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from octavo.registry import SchedulerRecord, WorkerRecord
from octavo.succession import choose, successor

# A free worker that its owner did not attach is anybody's after this long.
CLAIM_DELAY_S = 3.0


@dataclass(frozen=True)
class Fleet:
    """Workers and schedulers as one scheduler sees them.

    `alive`: ids of the schedulers that live; `staying`: those that don't drain; `open`: those of
    them that take workers. `max_workers` bounds what a scheduler claims, not what it takes over.
    """

    workers: tuple[WorkerRecord, ...]
    alive: frozenset[str]
    staying: frozenset[str]
    open: frozenset[str]
    max_workers: int
    led: Counter[str] = field(init=False)

    def __post_init__(self) -> None:
        led = Counter(record.leader_id for record in self.workers if self._is_led(record))
        object.__setattr__(self, "led", led)

    @classmethod
    def seen_by(
        cls,
        scheduler_id: str,
        schedulers: Iterable[SchedulerRecord],
        workers: Iterable[WorkerRecord],
        *,
        lost: Iterable[str] = (),
        max_workers: int,
    ) -> "Fleet":
        """The view of `scheduler_id`, which lives itself; `lost` ids don't, whatever is told."""
        dead = set(lost)
        records = [record for record in schedulers if record.scheduler_id not in dead]
        own = {scheduler_id}
        return cls(
            tuple(sorted(workers, key=lambda record: record.worker_id)),
            frozenset({r.scheduler_id for r in records} | own),
            frozenset({r.scheduler_id for r in records if not r.draining} | own),
            frozenset(
                {r.scheduler_id for r in records if r.takes_workers and not r.draining} | own
            ),
            max_workers,
        )

    @property
    def share(self) -> int:
        """Workers that a scheduler leads when all lead alike."""
        return min(-(-len(self.workers) // len(self.open)), self.max_workers)

    def free(self) -> list[WorkerRecord]:
        """Workers that no living scheduler leads."""
        return [record for record in self.workers if not self._is_led(record)]

    def owners(self) -> dict[str, str]:
        """Who should attach each free worker, by worker id; one for whom nobody has room, none."""
        led = Counter(self.led)
        owners: dict[str, str] = {}
        for record in self.free():
            owner = self._owner(record, led)
            if owner is not None:
                owners[record.worker_id] = owner
                led[owner] += 1
        return owners

    def claims(self, scheduler_id: str, free_for_s: Mapping[str, float]) -> list[WorkerRecord]:
        """Workers that `scheduler_id` should attach now.

        `free_for_s`: how long it has seen each worker free, by id.
        """
        owners = self.owners()
        num_led = self.led[scheduler_id]
        claimed: list[WorkerRecord] = []
        for record in self.free():
            is_own = owners.get(record.worker_id) == scheduler_id
            is_late = free_for_s.get(record.worker_id, 0.0) >= CLAIM_DELAY_S
            # More than it wants to lead is better than a worker that nobody leads.
            may_lead = num_led < self.max_workers or record.worker_id not in owners
            if is_own or (is_late and may_lead):
                claimed.append(record)
                num_led += 1
        return claimed

    def heir_of(self, lost_id: str) -> str | None:
        """Who takes over the workers of a lost scheduler."""
        return successor(self.open, lost_id)

    def num_to_give(self, scheduler_id: str) -> int:
        """Led workers beyond its share for which others have room."""
        others = self.open - {scheduler_id}
        room = sum(max(self.share - self.led[other], 0) for other in others)
        return min(max(self.led[scheduler_id] - self.share, 0), room)

    def _is_led(self, record: WorkerRecord) -> bool:
        return record.leader_id in self.alive

    def _owner(self, record: WorkerRecord, led: Counter[str]) -> str | None:
        last = record.leader_id or record.last_leader_id
        if last and last not in self.staying:
            return self.heir_of(last)
        # A worker of a scheduler with a list of its own is on that list.
        if last and (last not in self.open or led[last] < self.share):
            return last
        with_room = [name for name in self.open if led[name] < self.share]
        return choose(with_room, record.worker_id.encode())
