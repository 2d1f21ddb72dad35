"""The ablation twins: Octavo's scheduler with one idea taken out, as earlier systems were.

A twin is the real cell (queue, pool, batcher, results) with one rule replaced:

    static batching     `StaticPlacement`: nothing is admitted until the whole batch has ended,
                        and every row runs as long as the batch's longest
    contiguous KV       `ReservingState`: a row takes one run of neighbouring blocks for all that
                        it may ever need, when it is admitted

They lie here and not in a service: no user should be able to ask for them. Must not know: models,
workloads. Entry points: `TWINS`, `TwinCell`, `make_state`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from octavo.capacity import Capacity
from octavo.metrics import SchedulerMetrics
from octavo.model_spec import ModelSpec
from octavo.settings import SchedulerSettings
from octavo_scheduler.block_pool import BlockPool
from octavo_scheduler.core import Cell
from octavo_scheduler.members import state_of
from octavo_scheduler.placement import Placement
from octavo_scheduler.sequence import Sequence as Generation
from octavo_scheduler.worker_state import WorkerState


class Reservation(Enum):
    """How much KV memory a row holds; names as in the PagedAttention paper."""

    PAGED = "paged"  # blocks as it grows
    ORACLE = "oracle"  # its true length: nobody knows it beforehand
    POW2 = "pow2"  # its prompt, and its output rounded up to a power of two
    MAX = "max"  # the longest sequence that there may be


@dataclass(frozen=True, slots=True)
class Twin:
    """Which ideas a scheduler has."""

    name: str
    is_static: bool = False
    reservation: Reservation = Reservation.PAGED
    caches_prefixes: bool = False


CLASSIC = Twin("static, max", is_static=True, reservation=Reservation.MAX)
CONTIGUOUS = tuple(
    Twin(f"continuous, {kind.value}", reservation=kind)
    for kind in (Reservation.MAX, Reservation.POW2, Reservation.ORACLE)
)
PAGED = Twin("continuous, paged")
CACHED = Twin("paged, prefix cache", caches_prefixes=True)
TWINS = (CLASSIC, *CONTIGUOUS, PAGED, CACHED)


class StaticPlacement(Placement):
    """Request-level batching: a batch is filled at once and must end before the next one."""

    def __init__(self, *args: Any, max_model_len: int) -> None:
        super().__init__(*args)
        self._max_model_len = max_model_len

    def admit(self, worker: WorkerState, rivals: Sequence[WorkerState], budget: int) -> None:
        """Fill an empty worker in the order of arrival, whatever the step's `budget`."""
        del budget
        assert len(rivals) == 1, "the twin batches on one worker"
        if worker.rows.num_held:
            return
        batch: list[Generation] = []
        for sequence in self._queue.candidates(worker.rows.num_free):
            if not worker.has_blocks_for(sequence, []):
                break
            self._queue.remove(sequence)
            worker.admit(sequence, [])
            self._on_placed(sequence)
            batch.append(sequence)
        longest = max((s.request.submission.max_tokens for s in batch), default=0)
        for sequence in batch:
            self._pad(worker, sequence, longest)

    def _pad(self, worker: WorkerState, sequence: Generation, num_tokens: int) -> None:
        """The row goes on after its own end: what it draws then is of no use."""
        request = sequence.request
        num_tokens = min(num_tokens, self._max_model_len - request.num_prompt_tokens)
        request.submission = replace(request.submission, max_tokens=num_tokens)
        worker.rows.limit[sequence.row] = sequence.max_total_tokens


class RunPool(BlockPool):
    """A pool that hands out neighbouring blocks: the first free run that is long enough."""

    def find_run(self, count: int) -> int:
        """First block of a free run of `count`; -1 if there is none."""
        return self._used.find(bytes(count), 1)

    def allocate(self, count: int) -> list[int]:
        """Take a run of `count` blocks; the caller saw that there is one."""
        first = self.find_run(count)
        assert first > 0, (count, self.num_free)
        blocks = list(range(first, first + count))
        self.touch(blocks)
        return blocks


class ReservingState(WorkerState):
    """Rows take all their blocks when they are admitted, side by side; none grows later."""

    def __init__(
        self, *args: Any, reservation: Reservation, max_model_len: int, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        assert not self.caching, "a shared prefix is no part of a contiguous run"
        self._runs = RunPool(self.pool.num_blocks)
        self.pool = self._runs
        self._reservation = reservation
        self._max_model_len = max_model_len

    def reserved_blocks(self, sequence: Generation) -> int:
        """Blocks that the row holds from its first step to its last."""
        num_prompt = sequence.request.num_prompt_tokens
        num_output = sequence.max_total_tokens - num_prompt
        if self._reservation is Reservation.MAX:
            return self.num_blocks_for(self._max_model_len)
        if self._reservation is Reservation.POW2:
            num_output = 1 << (num_output - 1).bit_length()
        return self.num_blocks_for(min(num_prompt + num_output, self._max_model_len))

    def has_blocks_for(self, sequence: Generation, hits: list[int]) -> bool:
        assert not hits
        return self._runs.find_run(self.reserved_blocks(sequence)) > 0

    def admit(self, sequence: Generation, hits: list[int]) -> None:
        super().admit(sequence, hits)
        self.grow(sequence, self.reserved_blocks(sequence))


def make_state(
    twin: Twin, model: ModelSpec, capacity: Capacity, settings: SchedulerSettings
) -> WorkerState:
    """A worker's state by the twin's rules; `settings` as `settings_of` made them."""
    state = state_of("worker", model, capacity, settings)
    if twin.reservation is Reservation.PAGED:
        return state
    return ReservingState(
        state.worker_id,
        capacity,
        model.block_size,
        state.limits,
        watermark=0.0,
        enable_prefix_caching=False,
        reservation=twin.reservation,
        max_model_len=model.max_model_len,
    )


class TwinCell(Cell):
    """A cell that places sequences by the twin's rules."""

    def __init__(
        self,
        twin: Twin,
        model: ModelSpec,
        settings: SchedulerSettings,
        metrics: SchedulerMetrics,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(settings, metrics, clock)
        if twin.is_static:
            self._placement = StaticPlacement(
                *(self.queue, settings, clock, self._on_placed), max_model_len=model.max_model_len
            )


def settings_of(twin: Twin, settings: SchedulerSettings) -> SchedulerSettings:
    """The service's settings, but for what the twin is about."""
    # All requests come at once: none of them is refused.
    return replace(settings, enable_prefix_caching=twin.caches_prefixes, max_queue_tokens=1 << 40)
