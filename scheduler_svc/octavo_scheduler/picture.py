"""The cell as a plain dictionary for live views: numbers only, never a prompt or an answer.

Its fields may change in any version. Must not know: protos. Entry point: `picture_of`.
"""

from typing import Any

from octavo_scheduler.core import Cell
from octavo_scheduler.members import Member
from octavo_scheduler.sequence import Sequence

_MAX_ROWS = 512


def picture_of(cell: Cell, scheduler_id: str) -> dict[str, Any]:
    """Queue, workers and their rows now."""
    return {
        "scheduler_id": scheduler_id,
        "model": cell.model.name if cell.model else None,
        "draining": cell.is_draining,
        "num_requests": len(cell.requests),
        "num_waiting": cell.num_waiting,
        "num_running": cell.members.num_running,
        "queue_tokens": cell.queue.num_tokens,
        "backlog_tokens": cell.backlog_tokens(),
        "prefill_tokens_per_s": round(cell.members.prefill_tokens_per_s, 1),
        "workers": [_worker(member) for member in cell.members],
    }


def _worker(member: Member) -> dict[str, Any]:
    state = member.state
    pool = state.pool
    return {
        "worker_id": state.worker_id,
        "is_leaving": member.is_leaving,
        "step": state.last_step,
        "plans_in_flight": state.num_unread,
        "decode_step_ms": round(1000 * state.cost.decode_s, 3),
        "num_blocks": pool.num_usable,
        "num_used_blocks": pool.num_used,
        "num_cached_blocks": pool.num_cached,
        "kv_utilization": round(state.utilization(), 4),
        "max_num_seqs": state.limits.max_num_seqs,
        "num_rows": state.rows.num_held,
        "rows": [_row(member, holder) for holder in list(state.sequences())[:_MAX_ROWS]],
    }


def _row(member: Member, sequence: Sequence) -> dict[str, Any]:
    row = sequence.row
    rows = member.state.rows
    return {
        "row": row,
        "request_id": sequence.request.submission.request_id,
        "index": sequence.index,
        "phase": "decode" if rows.decoding[row] else "prefill",
        "num_prompt_tokens": sequence.request.num_prompt_tokens,
        "num_known_tokens": int(rows.known[row]),
        "max_total_tokens": int(rows.limit[row]),
        "num_cached_tokens": sequence.num_cached,
        "num_blocks": len(sequence.block_ids),
        "num_preemptions": sequence.num_preemptions,
        "num_moves": sequence.num_moves,
    }
