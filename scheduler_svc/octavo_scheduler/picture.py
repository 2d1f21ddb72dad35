"""The cell as a plain dictionary for live views: numbers and names, never a prompt or an answer.

Its fields may change in any version. Must not know: protos, streams. Entry point: `picture_of`.
"""

from collections.abc import Sequence as SequenceOf
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from prometheus_client import Counter

from octavo_scheduler.block_map import draw_map
from octavo_scheduler.chronicle import Chronicle, Entry
from octavo_scheduler.core import Cell
from octavo_scheduler.members import Member
from octavo_scheduler.recovery import Loss
from octavo_scheduler.sequence import State

# Requests looked at for the longest wait: rows of large cells and more.
_MAX_LOOKS = 4096


class Seat(NamedTuple):
    """A worker's place in the cell; `member` None: it isn't led now."""

    worker_id: str
    address: str
    epoch: int
    member: Member | None


async def picture_of(
    cell: Cell, chronicle: Chronicle, scheduler_id: str, seats: SequenceOf[Seat]
) -> dict[str, Any]:
    """Queue, workers and last requests now. The event loop turns between large pieces."""
    now = cell.clock()
    metrics = cell.metrics
    seats_of = {seat.member: seat for seat in seats}
    workers = [
        await _worker(member, seats_of.get(member), chronicle, now) for member in cell.members
    ]
    workers += _missing(seats, cell, chronicle, now)
    return {
        "scheduler_id": scheduler_id,
        "time_s": round(now, 3),
        "model": cell.model.name if cell.model else None,
        "block_size": cell.model.block_size if cell.model else None,
        "draining": cell.is_draining,
        "num_requests": len(cell.requests),
        "num_waiting": cell.num_waiting,
        "num_running": cell.members.num_running,
        "queue_tokens": cell.queue.num_tokens,
        "oldest_wait_s": round(_oldest_wait_s(cell, now), 3),
        "backlog_tokens": cell.backlog_tokens(),
        "max_prefill_tokens_per_s": round(cell.members.prefill_tokens_per_s, 1),
        "prefix_queries": _total(metrics.prefix_queries),
        "prefix_hits": _total(metrics.prefix_hits),
        "num_preemptions": _total(metrics.preemptions),
        "num_moves": _total(metrics.moves),
        "outcomes": _totals(metrics.outcomes, "outcome"),
        "workers": workers,
        "requests": [_request(cell, entry, now) for entry in chronicle.entries],
    }


async def _worker(
    member: Member, seat: Seat | None, chronicle: Chronicle, now: float
) -> dict[str, Any]:
    state = member.state
    pool, rows = state.pool, state.rows
    num_used, num_cached = pool.num_used, pool.num_cached
    rates = chronicle.rates(state.worker_id, now)
    numbers = {
        "worker_id": state.worker_id,
        "phase": "leaving" if member.is_leaving else "running",
        "address": seat.address if seat else "",
        "epoch": seat.epoch if seat else 0,
        "step": state.last_step,
        "steps_per_s": round(rates.steps, 1),
        "decode_step_ms": round(1000 * state.cost.decode_s, 3),
        "prefill_tokens_per_s": round(rates.prefill_tokens, 1),
        "decode_tokens_per_s": round(rates.decode_tokens, 1),
        "plans_in_flight": state.num_unread,
        "max_num_seqs": state.limits.max_num_seqs,
        "num_rows": rows.num_held,
        "num_decoding": state.num_decoding,
        "num_known_tokens": int(np.sum(rows.known)),
        "backlog_tokens": state.backlog_tokens,
        "num_blocks": pool.num_usable,
        "num_used_blocks": num_used,
        "num_cached_blocks": num_cached,
        "num_free_blocks": pool.num_usable - num_used - num_cached,
        "kv_utilization": round(state.utilization(), 4),
    }
    block_map = await draw_map(pool)
    return {**numbers, "num_shared_blocks": block_map.num_shared, "block_map": block_map.cells}


def _missing(
    seats: SequenceOf[Seat], cell: Cell, chronicle: Chronicle, now: float
) -> list[dict[str, Any]]:
    """Workers that aren't led: those that are awaited, and those lost lately."""
    led = {member.state.worker_id for member in cell.members}
    losses = chronicle.losses(now)
    known = {seat.worker_id: seat for seat in seats if seat.worker_id and seat.member is None}
    missing: list[dict[str, Any]] = [
        {"worker_id": "", "phase": "awaited", "address": seat.address}
        for seat in seats
        if not seat.worker_id
    ]
    for worker_id in sorted((known.keys() | losses.keys()) - led):
        seat, lost = known.get(worker_id), losses.get(worker_id)
        missing.append(
            {
                "worker_id": worker_id,
                "phase": "taken" if lost and lost.loss is Loss.TAKEN else "gone",
                "address": seat.address if seat else "",
                "loss": lost.loss.name.lower() if lost else None,
                "gone_s": round(now - lost.at, 1) if lost else None,
            }
        )
    return missing


def _request(cell: Cell, entry: Entry, now: float) -> dict[str, Any]:
    num_generated = entry.num_generated
    worker_id, why = entry.worker_id, entry.why
    phase = "ended"
    if (sequence := entry.sequence) is not None:
        num_generated = sequence.num_generated
        phase = "waiting"
        if sequence.state is State.WAITING:
            # It came back, and may go elsewhere now.
            worker_id, why = "", None
        elif sequence.state is State.RUNNING:
            rows = cell.members.holder_of(sequence).rows
            num_generated = int(rows.known[sequence.row]) - entry.num_prompt_tokens
            phase = "decode" if rows.decoding[sequence.row] else "prefill"
    return {
        "serial": entry.serial,
        "request_id": entry.request_id,
        "index": entry.index,
        "age_s": round(now - entry.arrival, 1),
        "phase": phase,
        "worker_id": worker_id,
        "why": why.value if why else None,
        "num_prompt_tokens": entry.num_prompt_tokens,
        "num_cached_tokens": entry.num_cached_tokens,
        "num_generated_tokens": num_generated,
        "num_preemptions": entry.num_preemptions,
        "num_moves": entry.num_moves,
        "queue_ms": _ms(entry.queue_s),
        "ttft_ms": _ms(entry.ttft_s),
        "outcome": entry.outcome.value if entry.outcome else None,
    }


def _oldest_wait_s(cell: Cell, now: float) -> float:
    """Age of the oldest request that has a sequence without a row; 0 if none waits."""
    if not cell.num_waiting:
        return 0.0
    for request in islice(cell.requests.values(), _MAX_LOOKS):
        if any(sequence.state is State.WAITING for sequence in request.sequences):
            return now - request.arrival
    return 0.0


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)


def _total(counter: Counter) -> int:
    """A counter's value, over all of its labels."""
    samples = (sample for family in counter.collect() for sample in family.samples)
    return int(sum(sample.value for sample in samples if sample.name.endswith("_total")))


def _totals(counter: Counter, label: str) -> dict[str, int]:
    samples = (sample for family in counter.collect() for sample in family.samples)
    samples = (s for s in samples if s.name.endswith("_total") and s.value)
    return {s.labels[label]: int(s.value) for s in samples}
