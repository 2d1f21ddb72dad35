"""What the tests of the cell share: settings, pools, crowds, and how a request ended."""

from octavo.settings import SchedulerSettings
from octavo_scheduler.outbox import FinishedNote
from tests.fakes.fake_device import FakeSize
from tests.fakes.simulated_cell import SimulatedCell, prompt_of


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
