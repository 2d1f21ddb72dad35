"""How full a worker is while it runs: sequences at once, and tokens in the memory they hold.

Must not know: where steps come from. Entry point: `OccupancyMeter`.
"""

from dataclasses import dataclass

import numpy as np

from octavo_scheduler.worker_state import WorkerState


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Means over the steps under load (requests wait), or over all if none ever waits.

    `kv_utilization`: slots that hold tokens of unfinished answers, over slots of all blocks that
    rows hold. `kv_fill`: the same over all slots that there are.
    """

    mean_sequences: float
    max_sequences: int
    kv_utilization: float
    kv_fill: float


class OccupancyMeter:
    """Samples one worker's state at each step."""

    def __init__(self, state: WorkerState) -> None:
        self._state = state
        self._answered: set[int] = set()  # handles whose rows run on though nobody needs it
        # Columns: whether requests wait, sequences, utilization, fill. Steps count alike: by
        # their times, the machine's noise would decide.
        self._samples: list[tuple[bool, int, float, float]] = []

    def note_answered(self, handle: int) -> None:
        """All that the client asked for was drawn; the row may run on."""
        self._answered.add(handle)

    def forget(self, handle: int) -> None:
        """The row ended."""
        self._answered.discard(handle)

    def sample(self, num_waiting: int) -> None:
        """Note the state during a step."""
        state, block_size = self._state, self._state.block_size
        num_sequences = state.rows.num_held
        useless = 0
        for sequence in state.sequences() if self._answered else ():
            if sequence.request.submission.handle in self._answered:
                num_sequences -= 1
                row = sequence.row
                useless += min(int(state.rows.known[row]), int(state.rows.capacity[row]))
        slots = state.pool.num_used * block_size
        if not slots or not state.rows.num_held:
            return
        filled = max(0.0, state.utilization() * slots - useless)
        fill = filled / (state.pool.num_usable * block_size)
        self._samples.append((num_waiting > 0, num_sequences, filled / slots, fill))

    def occupancy(self) -> Occupancy:
        """What was seen so far."""
        table = np.array(self._samples, np.float64)
        under_load = table[table[:, 0] > 0]
        means = under_load if len(under_load) else table
        sequences, utilization, fill = means[:, 1:].mean(axis=0).tolist()
        return Occupancy(
            round(sequences, 2), int(table[:, 1].max()), round(utilization, 4), round(fill, 4)
        )
