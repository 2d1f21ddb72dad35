"""Reading a step's result against the frozen plan that it answers.

A result names (row, generation). An entry of a row's present holder is accounted in arrays;
one of an earlier holder belongs to whoever is `leaving` under that name, or to nobody (a
cancelled sequence) and is dropped. Python touches only rows that cross a block border or end.

Must not know: the queue, sessions, protos. Entry point: `read_outcome`.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.row_event import RowEvent
from octavo_scheduler.plan import U32, PromptPiece, StepOutcome
from octavo_scheduler.sequence import FinishReason, Sequence, State
from octavo_scheduler.step_cost import NO_CHUNKS
from octavo_scheduler.worker_state import Leaving, WorkerState

# Whole columns are compared with plain integers: numpy takes several times as long for an enum.
_ALIVE, _ERROR = int(RowEvent.ALIVE), int(RowEvent.ERROR)


class WorkerProtocolError(Exception):
    """The worker broke a rule of the step stream; it can't be trusted with rows any more."""


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """Drawn tokens, an entry each [S]: whose they are, and their ids."""

    session: npt.NDArray[np.int64]
    handle: npt.NDArray[np.uint64]
    index: U32
    token_ids: U32
    logprobs: dict[int, Any] = field(default_factory=dict[int, Any])


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence that the worker ended; `message` says what failed for ERROR."""

    sequence: Sequence
    reason: FinishReason
    message: str = ""


@dataclass(frozen=True, slots=True)
class PromptReport:
    """Log-probabilities of the sequence's prompt tokens from position `start` on."""

    sequence: Sequence
    start: int
    entries: SequenceOf[Any]


@dataclass(slots=True)
class Reading:
    """What a result means for the cell."""

    tokens: TokenColumns
    num_prefill_tokens: int = 0
    ended: list[Ended] = field(default_factory=list[Ended])
    returning: list[Sequence] = field(default_factory=list[Sequence])  # may queue again now
    prefilled: list[Sequence] = field(default_factory=list[Sequence])
    prompts: list[PromptReport] = field(default_factory=list[PromptReport])


def read_outcome(worker: WorkerState, outcome: StepOutcome) -> Reading:
    """Account one result. Raises WorkerProtocolError if it can't be an answer to our plans."""
    _check_order(worker, outcome)
    worker.last_step = outcome.step
    rows = outcome.rows
    table = worker.rows
    if rows.size and int(rows.max()) >= len(table.holders):
        raise WorkerProtocolError(f"result names row {int(rows.max())}")
    columns = TokenColumns(
        table.session[rows],
        table.handle[rows],
        table.index[rows],
        outcome.token_ids,
        outcome.logprobs,
    )
    reading = Reading(columns)
    if outcome.repeat == 0:
        _read_plan(worker, reading)
        for piece in outcome.prompt_logprobs:
            _read_prompt_piece(worker, piece, reading)
    is_held = table.generation[rows] == outcome.generations
    is_ordinary = is_held & (outcome.events != _ERROR)
    if is_ordinary.all():
        ordinary, token_ids = rows, outcome.token_ids
    else:
        ordinary, token_ids = rows[is_ordinary], outcome.token_ids[is_ordinary]
        is_drawn = is_ordinary.copy()
        for entry in np.flatnonzero(~is_ordinary):
            is_drawn[entry] = _read_odd_entry(worker, outcome, int(entry), reading)
        reading.tokens = select(columns, is_drawn)
    _append_tokens(worker, ordinary, token_ids)
    for entry in np.flatnonzero(is_ordinary & (outcome.events != _ALIVE)):
        sequence = table.holders[rows[entry]]
        assert sequence is not None
        worker.release(sequence, is_dead=True)
        reading.ended.append(Ended(sequence, _reason(int(outcome.events[entry]))))
    work, num_decoding = NO_CHUNKS, rows.size
    if outcome.repeat == 0:
        _resolve_leaving(worker, reading)
        work = worker.applied.work
        num_decoding -= sum(chunk.is_last for chunk in worker.applied.chunks)
    worker.cost.observe(outcome.step_us * 1e-6, max(0, num_decoding), work)
    return reading


def _check_order(worker: WorkerState, outcome: StepOutcome) -> None:
    expected = worker.applied.plan_id + (outcome.repeat == 0)
    if outcome.step <= worker.last_step or outcome.plan_id != expected:
        raise WorkerProtocolError(
            f"step {outcome.step} of plan {outcome.plan_id} repeat {outcome.repeat} follows "
            f"step {worker.last_step} of plan {worker.applied.plan_id}"
        )
    if outcome.repeat == 0 and not worker.in_flight:
        raise WorkerProtocolError(f"plan {outcome.plan_id} was never sent")


def _read_plan(worker: WorkerState, reading: Reading) -> None:
    """The next plan in flight was applied and its own step ran: its chunks are computed."""
    plan = worker.in_flight.popleft()
    worker.applied = plan
    reading.num_prefill_tokens = plan.num_prefill_tokens
    for chunk in plan.chunks:
        sequence = chunk.sequence
        # A holder that left is not admitted again before its last plan is read, so holding a
        # row here means holding the row that the chunk was for.
        if sequence.row < 0 or worker.rows.holders[sequence.row] is not sequence:
            sequence.num_lost = max(sequence.num_lost, chunk.end)
            continue
        if sequence.trace is not None:
            sequence.trace.chunk(worker.last_step, sequence.num_computed, chunk.end)
        sequence.num_computed = chunk.end
        worker.seal(sequence, chunk.end // worker.block_size)
        if chunk.is_last:
            reading.prefilled.append(sequence)
            sequence.is_suspect = False
            if worker.unproven is sequence:
                worker.unproven = None


def _read_prompt_piece(worker: WorkerState, piece: PromptPiece, reading: Reading) -> None:
    """Log-probabilities of a holder's prompt, past or present; what it reported before is cut."""
    table = worker.rows
    if piece.row >= len(table.holders):
        raise WorkerProtocolError(f"prompt_logprobs name row {piece.row}")
    if int(table.generation[piece.row]) == piece.generation:
        sequence = table.holders[piece.row]
    else:
        leaving = worker.leaving.get((piece.row, piece.generation))
        sequence = None if leaving is None else leaving.sequence
    if sequence is None or sequence.state is State.ENDED or not sequence.reports_prompt:
        return
    num_known = sequence.next_reported - piece.start
    if num_known < 0:
        raise WorkerProtocolError(
            f"prompt_logprobs of row {piece.row} go on at {piece.start}, "
            f"not at {sequence.next_reported}"
        )
    entries = piece.entries[num_known:]
    if entries:
        reading.prompts.append(PromptReport(sequence, sequence.next_reported, entries))
        sequence.next_reported += len(entries)


def _append_tokens(worker: WorkerState, rows: U32, token_ids: U32) -> None:
    """Each row drew one token; a row at a block border completed a block with this step."""
    table = worker.rows
    known = table.known[rows]
    offsets = known % worker.block_size
    for row in rows[offsets == 0]:
        _complete_block(worker, int(row))
    table.tail[rows, offsets] = token_ids
    table.known[rows] = known + 1


def _complete_block(worker: WorkerState, row: int) -> None:
    table = worker.rows
    sequence = table.holders[row]
    assert sequence is not None
    table.flush(row)
    if worker.caching:
        sequence.extend_hashes(worker.block_size)
        worker.seal(sequence, len(sequence.token_ids) // worker.block_size)


def _read_odd_entry(
    worker: WorkerState, outcome: StepOutcome, entry: int, reading: Reading
) -> bool:
    """An entry of an earlier holder, or of a failed row. True if its token counts."""
    row, generation = int(outcome.rows[entry]), int(outcome.generations[entry])
    event = int(outcome.events[entry])
    message = outcome.errors.get((row, generation), "the worker failed this row")
    if int(worker.rows.generation[row]) == generation:
        sequence = worker.rows.holders[row]
        if sequence is None:
            raise WorkerProtocolError(f"row {row} generation {generation} has no holder")
        worker.forget_computed(sequence)
        worker.release(sequence, is_dead=True)
        reading.ended.append(Ended(sequence, FinishReason.ERROR, message))
        return False
    leaving = worker.leaving.get((row, generation))
    if leaving is None or leaving.sequence.state is not State.LEAVING:
        return False
    sequence = leaving.sequence
    if event != RowEvent.ALIVE:
        del worker.leaving[(row, generation)]
        reading.ended.append(Ended(sequence, _reason(event), message))
    if event == RowEvent.ERROR:
        return False
    sequence.num_lost = len(sequence.token_ids)
    sequence.token_ids.append(int(outcome.token_ids[entry]))
    columns = reading.tokens
    columns.session[entry] = sequence.request.session_id
    columns.handle[entry] = sequence.request.submission.handle
    columns.index[entry] = sequence.index
    return True


def _resolve_leaving(worker: WorkerState, reading: Reading) -> None:
    """Holders released up to the applied plan draw nothing more: they queue again or end."""
    resolved: list[tuple[tuple[int, int], Leaving]] = [
        item for item in worker.leaving.items() if item[1].plan_id <= worker.applied.plan_id
    ]
    for key, leaving in resolved:
        del worker.leaving[key]
        if leaving.sequence.state is not State.LEAVING:
            continue
        if leaving.end_as is None:
            reading.returning.append(leaving.sequence)
        else:
            reading.ended.append(Ended(leaving.sequence, leaving.end_as))


def _reason(event: int) -> FinishReason:
    if event == RowEvent.ERROR:
        return FinishReason.ERROR
    return FinishReason.STOP if event == RowEvent.STOP else FinishReason.LENGTH


def select(columns: TokenColumns, mask: npt.NDArray[np.bool_]) -> TokenColumns:
    """The entries under `mask` [S], log-probabilities included."""
    position = np.cumsum(mask) - 1
    return TokenColumns(
        columns.session[mask],
        columns.handle[mask],
        columns.index[mask],
        columns.token_ids[mask],
        {int(position[i]): value for i, value in columns.logprobs.items() if mask[i]},
    )
