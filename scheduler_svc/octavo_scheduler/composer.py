"""Composing the next plan of one worker: rows that decode grow, then prefill gets its chunks.

The stages run in this order and share the worker's draft: `grow_decodes`, (admission, by the
cell), `plan_chunks`, `freeze_plan`. Where blocks are short, a row takes them from rows that go
after it (`batcher.choose_victim`); a row that finds no victim stalls: the worker skips it until
its table grows.

Must not know: the queue, sessions, protos, time. Entry points: those stages and `is_plan_due`.
"""

from typing import NamedTuple

import numpy as np

from octavo_scheduler import batcher
from octavo_scheduler.plan import Plan
from octavo_scheduler.sequence import FinishReason, Sequence, State, order_of
from octavo_scheduler.worker_state import WorkerState


class Growth(NamedTuple):
    """What growing the decode rows did."""

    preempted: list[Sequence]
    num_stalled: int

    @property
    def is_tight(self) -> bool:
        """No row may be added in this step: it would take what others just gave up."""
        return bool(self.preempted) or self.num_stalled > 0


class Cover(NamedTuple):
    """Steps up to `until` are provided for; a leased plan's worker decodes on until then."""

    until: int
    leased: bool


def may_plan(worker: WorkerState, num_waiting: int) -> bool:
    """Whether another plan may be in flight at all, and anything might ask for one."""
    if worker.num_unread >= worker.limits.plans_queued:
        return False
    leftovers = worker.draft.removed or worker.pending_seals
    return bool(num_waiting or worker.rows.num_held or leftovers)


def choose_cover(worker: WorkerState, num_waiting: int) -> Cover:
    """A lease if nothing waits or prefills and the pool has ample room; else one step."""
    horizon = worker.horizon
    limits = worker.limits
    is_steady = not num_waiting and not worker.prefilling and not worker.leaving
    if is_steady and batcher.can_lease(
        limits, worker.num_decoding, worker.pool.num_free, worker.block_size
    ):
        return Cover(batcher.lease_end(limits, worker.last_step, horizon), True)
    return Cover(horizon + 1, False)


def is_plan_due(worker: WorkerState, cover: Cover) -> bool:
    """Whether the worker would run dry without a further plan, or something is urgent."""
    if worker.draft.is_urgent or worker.draft.added or worker.draft.chunks:
        return True
    covered = worker.sure_until - worker.last_step
    if covered <= batcher.steps_ahead(worker.limits, leased=cover.leased):
        rows = worker.rows
        if bool(np.any(rows.decoding & (rows.known + covered < rows.limit))):
            return True
    is_idle = not worker.rows.num_held and not worker.num_unread
    return is_idle and bool(worker.draft.removed or worker.pending_seals)


def grow_decodes(worker: WorkerState, until: int, max_preemptions: int) -> Growth:
    """Give every decoding row the KV slots that steps up to `until` may write."""
    rows = worker.rows
    slots = np.minimum(rows.limit, rows.known + (until - worker.last_step)) - 1
    short = np.flatnonzero(rows.decoding & (slots > rows.capacity))
    preempted: list[Sequence] = []
    num_stalled = 0
    if not short.size:
        return Growth(preempted, 0)
    needs = {
        holder: worker.num_blocks_for(int(slots[row])) - len(holder.block_ids)
        for row in short
        if (holder := rows.holders[row]) is not None
    }
    for sequence in order_of(list(needs)):
        if sequence.state is not State.RUNNING:
            continue
        victims = make_room(worker, sequence, needs[sequence], max_preemptions)
        preempted += victims
        if worker.pool.num_free >= needs[sequence]:
            worker.grow(sequence, needs[sequence])
        elif worker.rows.num_held == 1:
            worker.end_after_flight(sequence, FinishReason.LENGTH)
        else:
            num_stalled += 1
    return Growth(preempted, num_stalled)


def make_room(
    worker: WorkerState, sequence: Sequence, num_blocks: int, max_preemptions: int
) -> list[Sequence]:
    """Preempt rows that go after `sequence` until `num_blocks` are free, or none is left."""
    victims: list[Sequence] = []
    while worker.pool.num_free < num_blocks:
        holders = list(worker.sequences())
        candidates = [(holder.order, holder.num_preemptions) for holder in holders]
        choice = batcher.choose_victim(candidates, sequence.order, max_preemptions)
        if choice is None:
            break
        worker.preempt(holders[choice])
        victims.append(holders[choice])
    return victims


def chunk_budget(worker: WorkerState) -> int:
    # Newcomers begin at their cached prefix; who is under way is farther, mostly.
    context = max((sequence.num_planned for sequence in worker.prefilling), default=0)
    return batcher.chunk_budget(worker.limits, worker.num_decoding, worker.cost, context)


def plan_chunks(worker: WorkerState, budget: int, max_preemptions: int) -> list[Sequence]:
    """Share the budget among the prefilling rows; returns who was preempted for it."""
    preempted: list[Sequence] = []
    if not worker.prefilling:
        return preempted
    sequences = list(worker.prefilling)
    remaining = [len(s.token_ids) - s.num_planned for s in sequences]
    lengths = batcher.share_budget(budget, remaining, worker.limits.min_chunk_tokens)
    for sequence, length in zip(sequences, lengths, strict=True):
        if not length or sequence.state is not State.RUNNING:
            continue
        needed = worker.num_blocks_for(sequence.num_planned + length) - len(sequence.block_ids)
        if needed > worker.pool.num_free:
            # Admission leaves blocks for all admitted rows; so no row was added just now, and
            # none that could be taken away again in this very draft.
            assert not worker.draft.added
            preempted += make_room(worker, sequence, needed, max_preemptions)
        if needed > worker.pool.num_free:
            needed = worker.pool.num_free
            slots = (len(sequence.block_ids) + needed) * worker.block_size
            length = slots - sequence.num_planned
        if needed > 0:
            worker.grow(sequence, needed)
        if length > 0:
            worker.add_chunk(sequence, length)
    return preempted


def freeze_plan(worker: WorkerState, cover: Cover) -> Plan:
    """The worker's draft as a plan; leased if nothing in it forbids it."""
    is_quiet = cover.leased and not worker.draft.chunks and not worker.draft.added
    return worker.freeze(cover.until if is_quiet else 0)
