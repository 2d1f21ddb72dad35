"""A fake worker whose steps take exactly so long, as a card's would.

The fake worker of the tests sleeps after each step and sends results in between, so its own
Python adds to every step. A card doesn't wait for Python: the next step is launched while one
runs, and starts when that one ends. Here a step begins when the one before it ends, or when its
plan arrives, or one step's time before now (launches run one step ahead), whichever is latest;
its result is sent when it ends.

    python -m tests.bench.paced_worker --port 0 --step-ms 5

Entry points: `PacedWorker`, `bare_tokens_per_s`.
"""

import argparse
import asyncio
import signal
import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from octavo.logs import setup_logging
from octavo.serving import announce_ready
from octavo.v1 import common_pb2, worker_pb2
from tests.fakes.fake_device import FakeSize
from tests.fakes.fake_worker import FakeWorker

_FOREVER = 1 << 40


class PacedWorker(FakeWorker):
    """Steps on a timeline of their own."""

    async def _run(self, context: Any) -> None:
        free_at = 0.0
        while True:
            if not self._plans and not self.device.can_repeat:
                self._has_plan.clear()
                await self._has_plan.wait()
                continue
            plan, arrived_at = self._plans.popleft() if self._plans else (None, 0.0)
            begun_at = max(free_at, arrived_at, time.perf_counter() - self.step_s)
            free_at = begun_at + self.step_s
            result = self.device.step(plan)
            result.step_us = int(1e6 * self.step_s)
            await asyncio.sleep(max(0.0, free_at - time.perf_counter()))
            results = worker_pb2.StepResults(results=[result])
            async with self._writing:
                await context.write(worker_pb2.WorkerStepsResponse(results=results))


class _Counter:
    """In a stream's place: counts tokens and notes when the first and the last came."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.count = 0
        self.is_done = asyncio.Event()

    async def write(self, response: worker_pb2.WorkerStepsResponse) -> None:
        self.count += sum(len(result.token_ids) // 4 for result in response.results.results)
        if self.count >= self.wanted:
            self.is_done.set()


async def bare_tokens_per_s(
    size: FakeSize, step_s: float, prompts: Sequence[Sequence[int]], num_output_tokens: int
) -> float:
    """The worker alone: one plan adds all rows, which then decode to their end."""
    worker = PacedWorker(size, step_s=step_s)
    plan = worker_pb2.Plan(plan_id=1, decode_until=_FOREVER)
    next_block = 1
    for row, prompt in enumerate(prompts):
        total = len(prompt) + num_output_tokens
        blocks = np.arange(next_block, next_block - (-total // size.block_size), dtype="<u4")
        next_block += blocks.size
        plan.added_rows.add(
            row=row,
            generation=1,
            sampling=common_pb2.SamplingParams(temperature=0.0),
            block_ids=blocks.tobytes(),
            max_total_tokens=total,
        )
        token_ids = np.array(prompt, "<u4").tobytes()
        plan.chunks.add(row=row, start=0, token_ids=token_ids, is_last=True)
    counter = _Counter(len(prompts) * num_output_tokens)
    started = time.perf_counter()
    worker._plans.append((plan, started))
    running = asyncio.create_task(worker._run(counter))
    done = asyncio.create_task(counter.is_done.wait())
    await asyncio.wait([running, done], return_when=asyncio.FIRST_COMPLETED)
    wall_s = time.perf_counter() - started
    for task in (running, done):
        task.cancel()
    if running.done() and not running.cancelled():
        running.result()
    assert not worker.device.violations, worker.device.violations
    return counter.count / wall_s


async def _serve(arguments: argparse.Namespace) -> None:
    size = FakeSize(**{field.name: getattr(arguments, field.name) for field in fields(FakeSize)})
    worker = PacedWorker(size, step_s=arguments.step_ms / 1000)
    await worker.start(arguments.port)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    announce_ready(port=worker.port)
    await stop.wait()
    await worker.stop()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--step-ms", type=float, default=5.0, help="time of every step")
    for field in fields(FakeSize):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    setup_logging("paced_worker", "info")
    asyncio.run(_serve(parser.parse_args(argv)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
