"""The cell when workers or schedulers are lost: rows move, suspects, hangs, resumed sequences."""

from itertools import pairwise

import numpy as np
import pytest

from octavo.cancel_reason import CancelReason
from octavo_scheduler.recovery import Loss
from octavo_scheduler.sequence import Resume
from tests.fakes.fake_device import FakeDevice, FakeSize, expected_tokens, salt_of
from tests.fakes.simulated_cell import SESSION, SimulatedCell, prompt_of, sampling_of
from tests.unit.scheduler_svc.core_cases import crowd, finish_reason, finished, settings, tiny_pool


@pytest.mark.parametrize("kill_after", [1, 2, 3, 6, 15, 16, 17, 30])
@pytest.mark.parametrize("loss", [Loss.CRASH, Loss.HANG])
def test_lost_worker_loses_no_token(kill_after: int, loss: Loss) -> None:
    sim = SimulatedCell(num_workers=2)
    for link in sim.links.values():
        link.delay = 1
    prompts = crowd(20, step=7)
    handles = [sim.submit(prompt, 30, seed=i) for i, prompt in enumerate(prompts)]
    for _ in range(kill_after):
        sim.step()
    assert all(member.state.rows.num_held for member in sim.members)
    sim.kill(sim.members[0], loss)
    sim.run()
    for i, handle in enumerate(handles):
        salt = salt_of(sampling_of(i), 0)
        assert sim.answer(handle).token_ids == expected_tokens(prompts[i], 30, salt=salt)
    assert sim.counter("moves_total") > 0
    sim.assert_all_free()


def test_lost_worker_while_preempted_sequences_leave() -> None:
    options = settings(growth_reserve=0.0)
    sim = SimulatedCell(tiny_pool(24), num_workers=2, settings=options)
    prompts = [prompt_of(60, seed=i) for i in range(6)]
    handles = [sim.submit(prompt, 150) for prompt in prompts]
    while not any(member.state.leaving for member in sim.members):
        sim.step()
    lost = next(member for member in sim.members if member.state.leaving)
    sim.kill(lost)
    sim.run()
    for prompt, handle in zip(prompts, handles, strict=True):
        assert sim.answer(handle).token_ids == expected_tokens(prompt, 150)
    sim.assert_all_free()


def test_reattached_worker_brings_its_cache() -> None:
    sim = SimulatedCell()
    prompt = prompt_of(100)
    sim.submit(prompt, 30)
    sim.run()
    device = sim.kill(sim.members[0], Loss.CRASH)
    sim.attach(device)
    handle = sim.submit(prompt, 30)
    sim.run()
    started = sim.answer(handle).started
    assert started is not None
    assert started.num_cached_tokens == 96
    assert sim.answer(handle).token_ids == expected_tokens(prompt, 30)


def test_request_that_kills_workers_ends_in_one_error() -> None:
    sim = SimulatedCell(settings=settings(max_moves=2))
    poison = sim.submit(prompt_of(40, seed=1), 10)
    losses = 0
    while sim.answer(poison).finished is None:
        sim.cell.pump()
        device = sim.kill(sim.members[-1])
        losses += 1
        sim.attach(device)
        sim.receive()
        assert losses < 10
    assert losses == 3
    note = finished(sim, poison)
    assert note.reason.value == "error"
    assert note.error is not None
    assert "3 workers" in note.error.message
    innocent = sim.submit(prompt_of(40, seed=2), 10)
    sim.run()
    assert sim.answer(innocent).token_ids == expected_tokens(prompt_of(40, seed=2), 10)
    sim.assert_all_free()


def test_who_fits_on_no_worker_that_is_left_waits_alone_and_not_for_ever() -> None:
    large, prompt, small = tiny_pool(400), prompt_of(1000), prompt_of(20, seed=1)
    sim = SimulatedCell(tiny_pool(40), settings=settings(max_queue_wait_s=0.0))
    first = sim.attach(FakeDevice(large))
    handles = [sim.submit(prompt, 5), sim.submit(prompt_of(1000, seed=2), 5, deadline_ms=20_000)]
    sim.cell.pump()
    device = sim.kill(first)
    # The worker comes back late, but in time.
    sim.clock.advance(29)
    sim.cell.give_up_waiting()
    back = sim.attach(device)
    sim.run()
    assert sim.answer(handles[0]).token_ids == expected_tokens(prompt, 5)
    assert finish_reason(sim, handles[1]) == "deadline"
    # It does not come back: others are served, although the large one waited longer.
    large_one = sim.submit(prompt, 5)
    sim.step()
    sim.kill(back, Loss.LEFT)
    sim.clock.advance(31)
    other = sim.submit(small, 5)
    for _ in range(8):
        sim.step()
    assert sim.answer(other).token_ids == expected_tokens(small, 5)
    assert sim.answer(large_one).finished is None
    sim.cell.give_up_waiting()
    sim.receive()
    error = finished(sim, large_one).error
    assert error is not None
    assert "can hold 1005 tokens" in error.message
    sim.run()
    sim.assert_all_free()


def test_a_cell_that_was_empty_for_long_waits_for_workers_all_the_same() -> None:
    sim = SimulatedCell()
    device = sim.kill(sim.members[0], Loss.LEFT)
    sim.clock.advance(3600)
    prompt, resumes = prompt_of(40), [Resume(0, b"", finished=False)]
    handle = sim.submit(prompt, 5, resumes=resumes)
    sim.clock.advance(29)
    sim.cell.give_up_waiting()
    sim.attach(device)
    sim.run()
    assert sim.answer(handle).token_ids == expected_tokens(prompt, 5)
    sim.kill(sim.members[-1], Loss.LEFT)
    sim.clock.advance(3600)
    handle = sim.submit(prompt, 5, resumes=resumes)
    sim.clock.advance(31)
    sim.cell.give_up_waiting()
    sim.receive()
    error = finished(sim, handle).error
    assert error is not None
    assert "no worker left" in error.message


def test_suspects_run_again_one_by_one() -> None:
    sim = SimulatedCell()
    handles = [sim.submit(prompt_of(30, seed=i), 20) for i in range(4)]
    sim.cell.pump()
    sim.attach(sim.kill(sim.members[0]))
    fresh = sim.submit(prompt_of(30, seed=9), 20)
    sim.run()
    sent = sim.links[sim.members[1]].sent
    adding = [plan for plan in sent if plan.added_rows]
    assert [len(plan.added_rows) for plan in adding] == [1] * 5
    # The next one is added only after the result of the one before.
    ids = [plan.plan_id for plan in adding[:4]]
    assert all(after - before >= 2 for before, after in pairwise(ids))
    # Told in time: if this scheduler dies of them too, the next one knows.
    assert sim.suspects == dict.fromkeys(handles, 1)
    for i, handle in enumerate(handles):
        assert sim.answer(handle).token_ids == expected_tokens(prompt_of(30, seed=i), 20)
    assert sim.answer(fresh).token_ids == expected_tokens(prompt_of(30, seed=9), 20)
    sim.assert_all_free()


def test_a_suspect_that_is_cancelled_keeps_nobody_waiting() -> None:
    sim = SimulatedCell(FakeSize(max_num_batched_tokens=64))
    suspect = sim.submit(prompt_of(400), 20)
    sim.cell.pump()
    sim.attach(sim.kill(sim.members[0]))
    other = sim.submit(prompt_of(30, seed=1), 20)
    sim.step()
    # It runs again, alone, and has most of its prompt before it.
    assert sim.members[1].state.rows.num_held == 1
    sim.cell.cancel(SESSION, suspect, None, CancelReason.CLIENT)
    sim.run()
    assert sim.answer(other).token_ids == expected_tokens(prompt_of(30, seed=1), 20)
    sim.assert_all_free()


def test_a_suspect_does_not_begin_beside_a_prompt_under_way() -> None:
    sim = SimulatedCell(FakeSize(max_num_batched_tokens=128))
    first = sim.members[0]
    sim.links[first].is_frozen = True
    suspect = sim.submit(prompt_of(30), 20)
    sim.cell.pump()
    second = sim.attach(FakeDevice(FakeSize(max_num_batched_tokens=128)))
    sim.submit(prompt_of(1500, seed=1), 20)
    sim.step()
    assert second.state.prefilling
    sent = sim.links[second].sent
    sim.kill(first)
    while not sim.answer(suspect).finished:
        sim.step()
    ends = [any(chunk.is_last for chunk in plan.chunks) for plan in sent]
    adds = [bool(plan.added_rows) for plan in sent]
    assert adds.index(True, 1) > ends.index(True)
    sim.run()


def test_rows_in_steady_decode_are_no_suspects() -> None:
    sim = SimulatedCell(settings=settings(max_moves=0))
    prompt = prompt_of(40)
    handle = sim.submit(prompt, 60)
    for _ in range(4):
        for _ in range(8):
            sim.step()
        sim.attach(sim.kill(sim.members[-1]))
    sim.run()
    assert sim.answer(handle).token_ids == expected_tokens(prompt, 60)
    assert finished(sim, handle).num_moves == 4


def test_hung_worker_is_found_and_only_if_it_owes_steps() -> None:
    sim = SimulatedCell(num_workers=2)
    frozen = sim.members[0]
    prompts = crowd(6)
    sim.clock.advance(100.0)
    assert sim.cell.find_hung(0.0) is None
    handles = [sim.submit(prompt, 30) for prompt in prompts]
    sim.cell.pump()
    assert sim.cell.find_hung(0.0) is None, "it owed nothing before"
    for _ in range(4):
        sim.step()
    sim.links[frozen].is_frozen = True
    for _ in range(6):
        sim.step()
    assert sim.cell.find_hung(0.0) is None
    sim.clock.advance(4.0)
    for _ in range(2):
        sim.step()
    sim.clock.advance(2.0)
    sim.members[1].last_progress = sim.clock()
    assert sim.cell.find_hung(5.0) is None, "our own lag is no silence of the worker"
    assert sim.cell.find_hung(0.0) is frozen
    sim.kill(frozen, Loss.HANG)
    sim.run()
    for prompt, handle in zip(prompts, handles, strict=True):
        assert sim.answer(handle).token_ids == expected_tokens(prompt, 30)


@pytest.mark.parametrize("phase", ["running", "draining", "compiling"])
def test_progress_without_a_step_is_a_hang_if_steps_are_to_run(phase: str) -> None:
    sim = SimulatedCell()
    (member,) = sim.members
    sim.submit(prompt_of(20), 100)
    for _ in range(4):
        sim.step()
    sim.links[member].is_frozen = True
    sim.step()
    for _ in range(20):
        sim.clock.advance(1.0)
        sim.cell.note_progress(
            member,
            sim.links[member].device.last_step,
            is_running=phase == "running",
            is_leaving=phase == "draining",
        )
    assert sim.cell.find_hung(0.0) is (None if phase == "compiling" else member)


def test_hang_inside_a_lease_is_found() -> None:
    sim = SimulatedCell(settings=settings(lease_steps=16))
    sim.submit(prompt_of(20), 400)
    for _ in range(20):
        sim.step()
    state = sim.members[0].state
    while state.num_unread or not state.owes_steps:
        sim.step()
    sim.clock.advance(6.0)
    assert sim.cell.find_hung(0.0) is sim.members[0]


@pytest.mark.parametrize("delivered", [0, 1, 15, 16, 29])
def test_resumed_sequences_go_on_where_they_were(delivered: int) -> None:
    sim = SimulatedCell()
    prompt = prompt_of(35)
    salts = [salt_of(sampling_of(9), index) for index in range(3)]
    texts = [expected_tokens(prompt, 30, salt=salt) for salt in salts]
    resumes = [
        Resume(0, np.array(texts[0][:delivered], np.uint32).tobytes(), False),
        Resume(1, np.array(texts[1], np.uint32).tobytes(), True),
    ]
    handle = sim.submit(prompt, 30, num_sequences=3, seed=9, resumes=resumes)
    sim.run()
    assert sim.answer(handle, 0).token_ids == texts[0][delivered:]
    assert (handle, 1) not in sim.answers
    assert sim.answer(handle, 2).token_ids == texts[2]
    assert finished(sim, handle, 0).num_tokens == 30
    sim.assert_all_free()


def test_resume_of_a_whole_answer_ends_at_once() -> None:
    sim = SimulatedCell()
    prompt = prompt_of(20)
    text = expected_tokens(prompt, 10)
    whole = Resume(0, np.array(text, np.uint32).tobytes(), False)
    by_length = sim.submit(prompt, 10, resumes=[whole])
    by_stop = sim.submit(prompt, 20, ending_ids=[text[-1]], resumes=[whole])
    sim.receive()
    assert finish_reason(sim, by_length) == "length"
    assert finish_reason(sim, by_stop) == "stop"
    sim.assert_all_free()


def test_failed_row_ends_in_error_and_poisons_nobody() -> None:
    sim = SimulatedCell()
    prompts = crowd(6)
    handles = [sim.submit(prompt, 40) for prompt in prompts]
    for _ in range(12):
        sim.step()
    state = sim.members[0].state
    victim = next(s for s in state.sequences() if s.request.submission.handle == handles[5])
    sim.links[sim.members[0]].device.poison_rows.add(victim.row)
    sim.run()
    note = finished(sim, handles[5])
    assert note.reason.value == "error"
    assert note.error is not None
    assert note.error.message == "poisoned"
    for prompt, handle in list(zip(prompts, handles, strict=True))[:5]:
        assert sim.answer(handle).token_ids == expected_tokens(prompt, 40)
    again = sim.submit(prompts[5], 40)
    sim.run()
    started = sim.answer(again).started
    assert started is not None
    assert started.num_cached_tokens == 0, "what a failed row computed is not found again"
    assert sim.answer(again).token_ids == expected_tokens(prompts[5], 40)
    sim.assert_all_free()


def test_warm_worker_is_preferred() -> None:
    sim = SimulatedCell(num_workers=2)
    prompt = prompt_of(200)
    first = sim.submit(prompt, 5)
    sim.run()
    warm = next(m for m in sim.members if m.state.pool.num_indexed)
    for i in range(4):
        handle = sim.submit(prompt + prompt_of(30, seed=i), 5)
        sim.run()
        started = sim.answer(handle).started
        assert started is not None
        assert started.num_cached_tokens == 192
    others = [m for m in sim.members if m is not warm]
    assert all(not m.state.pool.num_indexed for m in others)
    assert sim.answer(first).token_ids == expected_tokens(prompt, 5)
