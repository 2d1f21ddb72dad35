"""A fleet in virtual time: routers that choose, cells that schedule, devices that take time.

What is simulated is time, the wire and the devices; the choice of a cell, the filters, the
queue, binding, batching and block pools are the production modules. Entry point: `simulate`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from octavo.settings import SchedulerSettings
from octavo_router.cells import Cell as RouterCell
from octavo_scheduler.outbox import Frame
from octavo_scheduler.sequence import FinishReason, Submission
from tests.bench.simulator.cell import SimCell
from tests.bench.simulator.device import Cost
from tests.bench.simulator.events import Events
from tests.bench.simulator.policies import POLICIES, Memory, Policy, Target
from tests.bench.simulator.workload import SimRequest, Workload

# Router to scheduler, one way.
_WIRE_S = 0.001
# A session with rows that decode has a frame, and with it the cell's load, at least as often.
_FRAME_S = 0.05
_HEARTBEAT_S = 1.0


@dataclass(slots=True)
class Outcome:
    """What became of a request; times count from the start of the simulation."""

    tenant: str
    num_prompt_tokens: int
    arrival_s: float
    first_token_s: float | None = None
    ended_s: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    reason: FinishReason | None = None
    retry_after_ms: int | None = None  # it was rejected
    times_s: list[float] = field(default_factory=list[float])  # of its tokens, if kept

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s


@dataclass(frozen=True, slots=True)
class Shape:
    """How many of what, and by which policy."""

    policy: str = "octavo"
    num_routers: int = 1
    num_cells: int = 1
    workers_per_cell: int = 8

    def __str__(self) -> str:
        return f"{self.num_cells} x {self.workers_per_cell}, {self.num_routers} routers"


@dataclass(slots=True)
class _Router:
    """What one router knows: each cell as its last frame said, and its own memory."""

    seen: dict[str, tuple[float, RouterCell]] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that happens at `at_s`, to the fleet."""

    at_s: float
    what: "Callable[[Fleet], None]"


class Fleet:
    """Everything that is simulated together."""

    def __init__(
        self,
        workload: Workload,
        shape: Shape,
        cost: Cost,
        settings: SchedulerSettings,
        *,
        keeps_times: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        self.events = Events()
        self.cells: dict[str, SimCell] = {}
        self.outcomes: list[Outcome | None] = [None] * len(workload.requests)
        self._workload = workload
        self._stride = cost.stride
        self._keeps_times = keeps_times
        self._timeout_ms = None if timeout_s is None else round(1000 * timeout_s)
        self._policy: Policy = POLICIES[shape.policy]
        self._routers = [_Router() for _ in range(shape.num_routers)]
        self._num_open = len(workload.requests)
        self._num_live: dict[str, int] = {}
        self._carrier: dict[int, str] = {}
        self._followers: dict[int, list[int]] = {}
        for i in range(shape.num_cells):
            cell_id = f"cell-{i}"
            self.cells[cell_id] = SimCell(
                cell_id,
                shape.workers_per_cell,
                events=self.events,
                settings=settings,
                cost=cost,
                block_size=workload.block_size,
                num_routers=shape.num_routers,
                answer_of=lambda sampling: workload.requests[int(sampling)].answer_ids,
                on_frame=self._on_frame,
            )
            self._num_live[cell_id] = 0
        for i, request in enumerate(workload.requests):
            if request.follows is None:
                self.events.after(request.arrival_s, lambda i=i: self._arrive(i))
            else:
                self._followers.setdefault(request.follows, []).append(i)

    def run(self, troubles: Sequence[Trouble] = ()) -> list[Outcome]:
        """To the last request's end."""
        for trouble in troubles:
            self.events.after(trouble.at_s, lambda trouble=trouble: trouble.what(self))
        self.events.run(lambda: self._num_open == 0)
        outcomes = [outcome for outcome in self.outcomes if outcome is not None]
        assert len(outcomes) == len(self.outcomes), "every request arrived and ended"
        return outcomes

    # ---- inside

    def _arrive(self, i: int) -> None:
        request = self._workload.requests[i]
        self.outcomes[i] = Outcome(request.tenant, request.num_prompt_tokens, self.events.now)
        self._route(i, list(self.cells.values()))

    def _route(self, i: int, cells: list[SimCell]) -> None:
        request = self._workload.requests[i]
        number = i % len(self._routers)
        router = self._routers[number]
        targets = [self._target(router, cell) for cell in cells]
        cell_id = self._policy(request, targets, self._workload.block_size, router.memory)
        self._carrier[i] = cell_id
        self._num_live[cell_id] += 1
        live = router.memory.num_live
        live[cell_id] = live.get(cell_id, 0) + 1
        # What it sends itself is known at once; the next frame's load includes it.
        seen_s, seen = router.seen[cell_id]
        backlog_tokens = seen.backlog_tokens + request.num_prompt_tokens
        router.seen[cell_id] = (seen_s, replace(seen, backlog_tokens=backlog_tokens))
        submission = self._submission(i, request)
        self.events.after(_WIRE_S, lambda: self.cells[cell_id].submit(number, submission))

    def _target(self, router: _Router, cell: SimCell) -> Target:
        return Target(
            cell=self._seen(router, cell),
            num_requests=self._num_live[cell.cell_id],
            backlog_tokens=cell.prefill_backlog_tokens,
            tokens_per_s=cell.core.members.prefill_tokens_per_s or 10_000.0,
            count_hits=lambda hashes: cell.count_hits(tuple(hashes)),
        )

    def _seen(self, router: _Router, cell: SimCell) -> RouterCell:
        """The cell as the router's last frame from it said, not older than frames come."""
        last = router.seen.get(cell.cell_id)
        age_s = _FRAME_S if router.memory.num_live.get(cell.cell_id) else _HEARTBEAT_S
        if last is None or (self.events.now - last[0] > age_s and not cell.is_paused):
            last = (self.events.now, cell.as_router_sees_it())
            router.seen[cell.cell_id] = last
        return last[1]

    def _submission(self, i: int, request: SimRequest) -> Submission:
        return Submission(
            handle=i,
            request_id="",
            prompt_token_ids=request.prompt_ids or bytes(4 * request.num_prompt_tokens),
            root_hash=request.root_hash,
            block_hashes=request.hashes,
            sampling=str(i).encode(),
            max_tokens=-(-request.num_output_tokens // self._stride),
            min_tokens=0,
            ending_ids=frozenset(),
            tenant=request.tenant,
            priority=request.priority,
            deadline_ms=self._timeout_ms,
        )

    def _on_frame(self, cell_id: str, number: int, frame: Frame) -> None:
        router = self._routers[number]
        router.seen[cell_id] = (self.events.now, self.cells[cell_id].as_router_sees_it())
        for started in frame.started:
            self._outcome(started.handle).num_cached_tokens = started.num_cached_tokens
        if frame.tokens is not None:
            for handle in frame.tokens.handles.tolist():
                outcome = self._outcome(handle)
                if outcome.first_token_s is None:
                    outcome.first_token_s = self.events.now
                if self._keeps_times:
                    outcome.times_s.append(self.events.now)
        for rejected in frame.rejected:
            self._leave(router, cell_id, rejected.handle)
            self._rejected(cell_id, rejected.handle, rejected.error.retry_after_ms)
        for finished in frame.finished:
            outcome = self._outcome(finished.handle)
            outcome.reason = finished.reason
            outcome.num_preemptions = finished.num_preemptions
            self._leave(router, cell_id, finished.handle)
            self._end(finished.handle)

    def _rejected(self, cell_id: str, handle: int, retry_after_ms: int | None) -> None:
        """One more cell is tried, as the router does."""
        outcome = self._outcome(handle)
        others = [cell for cell in self.cells.values() if cell.cell_id != cell_id]
        if others and outcome.retry_after_ms is None:
            outcome.retry_after_ms = retry_after_ms or 0
            self._route(handle, others)
            return
        outcome.retry_after_ms = retry_after_ms or 0
        self._end(handle)

    def _leave(self, router: _Router, cell_id: str, handle: int) -> None:
        del self._carrier[handle]
        self._num_live[cell_id] -= 1
        router.memory.num_live[cell_id] -= 1

    def _end(self, handle: int) -> None:
        self._outcome(handle).ended_s = self.events.now
        self._num_open -= 1
        for i in self._followers.get(handle, ()):
            think_s = self._workload.requests[i].think_s
            self.events.after(think_s, lambda i=i: self._arrive(i))

    def _outcome(self, handle: int) -> Outcome:
        outcome = self.outcomes[handle]
        assert outcome is not None
        return outcome
