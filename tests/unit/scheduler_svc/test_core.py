"""The cell with fake devices whose texts depend on every KV slot they read."""

from itertools import pairwise

import numpy as np
import pytest

from octavo.settings import SchedulerSettings
from octavo_scheduler.outbox import FinishedNote
from octavo_scheduler.plan import Plan
from octavo_scheduler.recovery import Loss
from octavo_scheduler.sequence import CancelReason, Resume
from tests.fakes.fake_device import FakeDevice, FakeSize, expected_tokens, salt_of
from tests.fakes.simulated_cell import SESSION, SimulatedCell, prompt_of, sampling_of

BLOCK = 16


def finished(sim: SimulatedCell, handle: int, index: int = 0) -> FinishedNote:
    note = sim.answer(handle, index).finished
    assert note is not None
    return note


def finish_reason(sim: SimulatedCell, handle: int, index: int = 0) -> str:
    return finished(sim, handle, index).reason.value


def crowd(num: int, step: int = 13) -> list[list[int]]:
    return [prompt_of(5 + step * i, seed=i) for i in range(num)]


def settings(**changes: object) -> SchedulerSettings:
    return SchedulerSettings(**{"check_integrity": True, **changes})  # type: ignore[arg-type]


def tiny_pool(num_blocks: int = 40, rows: int = 16) -> FakeSize:
    return FakeSize(num_blocks=num_blocks, max_num_seqs=rows, max_num_batched_tokens=256)


# ---- texts


def test_one_request_alone() -> None:
    sim = SimulatedCell()
    prompt = prompt_of(37)
    handle = sim.submit(prompt, 50)
    sim.run()
    assert sim.answer(handle).token_ids == expected_tokens(prompt, 50)
    assert finish_reason(sim, handle) == "length"
    assert finished(sim, handle).num_tokens == 50
    sim.assert_all_free()


@pytest.mark.parametrize("delay", [0, 1, 4])
@pytest.mark.parametrize("lease_steps", [0, 8])
def test_crowd(delay: int, lease_steps: int) -> None:
    sim = SimulatedCell(settings=settings(lease_steps=lease_steps))
    for link in sim.links.values():
        link.delay = delay
    prompts = crowd(40)
    handles = [sim.submit(prompt, 20 + i) for i, prompt in enumerate(prompts)]
    sim.run()
    for i, handle in enumerate(handles):
        assert sim.answer(handle).token_ids == expected_tokens(prompts[i], 20 + i)
    sim.assert_all_free()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 80])
@pytest.mark.parametrize("max_batched", [2, 15, 16, 64])
def test_prompt_lengths_around_the_block_size_cold_and_warm(length: int, max_batched: int) -> None:
    size = FakeSize(max_num_batched_tokens=max_batched)
    sim = SimulatedCell(size, settings=settings(min_chunk_tokens=1))
    prompt = prompt_of(length)
    for round_ in range(3):
        handle = sim.submit(prompt, 40)
        sim.run()
        answer = sim.answer(handle)
        assert answer.token_ids == expected_tokens(prompt, 40)
        assert answer.started is not None
        cached = (length - 1) // BLOCK * BLOCK if round_ else 0
        assert answer.started.num_cached_tokens == cached
    sim.assert_all_free()


def test_an_answer_that_becomes_a_prompt_hits_blocks_sealed_in_decode() -> None:
    sim = SimulatedCell()
    prompt = prompt_of(20)
    first = sim.submit(prompt, 60)
    sim.run()
    longer = prompt + sim.answer(first).token_ids
    second = sim.submit(longer, 10)
    sim.run()
    assert sim.answer(second).token_ids == expected_tokens(longer, 10)
    started = sim.answer(second).started
    assert started is not None
    assert started.num_cached_tokens == (len(longer) - 1) // BLOCK * BLOCK


def test_prefix_caching_off_never_hits() -> None:
    sim = SimulatedCell(settings=settings(enable_prefix_caching=False))
    prompt = prompt_of(64)
    for _ in range(2):
        handle = sim.submit(prompt, 40)
        sim.run()
        assert sim.answer(handle).token_ids == expected_tokens(prompt, 40)
    assert sim.counter("prefix_cache_hits_total") == 0
    assert all(not link.device.sealed for link in sim.links.values())


def test_equal_prompts_at_once_compute_the_prefix_once() -> None:
    sim = SimulatedCell()
    prompt = prompt_of(100)
    handles = [sim.submit(prompt, 12) for _ in range(8)]
    sim.run()
    for handle in handles:
        assert sim.answer(handle).token_ids == expected_tokens(prompt, 12)
    computed = sum(
        len(chunk.token_ids) // 4
        for link in sim.links.values()
        for plan in link.sent
        for chunk in plan.chunks
    )
    assert computed == 100 + 7 * (100 - 96)


def test_siblings_hit_the_first_ones_prefix_and_differ() -> None:
    sim = SimulatedCell()
    prompt = prompt_of(50)
    handle = sim.submit(prompt, 30, num_sequences=3, seed=7)
    sim.run()
    texts = [sim.answer(handle, index).token_ids for index in range(3)]
    sampling = sampling_of(7)
    assert texts == [expected_tokens(prompt, 30, salt=salt_of(sampling, i)) for i in range(3)]
    assert len({tuple(text) for text in texts}) == 3
    cached = [sim.answer(handle, index).started.num_cached_tokens for index in range(3)]  # type: ignore[union-attr]
    assert cached == [0, 48, 48]
    sim.assert_all_free()


def test_ending_ids_and_min_tokens() -> None:
    sim = SimulatedCell()
    prompt = prompt_of(30)
    text = expected_tokens(prompt, 40)
    ending = [text[3], text[9]]
    early = sim.submit(prompt, 40, ending_ids=ending)
    late = sim.submit(prompt, 40, ending_ids=ending, min_tokens=4)
    sim.run()
    assert sim.answer(early).token_ids == text[:4]
    assert sim.answer(late).token_ids == text[:10]
    assert [finish_reason(sim, handle) for handle in (early, late)] == ["stop", "stop"]
    sim.assert_all_free()


def test_logprobs_stay_with_their_tokens() -> None:
    sim = SimulatedCell()
    handles = [sim.submit(prompt, 20, logprobs=i % 2 == 0) for i, prompt in enumerate(crowd(10))]
    sim.run()
    for i, handle in enumerate(handles):
        answer = sim.answer(handle)
        expected = [-token / 1e6 for token in answer.token_ids] if i % 2 == 0 else []
        assert answer.logprobs == pytest.approx(expected)


# ---- preemption


@pytest.mark.parametrize("delay", [0, 2])
def test_tiny_pool_preempts_and_texts_stay(delay: int) -> None:
    sim = SimulatedCell(tiny_pool(), settings=settings(growth_reserve=0.0))
    for link in sim.links.values():
        link.delay = delay
    prompts = [prompt_of(20 + i, seed=i) for i in range(6)]
    handles = [sim.submit(prompt, 200) for prompt in prompts]
    sim.run()
    for prompt, handle in zip(prompts, handles, strict=True):
        assert sim.answer(handle).token_ids == expected_tokens(prompt, 200)
        assert finished(sim, handle).num_preemptions <= 6
    assert sim.counter("preemptions_total") > 0
    computed = sum(
        len(chunk.token_ids) // 4
        for link in sim.links.values()
        for plan in link.sent
        for chunk in plan.chunks
    )
    needed = sum(len(prompt) + 200 for prompt in prompts)
    assert (computed + 6 * 200) / needed <= 3
    sim.assert_all_free()


def test_preempted_seeded_siblings_draw_the_same() -> None:
    sim = SimulatedCell(tiny_pool(30), settings=settings(growth_reserve=0.0))
    prompts = [prompt_of(33 + i, seed=i) for i in range(3)]
    handles = [sim.submit(prompt, 120, num_sequences=2, seed=i) for i, prompt in enumerate(prompts)]
    sim.run()
    assert sim.counter("preemptions_total") > 0
    for i, handle in enumerate(handles):
        for index in range(2):
            salt = salt_of(sampling_of(i), index)
            expected = expected_tokens(prompts[i], 120, salt=salt)
            assert sim.answer(handle, index).token_ids == expected
    sim.assert_all_free()


def test_low_priority_is_preempted_first() -> None:
    sim = SimulatedCell(tiny_pool(24), settings=settings(growth_reserve=0.0))
    low = sim.submit(prompt_of(60, seed=1), 150, priority=-1)
    high = sim.submit(prompt_of(60, seed=2), 150, priority=1)
    sim.run()
    assert finished(sim, low).num_preemptions > 0
    assert finished(sim, high).num_preemptions == 0
    sim.assert_all_free()


def test_reserving_growth_spares_preemptions() -> None:
    counts: list[float] = []
    for growth_reserve in (0.0, 1.0):
        sim = SimulatedCell(tiny_pool(60), settings=settings(growth_reserve=growth_reserve))
        for i in range(24):
            sim.submit(prompt_of(30 + i, seed=i), 100)
        sim.run()
        counts.append(sim.counter("preemptions_total"))
        sim.assert_all_free()
    assert counts[0] >= 10
    assert counts[1] <= 2


@pytest.mark.parametrize("max_preemptions", [0, 1, 3])
def test_many_that_half_fit_all_finish(max_preemptions: int) -> None:
    size = FakeSize(num_blocks=9, max_num_seqs=8, max_num_batched_tokens=64)
    sim = SimulatedCell(size, settings=settings(max_preemptions=max_preemptions))
    prompts = [prompt_of(70, seed=i) for i in range(20)]
    handles = [sim.submit(prompt, 50) for prompt in prompts]
    sim.run(max_steps=20_000)
    for prompt, handle in zip(prompts, handles, strict=True):
        assert sim.answer(handle).token_ids == expected_tokens(prompt, 50)
    sim.assert_all_free()


def test_one_that_cannot_grow_alone_ends_as_length() -> None:
    sim = SimulatedCell(num_workers=1)
    big, small = sim.members[0], FakeDevice(tiny_pool(8))
    sim.attach(small)
    prompt = prompt_of(50)
    handle = sim.submit(prompt, 200)
    sim.step()
    # Only the small worker is left: 7 blocks hold 112 slots, and one token more is known.
    sim.kill(big, Loss.LEFT)
    for member in sim.members[1:]:
        member.state.fits = lambda _sequence: True  # type: ignore[method-assign]
    sim.run()
    assert finish_reason(sim, handle) == "length"
    assert sim.answer(handle).token_ids == expected_tokens(prompt, 113 - 50)
    sim.assert_all_free()


def test_no_row_is_added_in_a_step_that_preempted() -> None:
    sim = SimulatedCell(tiny_pool())
    link = sim.links[sim.members[0]]
    seen = [0.0]
    num_checked = [0]
    send = link.send

    def checked_send(plan: Plan) -> None:
        preemptions = sim.counter("preemptions_total")
        # The metric is counted when a plan is composed, so it is this plan's.
        if preemptions > seen[0]:
            assert plan.added_rows == ()
            assert plan.removed_rows
            num_checked[0] += 1
        seen[0] = preemptions
        send(plan)

    link.send = checked_send  # type: ignore[method-assign]
    for i in range(12):
        sim.submit(prompt_of(20 + i, seed=i), 150)
    sim.run()
    assert num_checked[0] > 0
    sim.assert_all_free()


# ---- admission


def test_watermark_stays_free_unless_the_worker_is_empty() -> None:
    sim = SimulatedCell(tiny_pool(41), settings=settings(admission_watermark=0.25))
    whole = sim.submit(prompt_of(600, seed=1), 40)
    sim.run()
    assert finish_reason(sim, whole) == "length"
    pool = sim.members[0].state.pool
    for i in range(12):
        sim.submit(prompt_of(60, seed=10 + i), 4)
    sim.step()
    assert sim.cell.queue
    assert pool.num_free >= 10
    sim.run()
    sim.assert_all_free()


def test_never_fitting_request_is_refused_with_its_sizes() -> None:
    sim = SimulatedCell(tiny_pool(9))
    handle = sim.submit(prompt_of(100), 29)
    sim.receive()
    error = sim.rejected[handle].error
    assert error.kind.grpc_code == 3
    assert all(number in error.message for number in ("100", "29", "129", "128"))
    fitting = sim.submit(prompt_of(100), 28)
    sim.run()
    assert len(sim.answer(fitting).token_ids) == 28
    sim.assert_all_free()


def test_full_queue_rejects_with_a_time_to_retry() -> None:
    sim = SimulatedCell(settings=settings(max_queue_tokens=300))
    handles = [sim.submit(prompt_of(100, seed=i), 5) for i in range(5)]
    sim.run()
    assert sorted(sim.rejected) == handles[3:]
    error = sim.rejected[handles[3]].error
    assert error.kind.grpc_code == 8
    assert error.retry_after_ms is not None
    assert sim.counter("sequence_outcomes_total", outcome="rejected") == 2
    assert sim.counter("sequence_outcomes_total", outcome="length") == 3
    sim.assert_all_free()


def test_higher_priority_goes_first() -> None:
    sim = SimulatedCell(FakeSize(max_num_seqs=1))
    order: list[int] = []
    handles = [sim.submit(prompt_of(20, seed=i), 5, priority=i) for i in range(3)]
    while len(order) < 3:
        sim.step()
        order += [h for h in handles if sim.answer(h).finished and h not in order]
    # All three wait before the first step.
    assert order == handles[::-1]


def test_deadline_while_queued_never_gets_a_row() -> None:
    sim = SimulatedCell(FakeSize(max_num_seqs=1))
    running = sim.submit(prompt_of(20), 100)
    queued = sim.submit(prompt_of(30), 100, deadline_ms=20)
    sim.run()
    assert finish_reason(sim, queued) == "deadline"
    assert sim.answer(queued).started is None
    assert sim.answer(running).token_ids == expected_tokens(prompt_of(20), 100)
    sim.assert_all_free()


def test_deadline_while_running_frees_the_row() -> None:
    sim = SimulatedCell()
    prompt = prompt_of(20)
    handle = sim.submit(prompt, 1000, deadline_ms=50)
    sim.run()
    assert finish_reason(sim, handle) == "deadline"
    text = sim.answer(handle).token_ids
    assert 0 < len(text) < 1000
    assert text == expected_tokens(prompt, len(text))
    assert finished(sim, handle).num_tokens == len(text)
    sim.assert_all_free()


def test_short_request_amid_long_ones_ends_within_ten_steps() -> None:
    sim = SimulatedCell()
    for i in range(20):
        sim.submit(prompt_of(400, seed=i), 400)
    for _ in range(3):
        sim.step()
    handle = sim.submit(prompt_of(5, seed=99), 5)
    arrival = sim.num_steps
    while sim.answer(handle).finished is None:
        sim.step()
    assert sim.num_steps - arrival <= 10
    assert sim.answer(handle).token_ids == expected_tokens(prompt_of(5, seed=99), 5)


def test_a_head_that_waited_too_long_reserves() -> None:
    sim = SimulatedCell(tiny_pool(40), settings=settings(admission_max_wait_s=0.05))
    sim.submit(prompt_of(16, seed=1), 400)
    head = sim.submit(prompt_of(500, seed=2), 100)
    small = 0
    while sim.answer(head).started is None:
        small += 1
        sim.submit(prompt_of(40, seed=100 + small), 60)
        sim.step()
        assert sim.num_steps < 1000
    sim.run()
    assert sim.answer(head).token_ids == expected_tokens(prompt_of(500, seed=2), 100)
    sim.assert_all_free()


# ---- cancel


@pytest.mark.parametrize("after", [0, 1, 2, 3, 5, 9, 17])
@pytest.mark.parametrize("delay", [0, 3])
def test_cancel_in_flight_leaves_neighbours_alone(after: int, delay: int) -> None:
    sim = SimulatedCell(tiny_pool(100))
    for link in sim.links.values():
        link.delay = delay
    prompts = crowd(8, step=9)
    handles = [sim.submit(prompt, 40) for prompt in prompts]
    for _ in range(after):
        sim.step()
    for handle in handles[::2]:
        sim.cell.cancel(SESSION, handle, None, CancelReason.CLIENT)
    # What becomes free is used again at once, with plans in flight.
    prompts += [prompt_of(70, seed=50 + i) for i in range(4)]
    handles += [sim.submit(prompt, 40) for prompt in prompts[8:]]
    sim.run()
    for i, handle in enumerate(handles):
        text = sim.answer(handle).token_ids
        if i < 8 and i % 2 == 0 and finish_reason(sim, handle) == "cancelled":
            assert text == expected_tokens(prompts[i], 40)[: len(text)]
            assert finished(sim, handle).num_tokens == len(text)
        else:
            assert text == expected_tokens(prompts[i], 40)
    sim.assert_all_free()


def test_cancel_for_stop_counts_as_stop_and_ends_one_sibling() -> None:
    sim = SimulatedCell()
    handle = sim.submit(prompt_of(20), 50, num_sequences=2, seed=3)
    for _ in range(12):
        sim.step()
    sim.cell.cancel(SESSION, handle, 1, CancelReason.STOP)
    sim.run()
    assert finish_reason(sim, handle, 0) == "length"
    assert finish_reason(sim, handle, 1) == "stop"
    assert len(sim.answer(handle, 0).token_ids) == 50
    assert sim.counter("sequence_outcomes_total", outcome="stop") == 1
    sim.assert_all_free()


def test_lost_session_cancels_its_requests() -> None:
    sim = SimulatedCell()
    for prompt in crowd(10):
        sim.submit(prompt, 100)
    for _ in range(5):
        sim.step()
    sim.cell.close_session(SESSION)
    sim.run()
    assert sim.counter("sequence_outcomes_total", outcome="cancelled") == 10
    sim.assert_all_free()


def test_three_hundred_requests_a_third_leaves_nothing_leaks() -> None:
    rng = np.random.default_rng(5)
    sim = SimulatedCell(tiny_pool(120, rows=24))
    pending = list(range(300))
    leaving: dict[int, int] = {}
    texts: dict[int, tuple[list[int], int]] = {}
    while pending or sim.cell.requests:
        for i in pending[: int(rng.integers(0, 4))]:
            pending.remove(i)
            prompt = prompt_of(int(rng.integers(1, 120)), seed=int(rng.integers(0, 60)))
            count = int(rng.integers(1, 60))
            handle = sim.submit(prompt, count)
            texts[handle] = (prompt, count)
            if i % 3 == 0:
                leaving[handle] = sim.num_steps + int(rng.integers(0, 40))
        for handle in [h for h, at in leaving.items() if at <= sim.num_steps]:
            sim.cell.cancel(SESSION, handle, None, CancelReason.CLIENT)
            del leaving[handle]
        sim.step()
        assert sim.num_steps < 20_000
    sim.run()
    for handle, (prompt, count) in texts.items():
        text = sim.answer(handle).token_ids
        full = finish_reason(sim, handle) == "length"
        assert text == expected_tokens(prompt, count)[: count if full else len(text)]
        assert finished(sim, handle).num_tokens == len(text)
    outcomes = ("stop", "length", "cancelled", "deadline", "rejected", "error")
    assert sum(sim.counter("sequence_outcomes_total", outcome=name) for name in outcomes) == 300
    sim.assert_all_free()


# ---- several workers, losses


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


# ---- feeding the worker


def test_two_plans_stay_queued_under_load() -> None:
    sim = SimulatedCell(FakeSize(max_num_seqs=4))
    for i in range(12):
        sim.submit(prompt_of(10, seed=i), 23 + 9 * i)
    sim.step()
    queued: list[int] = []
    while len(sim.cell.queue) > 2:
        queued.append(len(sim.links[sim.members[0]].plans))
        sim.step()
    assert set(queued[2:]) == {2}


@pytest.mark.parametrize("delay", [0, 1, 2])
@pytest.mark.parametrize("lease_steps", [0, 8])
def test_no_row_is_ever_skipped_while_blocks_are_ample(delay: int, lease_steps: int) -> None:
    sim = SimulatedCell(settings=settings(lease_steps=lease_steps, plans_queued=delay + 2))
    link = sim.links[sim.members[0]]
    link.delay = delay
    handles = [sim.submit(prompt_of(20 + i, seed=i), 100) for i in range(16)]
    sim.run()
    # One step for the prompts, then one for each token.
    assert link.device.last_step <= 100 + 2
    assert all(len(sim.answer(handle).token_ids) == 100 for handle in handles)


def test_lease_needs_few_plans_and_never_runs_dry() -> None:
    sim = SimulatedCell(settings=settings(lease_steps=8))
    link = sim.links[sim.members[0]]
    link.delay = 2
    sim.submit(prompt_of(40), 200)
    for _ in range(180):
        sim.step()
        assert link.has_step
    num_steps = link.device.last_step
    assert len(link.sent) < num_steps / 3


def test_no_lease_while_anything_waits() -> None:
    sim = SimulatedCell(FakeSize(max_num_seqs=2))
    handles = [sim.submit(prompt_of(10, seed=i), 40) for i in range(4)]
    while not sim.answer(handles[0]).finished:
        sim.step()
    sent = sim.links[sim.members[0]].sent
    assert all(plan.decode_until == 0 for plan in sent[: len(sent) - 2])


def test_new_request_joins_during_a_lease() -> None:
    sim = SimulatedCell(settings=settings(lease_steps=32))
    sim.submit(prompt_of(40), 300)
    for _ in range(20):
        sim.step()
    handle = sim.submit(prompt_of(30, seed=2), 10)
    arrival = sim.num_steps
    while not sim.answer(handle).started:
        sim.step()
    assert sim.num_steps - arrival <= 1
    while not sim.answer(handle).finished:
        sim.step()
    assert sim.num_steps - arrival <= 14


def test_kv_utilization_under_mixed_load() -> None:
    rng = np.random.default_rng(11)
    size = FakeSize(num_blocks=500, max_num_seqs=64, max_num_batched_tokens=512)
    sim = SimulatedCell(size, settings=settings(check_integrity=False))
    device = sim.links[sim.members[0]].device
    for i in range(120):
        sim.submit(prompt_of(int(rng.integers(100, 400)), seed=i), int(rng.integers(50, 250)))
    on_device: list[float] = []
    in_scheduler: list[float] = []
    contexts: list[float] = []
    while len(sim.cell.queue) > 5:
        sim.step()
        state = sim.members[0].state
        on_device.append(device.utilization())
        in_scheduler.append(state.utilization())
        known = state.rows.known[state.rows.decoding]
        contexts.append(float(known.mean()) if known.size else 0.0)
    middle = slice(20, None)
    print(
        f"KV utilization: device {np.mean(on_device[middle]):.4f}, "
        f"scheduler {np.mean(in_scheduler[middle]):.4f}, "
        f"mean context {np.mean(contexts[middle]):.0f}"
    )
    assert np.mean(contexts[middle]) >= 200
    assert np.mean(in_scheduler[middle]) >= 0.96
    assert np.mean(on_device[middle]) >= 0.96
