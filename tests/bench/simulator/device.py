"""A fake worker in virtual time: obeys plans as worker.proto says, and only takes time.

Prefill and decode are two lanes: a step with chunks lasts as long as its prompt tokens take,
and rows that decode go on beside it, a token each `decode_s`. So that an hour of a fleet fits
into seconds, `stride` tokens may be drawn as one (an answer of 320 tokens is then 10 draws).
`is_serial`: the lanes are one, and a step lasts as long as both, as on a card.

Must not know: requests, policies. Entry points: `Device.send`, `Cost`.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil

import numpy as np

from octavo.row_event import RowEvent
from octavo_scheduler.plan import AddedRow, Plan, StepOutcome
from tests.bench.simulator.events import Events

_EPSILON_S = 1e-9


@dataclass(frozen=True, slots=True)
class Cost:
    """A worker's speed and size (the null block comes on top of `num_blocks`).

    `row_s`: what each decoding row adds to a step; `pair_s`: each token before a prompt's token;
    `mixed_s`: chunks of any length beside rows that decode.
    """

    prefill_tokens_per_s: float = 16_000.0
    prompt_s: float = 0.02
    decode_s: float = 0.025
    num_blocks: int = 1000
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    stride: int = 1
    is_serial: bool = False
    row_s: float = 0.0
    pair_s: float = 0.0
    mixed_s: float = 0.0


@dataclass(slots=True)
class _Row:
    generation: int
    known: int
    capacity: int
    limit: int
    answer: "np.ndarray[tuple[int], np.dtype[np.uint32]]"
    num_drawn: int = 0
    is_decoding: bool = False
    is_begun: bool = False
    due_s: float = 0.0


@dataclass(slots=True)
class _Step:
    """A step under way: a plan's own, or (None) a repeat."""

    plan: Plan | None
    is_waiting: bool  # it only waits for tokens to be due; a plan may cut in
    finished_rows: list[int] = field(default_factory=list[int])
    num_prefill_tokens: int = 0
    serial_s: float = 0.0


class Device:
    """One worker; `on_outcome` hears of each step's result when it ends."""

    def __init__(
        self,
        events: Events,
        cost: Cost,
        block_size: int,
        answer_of: Callable[[bytes], bytes],
        on_outcome: Callable[[StepOutcome], None],
    ) -> None:
        self.cost = cost
        self.num_prefill_tokens = 0
        self.busy_s = 0.0
        self.is_paused = False
        self._events = events
        self._block_size = block_size
        self._answer_of = answer_of
        self._on_outcome = on_outcome
        self._rows: dict[int, _Row] = {}
        self._plans: deque[Plan] = deque()
        self._step: _Step | None = None
        self._ticket = 0
        self._last_step = self._plan_id = self._repeat = self._decode_until = 0
        self._tick_s = cost.decode_s * cost.stride

    def send(self, plan: Plan) -> None:
        """Queue a plan; it begins when the step under way ends."""
        self._plans.append(plan)
        if self._step is None or self._step.is_waiting:
            self._step = None
            self._ticket += 1
            self._schedule(0.0, self._begin)

    def pause(self) -> None:
        """Stop as SIGSTOP does: nothing begins and nothing is told."""
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False
        if self._step is None:
            self._schedule(0.0, self._begin)

    # ---- inside

    def _schedule(self, delay_s: float, what: Callable[[], None]) -> None:
        ticket = self._ticket
        self._events.after(delay_s, lambda: what() if ticket == self._ticket else None)

    def _begin(self) -> None:
        if self._step is not None or self.is_paused:
            return
        now = self._events.now
        if self._plans:
            plan = self._plans.popleft()
            self._step = step = _Step(plan, is_waiting=False)
            duration_s = self._apply(plan, step)
        else:
            ready = [row for row in self._rows.values() if self._may_draw(row)]
            if not ready or self._last_step >= self._decode_until:
                return
            is_serial, decode_s = self.cost.is_serial, self._decode_s()
            self._step = _Step(None, is_waiting=not is_serial, serial_s=decode_s)
            duration_s = max(0.0, min(row.due_s for row in ready) - now)
            duration_s = decode_s if is_serial else duration_s
        self._schedule(duration_s, self._end)

    def _apply(self, plan: Plan, step: _Step) -> float:
        """Take a plan's changes in; how long its step lasts."""
        for row in plan.removed_rows:
            self._rows.pop(row, None)
        for added in plan.added_rows:
            self._rows[added.row] = self._row_of(added)
        updates = plan.block_updates
        for i in range(0, len(updates), 3):
            if updates[i] in self._rows:
                self._rows[updates[i]].capacity += self._block_size
        prefill_s = 0.0
        for chunk in plan.chunks:
            row = self._rows.get(chunk.row)
            if row is None:
                continue
            num_tokens = len(chunk.token_ids) // 4
            step.num_prefill_tokens += num_tokens
            prefill_s += num_tokens / self.cost.prefill_tokens_per_s
            prefill_s += num_tokens * (chunk.start + num_tokens / 2) * self.cost.pair_s
            if not row.is_begun:
                row.is_begun = True
                prefill_s += self.cost.prompt_s
            if chunk.is_last:
                row.known = chunk.start + num_tokens
                step.finished_rows.append(chunk.row)
        self.num_prefill_tokens += step.num_prefill_tokens
        self.busy_s += prefill_s
        # A leased plan without chunks is told at once: its repeats wait for what is due.
        is_leased = plan.decode_until > self._last_step + 1 and not self.cost.is_serial
        decode_s = 0.0 if is_leased else self._decode_s()
        if decode_s and prefill_s:
            prefill_s += self.cost.mixed_s
        step.serial_s = prefill_s + decode_s
        return step.serial_s if self.cost.is_serial else max(prefill_s, decode_s)

    def _decode_s(self) -> float:
        """How long a decode step of the rows that can draw takes."""
        num_rows = sum(map(self._may_draw, self._rows.values()))
        return self.cost.decode_s + num_rows * self.cost.row_s if num_rows else 0.0

    def _row_of(self, added: AddedRow) -> _Row:
        return _Row(
            added.generation,
            0,
            len(added.block_ids) * self._block_size,
            added.max_total_tokens,
            np.frombuffer(self._answer_of(added.sampling), np.uint32),
        )

    def _may_draw(self, row: _Row) -> bool:
        return row.is_decoding and row.known - 1 < row.capacity

    def _end(self) -> None:
        step, self._step = self._step, None
        assert step is not None
        self._last_step += 1
        if step.plan is None:
            self._repeat += 1
        else:
            self._plan_id, self._repeat = step.plan.plan_id, 0
            self._decode_until = step.plan.decode_until
        now = self._events.now + _EPSILON_S
        drawn = [i for i, row in self._rows.items() if self._may_draw(row) and row.due_s <= now]
        for i in drawn:
            self._rows[i].due_s = self._next_due(now)
        for i in step.finished_rows:
            if (row := self._rows.get(i)) is not None:
                row.is_decoding = True
                row.due_s = self._next_due(now)
                drawn.append(i)
        outcome = self._draw(drawn, step)
        self._on_outcome(outcome)
        self._ticket += 1
        if self._step is None:
            self._begin()

    def _next_due(self, now: float) -> float:
        """On a grid of ticks that all rows share, so that their draws come together."""
        if self.cost.is_serial:
            return now
        if self.cost.stride == 1:
            return now + self.cost.decode_s - 2 * _EPSILON_S
        return (round(now / self._tick_s) + 1) * self._tick_s

    def _draw(self, drawn: list[int], step: _Step) -> StepOutcome:
        generations: list[int] = []
        token_ids: list[int] = []
        events: list[int] = []
        for i in drawn:
            row = self._rows[i]
            has_ids = row.num_drawn < row.answer.size
            token_ids.append(int(row.answer[row.num_drawn]) if has_ids else 0)
            generations.append(row.generation)
            row.num_drawn += 1
            row.known += 1
            events.append(RowEvent.LENGTH if row.known >= row.limit else RowEvent.ALIVE)
            if row.known >= row.limit:
                del self._rows[i]
        step_s = step.num_prefill_tokens / self.cost.prefill_tokens_per_s
        if self.cost.is_serial:
            step_s = step.serial_s
        elif len(drawn) > len(step.finished_rows) and not step_s:
            step_s = self.cost.decode_s
        return StepOutcome(
            step=self._last_step,
            plan_id=self._plan_id,
            repeat=self._repeat,
            rows=np.array(drawn, np.uint32),
            generations=np.array(generations, np.uint32),
            token_ids=np.array(token_ids, np.uint32),
            events=np.array(events, np.uint8),
            step_us=ceil(1e6 * step_s),
        )
