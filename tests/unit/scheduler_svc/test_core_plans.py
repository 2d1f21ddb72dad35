"""How the cell feeds its workers: plans queued ahead, leases, no row skipped, no slot idle."""

import numpy as np
import pytest

from tests.fakes.fake_device import FakeSize
from tests.fakes.simulated_cell import SimulatedCell, prompt_of
from tests.unit.scheduler_svc.core_cases import settings


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


@pytest.mark.parametrize("lease_steps", [8, 32])
def test_a_lease_that_a_new_request_ends_is_followed_at_once(lease_steps: int) -> None:
    for phase in range(lease_steps // 2):
        sim = SimulatedCell(settings=settings(lease_steps=lease_steps))
        link = sim.links[sim.members[0]]
        link.delay = 1
        sim.submit(prompt_of(20), 100)
        for _ in range(lease_steps + phase):
            sim.step()
        handle = sim.submit(prompt_of(21, seed=3), 8)
        while not sim.answer(handle).finished:
            sim.step()
            # The newcomer's plan ends the lease: another one waits behind it.
            assert link.has_step, phase


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
