"""The book of accepted requests: it forgets who ended."""

import gc

from octavo_scheduler.sequence import Request
from tests.fakes.simulated_cell import SimulatedCell, prompt_of
from tests.unit.scheduler_svc.core_cases import finish_reason, settings


def test_ended_requests_are_forgotten_before_their_deadlines() -> None:
    sim = SimulatedCell(settings=settings(check_integrity=False))
    long = sim.submit(prompt_of(20), 2000, deadline_ms=600_000)
    gc.collect()
    before = sum(type(item) is Request for item in gc.get_objects())
    for i in range(200):
        handle = sim.submit(prompt_of(4, seed=i), 1, deadline_ms=3_600_000)
        while not sim.answer(handle).finished:
            sim.step()
    assert sim.answer(long).finished is None
    gc.collect()
    kept = sum(type(item) is Request for item in gc.get_objects()) - before
    assert kept <= 70
    # The deadlines of who lives stay.
    later = sim.submit(prompt_of(4), 2000, deadline_ms=700_000)
    sim.clock.advance(650)
    sim.step()
    assert finish_reason(sim, long) == "deadline"
    assert sim.answer(later).finished is None
    sim.clock.advance(60)
    sim.step()
    assert finish_reason(sim, later) == "deadline"
    sim.run()
    sim.assert_all_free()
