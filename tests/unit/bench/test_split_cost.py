"""tests.bench.split_cost and its worker: what is counted is what was drawn."""

import asyncio
import time

import pytest

from octavo.cli.measurement import RequestTiming, Run
from octavo.v1 import worker_pb2
from tests.bench.paced_worker import PacedWorker, bare_tokens_per_s
from tests.bench.split_cost import steady_tokens_per_s
from tests.fakes.fake_device import FakeSize

SIZE = FakeSize(num_blocks=64, max_num_seqs=4)


def test_the_bare_worker_draws_a_token_a_row_and_step() -> None:
    """20 steps of 5 ms, 3 rows: never faster than that, however the machine is loaded."""
    rate = asyncio.run(bare_tokens_per_s(SIZE, 0.005, [[11, 12], [13], [14] * 20], 20))
    assert 0 < rate <= 3 / 0.005


class Sink:
    """Keeps results; its first write takes `delay_s`, as if Python were slow."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.results: list[worker_pb2.StepResult] = []

    async def write(self, response: worker_pb2.WorkerStepsResponse) -> None:
        self.results += response.results.results
        delay_s, self.delay_s = self.delay_s, 0.0
        await asyncio.sleep(delay_s)


def test_steps_run_in_order_and_each_says_how_long_it_took() -> None:
    plan = worker_pb2.Plan(plan_id=1, decode_until=6)
    plan.added_rows.add(
        row=0, generation=1, block_ids=(1).to_bytes(4, "little"), max_total_tokens=16
    )
    plan.chunks.add(row=0, start=0, token_ids=(7).to_bytes(4, "little"), is_last=True)
    sink = Sink(0.01)

    async def scenario() -> tuple[float, list[str]]:
        worker = PacedWorker(SIZE, step_s=0.004)
        started = time.perf_counter()
        worker._plans.append((plan, started))
        running = asyncio.create_task(worker._run(sink))
        while len(sink.results) < 6:  # noqa: ASYNC110 - results, not an event
            await asyncio.sleep(0.001)
        wall_s = time.perf_counter() - started
        running.cancel()
        return wall_s, worker.device.violations

    wall_s, violations = asyncio.run(scenario())
    # No step ends before the time that all up to it take, late writes or not.
    assert wall_s >= 6 * 0.004
    assert not violations
    assert [(result.step, result.repeat) for result in sink.results] == [
        (i + 1, i) for i in range(6)
    ]
    assert {result.step_us for result in sink.results} == {4000}


def test_the_steady_rate_leaves_the_way_to_the_first_token_out() -> None:
    timings: list[RequestTiming] = []
    for first_s, last_s in ((5.0, 7.0), (6.0, 16.0)):
        timing = RequestTiming(3, 0.0, num_output_tokens=21)
        timing.frame(first_s)
        timing.frame(last_s)
        timings.append(timing)
    assert steady_tokens_per_s(Run(tuple(timings))) == pytest.approx(20 / 2 + 20 / 10)
