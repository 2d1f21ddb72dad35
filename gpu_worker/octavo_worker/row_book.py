"""The host's book of rows: who holds each row, how far it is, which blocks it has.

Lengths need no device: they grow by one a step, so the book knows every step's rows before
the previous step has ended. Only deaths come from the device, with the results (`settle`).
A plan is checked here; what is wrong with a row fails that row and nothing else.

    free -> added -> prefilling -> decoding -> dead -> (removed) free
    0 <= num_computed < num_known <= max_total_tokens,  num_computed <= num_blocks * block_size

Must not know: tensors, gRPC. Entry points: `RowBook.apply`, `RowBook.compose`,
`RowBook.settle`.
"""

import math
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from octavo_worker.plan import I64, U32, Chunk, Plan, RowAdd, RowEvent, RowFault

NO_LOGPROBS = -1


class RowState(IntEnum):
    """FREE: nobody's. DEAD: ended or failed, but its holder has not left."""

    FREE = 0
    PREFILLING = 1
    DECODING = 2
    DEAD = 3


@dataclass(frozen=True, slots=True)
class RowChanges:
    """What a plan changes in the row tensors, checked; and the rows that it failed."""

    removed_rows: tuple[int, ...]
    added_rows: tuple[RowAdd, ...]
    block_updates: I64  # [n, 3]: row, table index, block id
    chunks: tuple[Chunk, ...]
    faults: tuple[RowFault, ...]


@dataclass(frozen=True, slots=True)
class StepWork:
    """The rows of one step. Entries (drawn tokens): last chunks in order, then decode rows."""

    chunks: tuple[Chunk, ...]
    decode_rows: I64  # [S]
    max_context_decode: int
    entry_rows: I64  # [E]
    entry_generations: I64  # [E]
    logprob_counts: I64  # [E] alternatives wanted, NO_LOGPROBS = none at all
    all_greedy: bool
    any_filter: bool
    written_blocks: I64

    @property
    def num_prefill_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + len(self.decode_rows)


@dataclass(frozen=True, slots=True)
class RowLimits:
    """The bounds that plans are checked against."""

    num_rows: int
    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int

    @property
    def max_blocks_per_row(self) -> int:
        return -(-self.max_model_len // self.block_size)

    def has_row(self, row: int) -> bool:
        return 0 <= row < self.num_rows


class RowBook:
    """All rows of a worker, in arrays."""

    def __init__(self, limits: RowLimits) -> None:
        self.limits = limits
        shape = (limits.num_rows,)
        self._state = np.zeros(shape, np.int8)
        self._generation = np.zeros(shape, np.int64)
        self._num_computed = np.zeros(shape, np.int64)
        self._max_total = np.zeros(shape, np.int64)
        self._num_blocks = np.zeros(shape, np.int64)
        self._block_table = np.zeros((limits.num_rows, limits.max_blocks_per_row), np.int64)
        self._is_greedy = np.zeros(shape, np.bool_)
        self._has_filter = np.zeros(shape, np.bool_)
        self._logprob_counts = np.zeros(shape, np.int64)

    def clear(self) -> None:
        """Free all rows."""
        self._state[:] = RowState.FREE

    @property
    def num_live_rows(self) -> int:
        return int(np.isin(self._state, (RowState.PREFILLING, RowState.DECODING)).sum())

    def state(self, row: int) -> RowState:
        return RowState(int(self._state[row]))

    def block_ids(self, row: int) -> list[int]:
        """The row's block table; empty for a row that nobody holds."""
        if not self.limits.has_row(row) or self._state[row] == RowState.FREE:
            return []
        return self._block_table[row, : self._num_blocks[row]].tolist()

    # Applying a plan ------------------------------------------------------------------

    def apply(self, plan: Plan) -> RowChanges:
        """Take in what `plan` changes, in the order removed, added, block updates, chunks."""
        faults: list[RowFault] = []
        removed = tuple(row for row in plan.removed_rows if self._remove(row))
        added = tuple(add for add in plan.added_rows if self._add(add, faults))
        updates = [update for update in plan.block_updates.tolist() if self._update(update, faults)]
        chunks = tuple(chunk for chunk in plan.chunks if self._compute(chunk, faults))
        return RowChanges(
            removed, added, np.array(updates, np.int64).reshape(-1, 3), chunks, tuple(faults)
        )

    def _remove(self, row: int) -> bool:
        if not self.limits.has_row(row):
            return False
        self._state[row] = RowState.FREE
        return True

    def _add(self, add: RowAdd, faults: list[RowFault]) -> bool:
        if not self.limits.has_row(add.row):
            faults.append(RowFault(add.row, add.generation, self._outside(add.row)))
            return False
        if self._state[add.row] in (RowState.PREFILLING, RowState.DECODING):
            self._fail(add.row, f"row {add.row} was added again without being removed", faults)
        self._generation[add.row] = add.generation
        problem = self._problem_of(add)
        if problem:
            self._fail(add.row, problem, faults)
            return False
        self._state[add.row] = RowState.PREFILLING
        self._num_computed[add.row] = add.num_computed_tokens
        self._max_total[add.row] = add.max_total_tokens
        self._num_blocks[add.row] = len(add.block_ids)
        self._block_table[add.row, : len(add.block_ids)] = add.block_ids
        self._is_greedy[add.row] = add.sampling.is_greedy
        self._has_filter[add.row] = add.sampling.has_filter
        wanted = add.sampling.logprobs
        self._logprob_counts[add.row] = NO_LOGPROBS if wanted is None else wanted
        return True

    def _problem_of(self, add: RowAdd) -> str | None:
        limits, sampling = self.limits, add.sampling
        if len(add.block_ids) > limits.max_blocks_per_row:
            return f"{len(add.block_ids)} blocks: at most {limits.max_blocks_per_row} fit a row"
        if not self._are_blocks(add.block_ids):
            return f"a block id is outside 1 .. {limits.num_blocks - 1}"
        if not 0 < add.max_total_tokens <= limits.max_model_len:
            return f"max_total_tokens {add.max_total_tokens}: must be 1 .. {limits.max_model_len}"
        if add.num_computed_tokens > len(add.block_ids) * limits.block_size:
            return f"{add.num_computed_tokens} computed tokens exceed {len(add.block_ids)} blocks"
        is_sane = (
            (math.isfinite(sampling.temperature) and sampling.temperature >= 0)
            and 0 < sampling.top_p <= 1
            and 0 <= sampling.min_p <= 1
            and sampling.top_k >= 0
        )
        return None if is_sane else f"sampling parameters out of range: {sampling}"

    def _update(self, update: list[int], faults: list[RowFault]) -> bool:
        row, index, block_id = update
        if not self._is_held(row, faults) or self._state[row] == RowState.DEAD:
            return False
        if index > self._num_blocks[row] or index >= self.limits.max_blocks_per_row:
            held = self._num_blocks[row]
            return self._fail(row, f"block-table index {index} of a row of {held} blocks", faults)
        if not 0 < block_id < self.limits.num_blocks:
            limit = self.limits.num_blocks - 1
            return self._fail(row, f"block id {block_id} is outside 1 .. {limit}", faults)
        self._block_table[row, index] = block_id
        self._num_blocks[row] = max(self._num_blocks[row], index + 1)
        return True

    def _compute(self, chunk: Chunk, faults: list[RowFault]) -> bool:
        row, limits = chunk.row, self.limits
        if not self._is_held(row, faults) or self._state[row] == RowState.DEAD:
            return False
        if self._state[row] == RowState.DECODING:
            return self._fail(row, "a chunk for a row whose tokens are all computed", faults)
        if chunk.start != self._num_computed[row]:
            computed = self._num_computed[row]
            text = f"chunk starts at {chunk.start}, but {computed} tokens are computed"
            return self._fail(row, text, faults)
        if len(chunk.token_ids) == 0:
            return self._fail(row, "an empty chunk", faults)
        if chunk.end > self._num_blocks[row] * limits.block_size:
            text = f"chunk ends at {chunk.end}, beyond {self._num_blocks[row]} blocks"
            return self._fail(row, text, faults)
        if chunk.end >= self._max_total[row]:
            text = f"chunk ends at {chunk.end}: no room below {self._max_total[row]} tokens"
            return self._fail(row, text, faults)
        if chunk.token_ids.max() >= limits.vocab_size:
            text = f"token id {chunk.token_ids.max()}: the vocabulary has {limits.vocab_size}"
            return self._fail(row, text, faults)
        self._num_computed[row] = chunk.end
        if chunk.is_last:
            # A decode row from the next step on: `compose` leaves out this step's chunks.
            self._state[row] = RowState.DECODING
        return True

    def _is_held(self, row: int, faults: list[RowFault]) -> bool:
        if not self.limits.has_row(row):
            faults.append(RowFault(row, 0, self._outside(row)))
            return False
        if self._state[row] == RowState.FREE:
            faults.append(RowFault(row, 0, f"nobody holds row {row}"))
            return False
        return True

    def _fail(self, row: int, message: str, faults: list[RowFault]) -> bool:
        self._state[row] = RowState.DEAD
        faults.append(RowFault(row, int(self._generation[row]), message))
        return False

    def _outside(self, row: int) -> str:
        return f"row {row} is outside 0 .. {self.limits.num_rows - 1}"

    def _are_blocks(self, block_ids: I64) -> bool:
        if len(block_ids) == 0:
            return True
        return bool(block_ids.min() > 0 and block_ids.max() < self.limits.num_blocks)

    # Composing a step -----------------------------------------------------------------

    @property
    def can_decode(self) -> bool:
        """Whether a repeat would compute anything."""
        return len(self._decode_rows(())) > 0

    def compose(self, chunks: tuple[Chunk, ...]) -> StepWork:
        """The step that computes `chunks` (as checked by `apply`) and all decode rows."""
        # A row that a later part of its plan failed takes its earlier chunks with it.
        chunks = tuple(chunk for chunk in chunks if self._state[chunk.row] != RowState.DEAD)
        decode_rows = self._decode_rows(chunks)
        last = [chunk.row for chunk in chunks if chunk.is_last]
        entry_rows = np.concatenate([np.array(last, np.int64), decode_rows])
        written = [self._blocks_of(chunk) for chunk in chunks]
        positions = self._num_computed[decode_rows]
        written.append(self._block_table[decode_rows, positions // self.limits.block_size])
        work = StepWork(
            chunks=chunks,
            decode_rows=decode_rows,
            max_context_decode=int(positions.max(initial=-1)) + 1,
            entry_rows=entry_rows,
            entry_generations=self._generation[entry_rows],
            logprob_counts=self._logprob_counts[entry_rows],
            all_greedy=bool(self._is_greedy[entry_rows].all()),
            any_filter=bool(self._has_filter[entry_rows].any()),
            written_blocks=np.concatenate(written),
        )
        self._num_computed[decode_rows] += 1
        # The draw brings the known tokens to num_computed + 1.
        is_full = self._num_computed[entry_rows] + 1 >= self._max_total[entry_rows]
        self._state[entry_rows[is_full]] = RowState.DEAD
        return work

    def _decode_rows(self, chunks: tuple[Chunk, ...]) -> I64:
        has_room = self._num_computed < self._num_blocks * self.limits.block_size
        is_decoding = (self._state == RowState.DECODING) & has_room
        is_decoding[[chunk.row for chunk in chunks]] = False
        return np.flatnonzero(is_decoding)

    def _blocks_of(self, chunk: Chunk) -> I64:
        size = self.limits.block_size
        return self._block_table[chunk.row, chunk.start // size : -(-chunk.end // size)]

    # Reading a result -----------------------------------------------------------------

    def settle(self, rows: U32, generations: U32, events: npt.NDArray[np.uint8]) -> None:
        """The device says what became of these rows' holders, who may have left since."""
        is_row = rows < self.limits.num_rows
        rows, generations, events = rows[is_row], generations[is_row], events[is_row]
        is_dead = (events != RowEvent.ALIVE) & (self._generation[rows] == generations)
        is_dead &= self._state[rows] != RowState.FREE
        self._state[rows[is_dead]] = RowState.DEAD
