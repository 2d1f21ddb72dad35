"""One production cell over fake workers: its scheduler is the real one, only time is not.

Must not know: routers, policies. Entry point: `SimCell`.
"""

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from octavo.bloom import BloomFilter, build_filter
from octavo.capacity import Capacity
from octavo.metrics import SchedulerMetrics
from octavo.model_spec import ModelSpec
from octavo.settings import SchedulerSettings
from octavo_router.cells import Cell as RouterCell
from octavo_scheduler.core import Cell
from octavo_scheduler.members import Member, state_of
from octavo_scheduler.outbox import Frame, Outbox
from octavo_scheduler.plan import StepOutcome
from octavo_scheduler.recovery import Loss
from octavo_scheduler.sequence import Submission
from tests.bench.simulator.device import Cost, Device
from tests.bench.simulator.events import Events

# As the scheduler's ledger and the router's discovery do it.
FILTER_EVERY_S = 3.0
FILTER_DELAY_S = 1.0
_MAX_MODEL_LEN = 1 << 20


class SimCell:
    """A cell, its devices, and what it publishes."""

    def __init__(
        self,
        cell_id: str,
        num_workers: int,
        *,
        events: Events,
        settings: SchedulerSettings,
        cost: Cost,
        block_size: int,
        num_routers: int,
        answer_of: Callable[[bytes], bytes],
        on_frame: Callable[[str, int, Frame], None],
    ) -> None:
        self.cell_id = cell_id
        self.is_paused = False
        self.num_lost_writes = 0  # publications that are yet to be lost
        self.metrics = SchedulerMetrics(CollectorRegistry())
        self.core = Cell(settings, self.metrics, lambda: events.now, self._pump_soon)
        self.devices: list[Device] = []
        self._events = events
        self._settings = settings
        self._cost = cost
        self._answer_of = answer_of
        self._on_frame = on_frame
        self._model = ModelSpec("simulated", "1", block_size, "none", 1, _MAX_MODEL_LEN, 32_000, ())
        self._is_pump_due = False
        self._armed_for_s: float | None = None
        self._waiting: list[Callable[[], None]] = []  # what came while it was paused
        self._dirty: set[int] = set()
        self._outboxes: dict[int, Outbox] = {}
        self._filter: BloomFilter | None = None
        self._filter_changes = -1
        self.members: list[Member] = []
        for i in range(num_workers):
            self._attach(i)
        for router in range(num_routers):
            self._outboxes[router] = Outbox(lambda router=router: self._dirty.add(router))
            self.core.open_session(router, self._outboxes[router])
        events.after(FILTER_EVERY_S, self._publish)

    # ---- what happens to it

    def submit(self, router: int, submission: Submission) -> None:
        self._do(lambda: self.core.submit(router, submission))

    def attach_again(self, i: int) -> None:
        """A second Attach of a worker: it drops its rows, keeps its blocks, and is led anew."""
        old = self.members[i]
        pool = old.state.pool
        blocks = [b for b in range(1, pool.num_blocks) if pool.hash_of(b) is not None]
        hashes = [h for b in blocks if (h := pool.hash_of(b)) is not None]
        self.core.detach(old, Loss.TAKEN)
        self._attach(i)
        self.members[i].state.restore(blocks, hashes)

    def pause(self) -> None:
        """The scheduler's process stands still; its workers run out of plans."""
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False
        waiting, self._waiting = self._waiting, []
        for what in waiting:
            what()
        self._pump_soon()

    # ---- what others see

    def as_router_sees_it(self) -> RouterCell:
        """What the next frame of a session and the last published filter say."""
        members = self.core.members
        return RouterCell(
            self.cell_id,
            self.prefill_backlog_tokens,
            int(members.prefill_tokens_per_s),
            self.core.is_draining,
            None if self._filter is None else self._filter.leading_run,
        )

    @property
    def prefill_backlog_tokens(self) -> int:
        states = [member.state for member in self.core.members]
        in_flight = sum(plan.num_prefill_tokens for s in states for plan in s.in_flight)
        return self.core.queue.num_tokens + sum(s.backlog_tokens for s in states) + in_flight

    def count_hits(self, hashes: tuple[bytes, ...]) -> int:
        """Leading blocks of `hashes` in the fullest of its workers' caches."""
        return max(len(m.state.pool.match(hashes, len(hashes))) for m in self.core.members)

    # ---- inside

    def _attach(self, i: int) -> None:
        cost = self._cost
        # Plus the null block.
        capacity = Capacity(cost.num_blocks + 1, cost.max_num_seqs, cost.max_num_batched_tokens)
        state = state_of(f"{self.cell_id}-w{i}", self._model, capacity, self._settings)
        held: list[Member] = []
        device = Device(
            self._events,
            cost,
            self._model.block_size,
            self._answer_of,
            lambda outcome: self._do(lambda: self._read(held[0], outcome)),
        )
        held.append(self.core.attach(state, self._model, device))
        if i < len(self.members):
            self.members[i], self.devices[i] = held[0], device
        else:
            self.members.append(held[0])
            self.devices.append(device)

    def _read(self, member: Member, outcome: StepOutcome) -> None:
        if member in self.core.members:
            self.core.read(member, [outcome])

    def _do(self, what: Callable[[], None]) -> None:
        if self.is_paused:
            self._waiting.append(lambda: self._do(what))
            return
        what()
        self._tell()

    def _tell(self) -> None:
        while self._dirty:
            router = self._dirty.pop()
            self._on_frame(self.cell_id, router, self._outboxes[router].take())

    def _pump_soon(self) -> None:
        if not self._is_pump_due:
            self._is_pump_due = True
            self._events.after(0.0, self._pump)

    def _pump(self) -> None:
        self._is_pump_due = False
        if self.is_paused:
            return
        deadline = self.core.next_deadline()
        if deadline is not None and deadline <= self._events.now:
            self.core.expire()
        self.core.pump()
        self._tell()
        deadline = self.core.next_deadline()
        if deadline is not None and deadline != self._armed_for_s:
            self._armed_for_s = deadline
            self._events.after(max(0.0, deadline - self._events.now), self._pump_soon)

    def _publish(self) -> None:
        self._events.after(FILTER_EVERY_S, self._publish)
        pools = [member.state.pool for member in self.core.members]
        changes = sum(pool.num_changes for pool in pools)
        if self.is_paused or changes == self._filter_changes:
            return
        self._filter_changes = changes
        if self.num_lost_writes:
            self.num_lost_writes -= 1
            return
        data = build_filter([h for pool in pools for h in pool.hashes_of(slice(None))])
        self._events.after(FILTER_DELAY_S, lambda: self._take_in(data))

    def _take_in(self, data: bytes) -> None:
        self._filter = BloomFilter.from_bytes(data)
