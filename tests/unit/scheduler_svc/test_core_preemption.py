"""The cell when blocks run out: who is preempted, and that texts stay as they were."""

import pytest

from octavo_scheduler.plan import Plan
from octavo_scheduler.recovery import Loss
from tests.fakes.fake_device import FakeDevice, FakeSize, expected_tokens, salt_of
from tests.fakes.simulated_cell import SimulatedCell, prompt_of, sampling_of
from tests.unit.scheduler_svc.core_cases import finish_reason, finished, settings, tiny_pool


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
    options = settings(max_preemptions=max_preemptions, growth_reserve=0.0)
    sim = SimulatedCell(size, settings=options)
    # Two prompts of three blocks fit beside each other; each grows to all eight.
    prompts = [prompt_of(40, seed=i) for i in range(20)]
    handles = [sim.submit(prompt, 80) for prompt in prompts]
    sim.run(max_steps=20_000)
    for prompt, handle in zip(prompts, handles, strict=True):
        assert sim.answer(handle).token_ids == expected_tokens(prompt, 80)
    assert len(prompts) / 2 < sim.counter("preemptions_total") < 3 * len(prompts)
    num_computed = sim.links[sim.members[0]].device.num_computed_tokens
    assert num_computed < 2 * len(prompts) * (40 + 80)
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
    sim = SimulatedCell(tiny_pool(), settings=settings(growth_reserve=0.0))
    link = sim.links[sim.members[0]]
    link.delay = 2
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
        # Nor while who gave up its blocks is about to come back for them.
        assert not (plan.added_rows and sim.cell.members.num_returning)
        seen[0] = preemptions
        send(plan)

    link.send = checked_send  # type: ignore[method-assign]
    for i in range(12):
        sim.submit(prompt_of(20 + i, seed=i), 150)
    sim.run()
    assert num_checked[0] > 0
    sim.assert_all_free()
