"""Placing waiting sequences on a worker that is about to get a plan.

Late binding: a sequence is bound only when a worker has a row, blocks and token budget for it
in the very next plan, and only if the binding policy would choose that worker among all.

Must not know: plans, sessions, I/O. Entry point: `Placement.admit`.
"""

from collections.abc import Callable, Sequence
from math import inf

from octavo.settings import SchedulerSettings
from octavo_scheduler.admission import AdmissionQueue
from octavo_scheduler.batcher import Room, admission_room
from octavo_scheduler.binding import Candidate, choose_worker
from octavo_scheduler.sequence import Sequence as Generation
from octavo_scheduler.worker_state import WorkerState

# How far behind the head of the queue a sequence may be to pass it.
_SCAN_DEPTH = 32


class Placement:
    """Moves sequences from the queue to workers; `on_placed` hears of each."""

    def __init__(
        self,
        queue: AdmissionQueue,
        settings: SchedulerSettings,
        clock: Callable[[], float],
        on_placed: Callable[[Generation], None],
    ) -> None:
        self._queue = queue
        self._patience_s = settings.admission_max_wait_s
        self._affinity_budget_s = settings.affinity_budget_ms / 1000
        self._clock = clock
        self._on_placed = on_placed

    def admit(self, worker: WorkerState, rivals: Sequence[WorkerState], budget: int) -> None:
        """Fill the worker's draft while it has rows, blocks and `budget` tokens.

        `rivals` are all workers that a sequence could be bound to, this one included.
        """
        remaining = [len(s.token_ids) - s.num_planned for s in worker.prefilling]
        room = admission_room(budget, remaining, worker.limits.min_chunk_tokens)
        for sequence in self._queue.candidates(_SCAN_DEPTH):
            is_full = not worker.rows.num_free or max(room) <= 0
            if is_full or worker.unproven is not None:
                return
            after = self._try_admit(worker, rivals, sequence, room)
            if after is not None:
                room = after
            elif self._has_waited(sequence) and worker.fits(sequence):
                # What becomes free from now on is its.
                return

    def _has_waited(self, sequence: Generation) -> bool:
        """Whether it waited too long for others to pass it."""
        return self._clock() - sequence.request.arrival > self._patience_s

    def _try_admit(
        self,
        worker: WorkerState,
        rivals: Sequence[WorkerState],
        sequence: Generation,
        room: Room,
    ) -> Room | None:
        """Admit one sequence; the room that is left, or None if it can't start here now."""
        if not worker.fits(sequence):
            return None
        if sequence.is_suspect and (worker.prefilling or worker.draft.added):
            return None
        min_chunk = worker.limits.min_chunk_tokens
        hits = worker.find_hits(sequence)
        num_tokens = len(sequence.token_ids) - len(hits) * worker.block_size
        if not room.accepts(num_tokens, min_chunk):
            return None
        if worker.waits_for_block(sequence, len(hits)):
            return None
        if not worker.has_blocks_for(sequence, hits):
            return None
        if len(rivals) > 1 and not self._is_best(worker, rivals, sequence):
            return None
        worker.admit(sequence, hits)
        self._queue.serve(sequence, num_tokens)
        self._on_placed(sequence)
        return room.after(num_tokens, min_chunk)

    def _is_best(
        self, worker: WorkerState, rivals: Sequence[WorkerState], sequence: Generation
    ) -> bool:
        """Whether the policy binds the sequence to this worker, which has room."""
        # A worker that was not measured yet is taken to be as fast as the fastest.
        rate = max(rival.cost.prefill_tokens_per_s for rival in rivals)
        row_s = max(rival.cost.row_s for rival in rivals)
        candidates = [_candidate(rival, sequence, rival is worker, rate, row_s) for rival in rivals]
        # Who waited too long takes what has room: nobody passes it, so workers would stand idle.
        budget_s = -inf if self._has_waited(sequence) else self._affinity_budget_s
        choice = choose_worker(
            *(candidates, len(sequence.token_ids), budget_s, worker.expected_output(sequence))
        )
        return choice is not None and rivals[choice] is worker


def _candidate(
    state: WorkerState,
    sequence: Generation,
    has_room: bool,
    default_rate: float,
    default_row_s: float,
) -> Candidate:
    """A worker as the binding policy sees it; `has_room` False: find out."""
    hits = state.find_hits(sequence)
    has_room = has_room or (bool(state.rows.num_free) and state.has_blocks_for(sequence, hits))
    return Candidate(
        hit_tokens=len(hits) * state.block_size,
        backlog_tokens=state.backlog_tokens + state.in_flight_tokens,
        tokens_per_s=state.cost.prefill_tokens_per_s or default_rate,
        wait_s=0.0 if has_room else state.wait_for_row_s(),
        num_rows=state.rows.num_held,
        fits=state.fits(sequence),
        row_s=state.cost.row_s or default_row_s,
    )
