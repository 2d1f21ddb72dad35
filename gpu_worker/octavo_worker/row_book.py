"""The host's book of rows: who holds each row, how far it is, which blocks it has.

Lengths need no device: they grow by one a step, so the book knows every step's rows before
the previous step has ended. Only deaths come from the device, with the results (`settle`).
A plan is checked here; what is wrong with a row fails that row and nothing else.

    free -> added -> prefilling -> decoding -> dead -> (removed) free
    0 <= num_computed < num_known <= max_total_tokens,  num_computed <= num_blocks * block_size

Must not know: tensors, gRPC. Entry points: `RowBook.apply`, `RowBook.compose`,
`RowBook.settle`.
"""

from dataclasses import dataclass
from enum import IntEnum, IntFlag

import numpy as np
import numpy.typing as npt

from octavo.row_event import RowEvent
from octavo_worker.plan import I64, U32, Chunk, Plan, RowAdd, RowFault
from octavo_worker.prompt_piece import PromptPiece, piece_of
from octavo_worker.row_limits import RowLimits, problem_of
from octavo_worker.step_work import RuleEntries, StepWork

NO_LOGPROBS = -1


class RowState(IntEnum):
    """FREE: nobody's. DEAD: ended or failed, but its holder has not left."""

    FREE = 0
    PREFILLING = 1
    DECODING = 2
    DEAD = 3


_LIVE = (int(RowState.PREFILLING), int(RowState.DECODING))


class Rule(IntFlag):
    """What changes a row's logits before its draws."""

    PENALTIES = 1
    BIAS = 2
    PHRASES = 4
    ENDINGS = 8


@dataclass(frozen=True, slots=True)
class RowChanges:
    """What a plan changes in the row tensors, checked; and the rows that it failed."""

    removed_rows: tuple[int, ...]
    added_rows: tuple[RowAdd, ...]
    block_updates: I64  # [n, 3]: row, table index, block id
    chunks: tuple[Chunk, ...]
    faults: tuple[RowFault, ...]


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
        self._min_total = np.zeros(shape, np.int64)
        self._rules = np.zeros(shape, np.uint8)
        # Rows that prefill and asked for their prompt's log-probabilities.
        self._reporting: dict[int, RowAdd] = {}

    def clear(self) -> None:
        """Free all rows."""
        self._state[:] = RowState.FREE
        self._reporting.clear()

    @property
    def num_live_rows(self) -> int:
        counts = (np.count_nonzero(self._state == s) for s in _LIVE)
        return int(sum(counts))

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
        self._reporting.pop(row, None)
        return True

    def _add(self, add: RowAdd, faults: list[RowFault]) -> bool:
        if not self.limits.has_row(add.row):
            faults.append(RowFault(add.row, add.generation, self._outside(add.row)))
            return False
        if self._state[add.row] in (RowState.PREFILLING, RowState.DECODING):
            self._fail(add.row, f"row {add.row} was added again without being removed", faults)
        self._generation[add.row] = add.generation
        problem = problem_of(add, self.limits)
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
        self._min_total[add.row] = add.min_total_tokens
        self._rules[add.row] = _rules_of(add)
        self._reporting.pop(add.row, None)
        if add.sampling.prompt_logprobs is not None:
            self._reporting[add.row] = add
        return True

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
        self._num_computed[decode_rows] += 1
        # The draw brings the known tokens to this many.
        totals = self._num_computed[entry_rows] + 1
        work = StepWork(
            chunks=chunks,
            decode_rows=decode_rows,
            max_context_decode=int(positions.max(initial=-1)) + 1,
            entry_rows=entry_rows,
            entry_generations=self._generation[entry_rows],
            logprob_counts=self._logprob_counts[entry_rows],
            all_greedy=bool(self._is_greedy[entry_rows].all()),
            any_filter=bool(self._has_filter[entry_rows].any()),
            rules=self._rule_entries(entry_rows, totals),
            prompt_pieces=self._prompt_pieces(chunks) if self._reporting else (),
            written_blocks=np.concatenate(written),
        )
        self._state[entry_rows[totals >= self._max_total[entry_rows]]] = RowState.DEAD
        return work

    def _rule_entries(self, entry_rows: I64, totals: I64) -> RuleEntries | None:
        rules = self._rules[entry_rows]
        if not rules.any():
            return None
        is_unfinished = (rules & Rule.ENDINGS > 0) & (totals < self._min_total[entry_rows])
        if not (is_unfinished.any() or (rules & ~np.uint8(Rule.ENDINGS)).any()):
            return None
        return RuleEntries(
            penalties=np.flatnonzero(rules & Rule.PENALTIES),
            bias=np.flatnonzero(rules & Rule.BIAS),
            phrases=np.flatnonzero(rules & Rule.PHRASES),
            unfinished=np.flatnonzero(is_unfinished),
        )

    def _prompt_pieces(self, chunks: tuple[Chunk, ...]) -> tuple[PromptPiece, ...]:
        pieces: list[PromptPiece] = []
        first_state = 0
        for chunk in chunks:
            if (add := self._reporting.get(chunk.row)) is not None:
                piece = piece_of(add, chunk, first_state)
                pieces += [piece] if piece is not None else []
                if chunk.is_last:
                    del self._reporting[chunk.row]
            first_state += len(chunk.token_ids)
        return tuple(pieces)

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


def _rules_of(add: RowAdd) -> Rule:
    sampling = add.sampling
    rules = Rule.PENALTIES if sampling.has_penalty else Rule(0)
    rules |= Rule.BIAS if sampling.has_bias else Rule(0)
    rules |= Rule.PHRASES if sampling.bad_phrases else Rule(0)
    return rules | (Rule.ENDINGS if add.may_end_too_early else Rule(0))
