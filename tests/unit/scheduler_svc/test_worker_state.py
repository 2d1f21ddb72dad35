"""The draft, the horizon and what leaves: one worker's state by hand."""

import numpy as np
import pytest

from octavo.capacity import Capacity
from octavo.row_event import RowEvent
from octavo_scheduler.batcher import BatchLimits
from octavo_scheduler.plan import StepOutcome
from octavo_scheduler.results import WorkerProtocolError, read_outcome
from octavo_scheduler.sequence import Request, Sequence, State, Submission, make_sequences
from octavo_scheduler.worker_state import WorkerState

BLOCK = 4


def worker(num_blocks: int = 20, rows: int = 1) -> WorkerState:
    limits = BatchLimits.of(rows, 64, 8, plans_queued=2, lease_steps=8)
    return WorkerState("w", Capacity(num_blocks, rows, 64), BLOCK, limits, watermark=0.0)


def sequence(serial: int, length: int = 8, max_tokens: int = 40) -> Sequence:
    submission = Submission(
        handle=serial,
        request_id="",
        prompt_token_ids=np.arange(length, dtype=np.uint32).tobytes(),
        root_hash=bytes(15) + bytes([serial]),
        block_hashes=(),
        sampling=b"",
        max_tokens=max_tokens,
        min_tokens=2,
        ending_ids=frozenset(),
    )
    request = Request(submission, 1, serial, 0.0, None, length)
    request.sequences = make_sequences(request, BLOCK)
    one = request.sequences[0]
    one.extend_hashes(BLOCK)
    return one


def outcome(step: int, plan_id: int, repeat: int, *entries: tuple[int, int, int]) -> StepOutcome:
    """Entries: (row, generation, token)."""
    columns = np.array(entries, np.uint32).reshape(-1, 3)
    events = np.full(len(entries), RowEvent.ALIVE, np.uint8)
    return StepOutcome(step, plan_id, repeat, columns[:, 0], columns[:, 1], columns[:, 2], events)


def prefilled(state: WorkerState, serial: int) -> Sequence:
    """A sequence of 8 tokens whose only chunk was read; its first token is drawn."""
    one = sequence(serial)
    state.admit(one, [])
    state.grow(one, 2)
    state.add_chunk(one, 8)
    generation = int(state.rows.generation[one.row])
    plan = state.freeze(0)
    assert plan.added_rows[0].block_ids == tuple(one.block_ids)
    assert plan.added_rows[0].min_total_tokens == 8 + 2 + 1
    assert not plan.block_updates
    read_outcome(state, outcome(plan.plan_id, plan.plan_id, 0, (one.row, generation, 77)))
    return one


def test_seals_follow_results_in_the_next_plan() -> None:
    state = worker()
    one = prefilled(state, 1)
    plan = state.freeze(0)
    assert plan.sealed_blocks == tuple(one.block_ids[:2])
    assert plan.sealed_hashes == b"".join(one.block_hashes)


def test_a_failed_rows_blocks_are_not_sealed_any_more() -> None:
    state = worker()
    one = prefilled(state, 1)
    state.forget_computed(one)
    assert state.freeze(0).sealed_blocks == ()


def test_table_entries_of_a_released_row_do_not_reach_the_next_holder() -> None:
    state = worker()
    one = prefilled(state, 1)
    state.grow(one, 1)
    row = one.row
    assert state.draft.updates[0] == row
    state.release(one, is_dead=False)
    other = sequence(2)
    state.admit(other, [])
    assert other.row == row
    state.grow(other, 2)
    plan = state.freeze(0)
    assert plan.removed_rows == (row,)
    assert plan.block_updates == ()
    assert plan.added_rows[0].generation == 1


def test_tokens_in_flight_of_a_preempted_row_count_until_its_plan_is_read() -> None:
    state = worker()
    one = prefilled(state, 1)
    row, generation = one.row, int(state.rows.generation[one.row])
    state.grow(one, 1)
    state.freeze(0)  # plan 2: decodes, in flight when the row is preempted
    state.preempt(one)
    other = sequence(2)
    state.admit(other, [])
    state.grow(other, 2)
    state.add_chunk(other, 8)
    state.freeze(0)  # plan 3: removes the row and gives it to another
    assert other.row == row
    reading = read_outcome(state, outcome(2, 2, 0, (row, generation, 78)))
    assert reading.tokens.handle.tolist() == [1]
    assert reading.returning == []
    assert one.state is State.LEAVING
    assert list(one.token_ids[8:]) == [77, 78]
    reading = read_outcome(state, outcome(3, 3, 0, (row, generation + 1, 90)))
    assert reading.tokens.handle.tolist() == [2]
    assert reading.returning == [one]
    assert int(state.rows.known[row]) == 9
    state.check_integrity()


def test_tokens_of_a_cancelled_row_are_nobodys() -> None:
    state = worker()
    one = prefilled(state, 1)
    row, generation = one.row, int(state.rows.generation[one.row])
    state.freeze(0)
    state.release(one, is_dead=False)
    one.state = State.ENDED
    reading = read_outcome(state, outcome(2, 2, 0, (row, generation, 78)))
    assert reading.tokens.token_ids.size == 0
    assert list(one.token_ids[8:]) == [77]


def test_horizon_bounds_the_steps_that_may_run() -> None:
    state = worker()
    one = prefilled(state, 1)
    generation = int(state.rows.generation[one.row])
    assert state.horizon == 1
    state.grow(one, 4)
    state.freeze(9)  # plan 2: leased until step 9
    assert state.horizon == 9
    state.freeze(0)  # plan 3 runs at step 10 at the latest
    assert state.horizon == 10
    read_outcome(state, outcome(2, 2, 0, (one.row, generation, 1)))
    read_outcome(state, outcome(3, 2, 1, (one.row, generation, 2)))
    assert (state.last_step, state.horizon) == (3, 10)
    read_outcome(state, outcome(4, 3, 0, (one.row, generation, 3)))
    assert (state.last_step, state.horizon) == (4, 4)
    assert not state.owes_steps


@pytest.mark.parametrize(
    ("step", "plan_id", "repeat"), [(1, 2, 0), (2, 3, 0), (2, 2, 1), (2, 1, 0), (2, 9, 1)]
)
def test_a_result_that_answers_no_plan_is_refused(step: int, plan_id: int, repeat: int) -> None:
    state = worker()
    prefilled(state, 1)
    state.freeze(0)
    with pytest.raises(WorkerProtocolError):
        read_outcome(state, outcome(step, plan_id, repeat))


def test_a_result_for_a_row_beyond_the_worker_is_refused() -> None:
    state = worker()
    prefilled(state, 1)
    state.freeze(0)
    with pytest.raises(WorkerProtocolError):
        read_outcome(state, outcome(2, 2, 0, (5, 0, 1)))


def test_a_block_being_computed_is_waited_for_and_hit_once_read() -> None:
    state = worker(rows=2)
    first, second = sequence(1, length=12), sequence(1, length=12)
    state.admit(first, [])
    state.grow(first, 2)
    state.add_chunk(first, 8)
    state.freeze(0)
    assert state.find_hits(second) == []
    assert state.waits_for_block(second, 0)
    read_outcome(state, outcome(1, 1, 0))
    hits = state.find_hits(second)
    assert hits == first.block_ids[:2]
    # The third block is full, but its last token has to be computed by each anyway.
    assert not state.waits_for_block(second, len(hits))


def test_a_released_prefill_no_longer_holds_others_up() -> None:
    state = worker(rows=2)
    first, second = sequence(1, length=12), sequence(1, length=12)
    state.admit(first, [])
    state.grow(first, 2)
    state.add_chunk(first, 8)
    state.freeze(0)
    state.release(first, is_dead=False)
    first.state = State.ENDED
    assert not state.waits_for_block(second, 0)
    read_outcome(state, outcome(1, 1, 0))
    assert state.find_hits(second) == [], "what was read after the release is nobody's"
    state.check_integrity()
