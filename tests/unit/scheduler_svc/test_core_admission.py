"""The cell and its queue: who is let in and when, deadlines, and the head that reserves."""

from tests.fakes.fake_device import FakeDevice, FakeSize, expected_tokens
from tests.fakes.simulated_cell import SimulatedCell, prompt_of
from tests.unit.scheduler_svc.core_cases import finish_reason, finished, settings, tiny_pool


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


def test_a_head_that_waited_too_long_is_not_choosy() -> None:
    options = settings(admission_max_wait_s=0.05, growth_reserve=0.0)
    sim = SimulatedCell(tiny_pool(60), settings=options)
    prefix = prompt_of(320, seed=1)
    sim.submit(prefix, 1)
    sim.run()
    # The worker that has the prefix is full of rows that end within the affinity budget.
    for length in (100, 420):
        sim.submit(prompt_of(length, seed=length), 450)
    for _ in range(5):
        sim.step()
    sim.attach(FakeDevice(tiny_pool(60)))
    submitted = sim.clock()
    head = sim.submit(prefix + prompt_of(150, seed=3), 5)
    while sim.answer(head).started is None:
        sim.step()
    assert sim.clock() - submitted < 0.06
    assert sim.members[1].state.rows.num_held == 1
    sim.run()
    sim.assert_all_free()


def test_a_tenant_pays_for_what_its_answers_were_not_for_what_they_might_have_been() -> None:
    sim = SimulatedCell(FakeSize(max_num_seqs=1))
    prompt = prompt_of(20)
    (first_token,) = expected_tokens(prompt, 1)
    sim.submit(prompt, 200, ending_ids=[first_token], tenant="brief")
    sim.run()
    sim.submit(prompt, 40, tenant="talkative")
    sim.run()
    later = sim.submit(prompt_of(20, seed=1), 5, tenant="talkative")
    sooner = sim.submit(prompt_of(20, seed=2), 5, tenant="brief")
    while not sim.answer(sooner).started:
        sim.step()
    assert sim.answer(later).started is None
    sim.run()
