"""When a worker is lost: which sequences go on elsewhere, and which one may be to blame.

A lost stream takes the results in flight with it; sequences go on from the tokens that were
read, and counter-based sampling draws the lost ones again. Only rows that were added or had a
chunk in an unfinished plan can have killed the worker: these suspects count a suspicion, run
again without other new rows beside them, and are failed after `max_moves` of them.

Must not know: streams, sessions. Entry points: `recover`, `is_hung`.
"""

from enum import Enum
from typing import NamedTuple

from octavo_scheduler.sequence import Lost, Sequence, State, order_of
from octavo_scheduler.worker_state import WorkerState

# A step may take this many times its predicted time before it counts as a hang.
_PATIENCE = 10.0


class Loss(Enum):
    """How a worker was lost; only a crash casts suspicion on rows. Values are metric labels."""

    CRASH = "crash"  # its stream broke
    HANG = "hang"  # its steps stopped
    LEFT = "left"  # it drained, or we let it go
    TAKEN = "taken"  # another scheduler leads it now


class Recovery(NamedTuple):
    """Sequences of the lost worker, first served first."""

    moved: list[Sequence]
    failed: list[Sequence]


def recover(worker: WorkerState, loss: Loss, max_moves: int) -> Recovery:
    """Take all sequences off the lost worker; its state must not be used afterwards."""
    suspects: set[Sequence] = set()
    if loss is Loss.CRASH:
        for plan in worker.in_flight:
            suspects.update(plan.added)
            suspects.update(chunk.sequence for chunk in plan.chunks)
    running = list(worker.sequences())
    for sequence in running:
        num_computed = worker.num_computed(sequence)
        worker.rows.release(sequence.row)
        sequence.lose_kv(num_computed, Lost.MOVE)
    leaving = [leaving.sequence for leaving in worker.leaving.values()]
    moved: list[Sequence] = []
    failed: list[Sequence] = []
    for sequence in order_of(running + leaving):
        if sequence.state is State.ENDED:
            continue
        if sequence in suspects:
            sequence.num_suspicions += 1
            sequence.is_suspect = True
        if sequence.num_suspicions > max_moves:
            failed.append(sequence)
        else:
            sequence.num_moves += 1
            moved.append(sequence)
    return Recovery(moved, failed)


def is_hung(silence_s: float, loop_lag_s: float, floor_s: float, predicted_s: float) -> bool:
    """Whether a worker that owes steps was silent too long, our own lag not counted."""
    return silence_s - loop_lag_s > max(floor_s, _PATIENCE * predicted_s)
