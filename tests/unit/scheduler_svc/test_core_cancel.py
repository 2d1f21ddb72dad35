"""The cell when requests are given up in flight: neighbours stay, nothing leaks."""

import numpy as np
import pytest

from octavo.cancel_reason import CancelReason
from tests.fakes.fake_device import expected_tokens
from tests.fakes.simulated_cell import SESSION, SimulatedCell, prompt_of
from tests.unit.scheduler_svc.core_cases import crowd, finish_reason, finished, settings, tiny_pool


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


@pytest.mark.parametrize("then", ["results come", "the worker is lost"])
def test_who_is_cancelled_after_a_preemption_does_not_come_back(then: str) -> None:
    sim = SimulatedCell(tiny_pool(24), settings=settings(growth_reserve=0.0))
    (member,) = sim.members
    sim.links[member].delay = 2
    prompts = [prompt_of(60, seed=i) for i in range(6)]
    handles = [sim.submit(prompt, 150) for prompt in prompts]
    while not member.state.num_returning:
        sim.step()
    (leaving,) = member.state.leaving.values()
    cancelled = leaving.sequence.request.submission.handle
    # Tokens are on their way to it.
    sim.cell.cancel(SESSION, cancelled, None, CancelReason.CLIENT)
    if then == "the worker is lost":
        sim.attach(sim.kill(member))
    sim.run()
    for prompt, handle in zip(prompts, handles, strict=True):
        text = sim.answer(handle).token_ids
        assert text == expected_tokens(prompt, 150)[: len(text)]
        assert finish_reason(sim, handle) == ("cancelled" if handle == cancelled else "length")
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
