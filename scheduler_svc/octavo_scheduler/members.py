"""The workers of a cell, as members: their sum, and which of them hangs.

Must not know: the queue, sessions, streams. Entry point: `Members`.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from octavo.capacity import Capacity
from octavo.model_spec import ModelSpec
from octavo.settings import SchedulerSettings
from octavo_scheduler.batcher import BatchLimits
from octavo_scheduler.outlook import Outlook
from octavo_scheduler.plan import Plan
from octavo_scheduler.recovery import is_hung
from octavo_scheduler.sequence import Sequence
from octavo_scheduler.worker_state import WorkerState

# Taken for a worker's times before its first results: it may still warm up.
_UNMEASURED_STEP_S, _UNMEASURED_TOKEN_S = 1.0, 0.01


class PlanSink(Protocol):
    """Where a worker's plans go; `send` never blocks and keeps the order."""

    def send(self, plan: Plan) -> None: ...


@dataclass(slots=True, eq=False)
class Member:
    """A worker of the cell: its state, where its plans go, when it last advanced."""

    state: WorkerState
    sink: PlanSink
    last_progress: float
    last_step: int = 0
    # It drains: rows that it holds may end, none is added.
    is_leaving: bool = False
    # The same, for another scheduler is to lead it.
    is_parting: bool = False

    @property
    def takes_rows(self) -> bool:
        return not (self.is_leaving or self.is_parting)


class Members(list[Member]):
    """All workers that the cell leads now."""

    @property
    def num_running(self) -> int:
        return sum(member.state.rows.num_held for member in self)

    @property
    def num_returning(self) -> int:
        return sum(member.state.num_returning for member in self)

    @property
    def num_blocks(self) -> int:
        return sum(member.state.pool.num_usable for member in self)

    @property
    def num_used_blocks(self) -> int:
        return sum(member.state.pool.num_used for member in self)

    @property
    def prefill_tokens_per_s(self) -> float:
        return sum(member.state.cost.prefill_tokens_per_s for member in self)

    def outlook(self) -> Outlook:
        """What rates and rows of the workers that take new ones let others expect."""
        workers = self.open_states()
        if not workers:
            return Outlook()
        tokens_per_s = sum(worker.cost.prefill_tokens_per_s for worker in workers)
        rates = (tokens_per_s, len(workers) / tokens_per_s if tokens_per_s else 0.0)
        if any(worker.rows.num_free for worker in workers):
            return Outlook(*rates)
        rows_per_s = sum(worker.rows_per_s for worker in workers)
        left = np.sort(np.concatenate([worker.rows.left for worker in workers]))
        return Outlook(*rates, rows_per_s, left)

    @property
    def max_pool_tokens(self) -> int:
        """KV slots of the largest worker."""
        slots = (m.state.pool.num_usable * m.state.block_size for m in self)
        return max(slots, default=0)

    def prompt_backlog_tokens(self) -> int:
        """Known tokens of its rows whose KV isn't there yet."""
        return sum(m.state.backlog_tokens + m.state.in_flight_tokens for m in self)

    def backlog_tokens(self) -> int:
        """Tokens that its rows still compute or generate, an upper bound."""
        states = (member.state for member in self)
        return sum(state.backlog_tokens + state.num_tokens_to_generate() for state in states)

    def open_states(self) -> list[WorkerState]:
        """Workers that take new rows."""
        return [member.state for member in self if member.takes_rows]

    def holder_of(self, sequence: Sequence) -> WorkerState:
        """The worker on which a running sequence holds its row."""
        row = sequence.row
        for member in self:
            holders = member.state.rows.holders
            if row < len(holders) and holders[row] is sequence:
                return member.state
        raise AssertionError("a running sequence has a worker")

    def find_hung(self, now: float, loop_lag_s: float, floor_s: float) -> Member | None:
        """The worker that owes steps and was silent longest beyond its limit; one at a time."""
        hung: list[Member] = []
        for member in self:
            state = member.state
            if not state.owes_steps:
                continue
            tokens = sum(plan.num_prefill_tokens for plan in state.in_flight)
            predicted_s = (state.num_unread + 1) * (state.cost.decode_s or _UNMEASURED_STEP_S)
            predicted_s += tokens * (state.cost.prefill_token_s or _UNMEASURED_TOKEN_S)
            if is_hung(now - member.last_progress, loop_lag_s, floor_s, predicted_s):
                hung.append(member)
        return min(hung, key=lambda member: member.last_progress, default=None)


def state_of(
    worker_id: str, model: ModelSpec, capacity: Capacity, settings: SchedulerSettings
) -> WorkerState:
    """The empty state of a worker that was just attached."""
    itl = settings.itl_limits
    limits = BatchLimits.of(
        _least(settings.max_num_seqs, capacity.max_num_seqs),
        _least(settings.max_num_batched_tokens, capacity.max_num_batched_tokens),
        settings.min_chunk_tokens,
        itl.itl_target_ms / 1000,
        settings.plans_queued,
        settings.lease_steps,
        itl.itl_stretch,
    )
    return WorkerState(
        worker_id,
        capacity,
        model.block_size,
        limits,
        watermark=settings.admission_watermark,
        growth_reserve=settings.growth_reserve,
        enable_prefix_caching=settings.enable_prefix_caching,
    )


def _least(setting: int, own: int) -> int:
    """A setting of 0 means the worker's own limit."""
    return min(setting, own) if setting else own
