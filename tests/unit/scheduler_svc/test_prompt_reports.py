"""Prompt log-probabilities and histories through the cell: once, whole, in order, or not at all."""

import numpy as np
import pytest

from octavo.cancel_reason import CancelReason
from octavo.settings import SchedulerSettings
from octavo.v1 import common_pb2, worker_pb2
from octavo_scheduler.plan import PromptPiece, StepOutcome
from octavo_scheduler.results import WorkerProtocolError, read_outcome
from octavo_scheduler.sequence import Resume
from tests.fakes.fake_device import FakeDevice, FakeSize, expected_tokens
from tests.fakes.simulated_cell import SESSION, SimulatedCell, prompt_of


def chunked_cell(num_blocks: int = 1024, num_workers: int = 1) -> SimulatedCell:
    """Steps of 32 tokens: prompts come in chunks."""
    settings = SchedulerSettings(check_integrity=True, min_chunk_tokens=8)
    size = FakeSize(num_blocks=num_blocks, max_num_batched_tokens=32, max_num_seqs=8)
    return SimulatedCell(size, settings=settings, num_workers=num_workers)


def expected_report(prompt: list[int]) -> list[tuple[int, float]]:
    values = np.array([-token / 1e6 for token in prompt[1:]], np.float32)
    return list(enumerate(values.tolist(), 1))


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32, 33, 80])
def test_a_prompt_is_reported_whole_cold_and_warm(length: int) -> None:
    cell = chunked_cell()
    prompt = prompt_of(length)
    for _ in range(3):
        handle = cell.submit(prompt, 4, prompt_logprobs=True)
        cell.run()
        assert cell.prompts.get(handle, []) == expected_report(prompt)
        answer = cell.answer(handle)
        assert answer.token_ids == expected_tokens(prompt, 4)
        assert answer.started is not None
        assert answer.started.num_cached_tokens == 0
    cell.assert_all_free()


def test_ordinary_requests_beside_it_hit_the_cache_and_report_nothing() -> None:
    cell = chunked_cell()
    prompt = prompt_of(80)
    cell.submit(prompt, 4)
    cell.run()
    asking = cell.submit(prompt, 4, prompt_logprobs=True)
    plain = cell.submit(prompt, 4)
    cell.run()
    assert cell.prompts == {asking: expected_report(prompt)}
    for handle, num_cached in ((asking, 0), (plain, 64)):
        started = cell.answer(handle).started
        assert started is not None
        assert started.num_cached_tokens == num_cached
        assert cell.answer(handle).token_ids == expected_tokens(prompt, 4)


def test_two_that_ask_for_the_same_prompt_do_not_wait_for_each_other() -> None:
    cell = chunked_cell()
    prompt = prompt_of(20)
    handles = [cell.submit(prompt, 4, prompt_logprobs=True) for _ in range(2)]
    cell.step()
    assert [len(plan.added_rows) for plan in cell.links[cell.members[0]].sent[:1]] == [2]
    cell.run()
    assert cell.prompts == dict.fromkeys(handles, expected_report(prompt))
    cell.assert_all_free()


def test_siblings_report_once() -> None:
    cell = chunked_cell()
    prompt = prompt_of(50)
    handle = cell.submit(prompt, 5, num_sequences=3, seed=7, prompt_logprobs=True)
    cell.run()
    assert cell.prompts[handle] == expected_report(prompt)
    assert all(len(cell.answer(handle, index).token_ids) == 5 for index in range(3))


@pytest.mark.parametrize("num_steps", range(1, 7))
def test_a_lost_worker_amid_the_prompt_doubles_nothing(num_steps: int) -> None:
    cell = chunked_cell(num_workers=2)
    prompt = prompt_of(100)
    handle = cell.submit(prompt, 6, prompt_logprobs=True)
    for _ in range(num_steps):
        cell.step()
    (busy,) = [m for m in cell.cell.members if m.state.rows.num_held]
    cell.kill(busy)
    cell.run()
    assert cell.prompts[handle] == expected_report(prompt)
    assert cell.answer(handle).token_ids == expected_tokens(prompt, 6)
    cell.assert_all_free()


def test_preempted_rows_are_told_their_history_and_report_once() -> None:
    """A pool too small for all: rows leave, come back, and the fake device checks histories."""
    cell = chunked_cell(num_blocks=20)
    prompts = [prompt_of(40, seed) for seed in range(5)]
    handles = [
        cell.submit(prompt, 60, prompt_logprobs=i % 2 == 0, presence_penalty=0.5)
        for i, prompt in enumerate(prompts)
    ]
    cell.run()
    assert cell.counter("preemptions_total") > 0
    for i, (handle, prompt) in enumerate(zip(handles, prompts, strict=True)):
        assert cell.answer(handle).token_ids == expected_tokens(prompt, 60)
        assert cell.prompts.get(handle, []) == (expected_report(prompt) if i % 2 == 0 else [])
    adds = [add for link in cell.links.values() for plan in link.sent for add in plan.added_rows]
    assert len(adds) > 5
    assert all(add.num_prompt_tokens == 40 and len(add.history) >= 160 for add in adds)
    assert any(len(add.history) > 160 for add in adds)
    cell.assert_all_free()


def test_rows_that_need_no_history_get_none() -> None:
    cell = chunked_cell()
    cell.submit(prompt_of(40), 4)
    cell.run()
    adds = [add for link in cell.links.values() for plan in link.sent for add in plan.added_rows]
    assert [(add.history, add.num_prompt_tokens) for add in adds] == [(b"", 40)]


def test_a_resumed_request_reports_only_if_no_token_was_delivered() -> None:
    prompt = prompt_of(40)
    answer = expected_tokens(prompt, 8)
    for delivered, is_reported in ((0, True), (1, False), (5, False)):
        cell = chunked_cell()
        token_ids = np.array(answer[:delivered], "<u4").tobytes()
        resumes = [Resume(0, token_ids, finished=False)]
        handle = cell.submit(prompt, 8, prompt_logprobs=True, resumes=resumes)
        cell.run()
        assert cell.prompts.get(handle, []) == (expected_report(prompt) if is_reported else [])
        assert cell.answer(handle).token_ids == answer[delivered:]


def test_a_cancelled_request_hears_nothing_more() -> None:
    cell = chunked_cell()
    handle = cell.submit(prompt_of(200), 4, prompt_logprobs=True)
    cell.step()
    cell.step()
    reported = len(cell.prompts[handle])
    assert 0 < reported < 199
    cell.cell.cancel(SESSION, handle, None, CancelReason.CLIENT)
    cell.run()
    assert len(cell.prompts[handle]) == reported
    cell.assert_all_free()


@pytest.mark.parametrize(("row", "start"), [(None, 5), (99, 1)])
def test_a_gap_in_a_report_or_a_foreign_row_breaks_with_the_worker(
    row: int | None, start: int
) -> None:
    cell = chunked_cell()
    cell.submit(prompt_of(100), 4, prompt_logprobs=True)
    cell.cell.pump()
    state = cell.members[0].state
    (holder,) = state.sequences()
    piece = PromptPiece(holder.row if row is None else row, 0, start, [object()])
    none, no_events = np.empty(0, np.uint32), np.empty(0, np.uint8)
    outcome = StepOutcome(1, 1, 0, none, none, none, no_events, prompt_logprobs=[piece])
    with pytest.raises(WorkerProtocolError, match="prompt_logprobs"):
        read_outcome(state, outcome)


def test_a_device_that_lacks_a_history_says_so() -> None:
    """The fake's own check can fail."""
    device = FakeDevice(FakeSize())
    sampling = common_pb2.SamplingParams(presence_penalty=1.0)
    add = worker_pb2.RowAdd(row=0, sampling=sampling, max_total_tokens=9)
    device.step(worker_pb2.Plan(plan_id=1, added_rows=[add]))
    assert device.violations == ["step 1: row 0: its history is missing"]
