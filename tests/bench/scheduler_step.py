"""CPU of the scheduler for one decode step of 256 and 1,024 rows.

    python -m tests.bench.scheduler_step [--steps N] [--fleet 1,2,4] [--record FILE]

`policy`: reading a result and planning the next step (with the frame for one session), in this
process, the fake device's own time left out. `end_to_end`: the CPU time (user and system) of a
scheduler process, a step, between a fake worker process and a session over real gRPC; with
`plan every step` (no lease) and as served (leased). Prints a table; `--record` appends one JSON
line. Budget: 1,000 µs for 256 rows, 4,000 µs for 1,024. `--fleet` instead: the scheduler's CPU
with so many workers of 256 rows at 20 steps/s, and how many would fill its core.
"""

import argparse
import asyncio
import gc
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from octavo import WIRE_VERSION
from octavo.serving import open_channel
from octavo.settings import SchedulerSettings
from octavo.v1 import scheduler_pb2, scheduler_pb2_grpc
from octavo_scheduler import dispatch
from tests.fakes.fake_device import FakeSize
from tests.fakes.simulated_cell import SimulatedCell, prompt_of, sampling_of

REPOSITORY = Path(__file__).parents[2]
BUDGET_US = {256: 1000.0, 1024: 4000.0}
_PROMPT_TOKENS = 48
_LEASE_STEPS = 8
_FLEET_STEPS_PER_S = 20


def percentiles(times_s: list[float]) -> dict[str, float]:
    values = np.array(times_s) * 1e6
    return {
        "mean_us": round(float(values.mean()), 1),
        "p50_us": round(float(np.percentile(values, 50)), 1),
        "p99_us": round(float(np.percentile(values, 99)), 1),
    }


def size_of(num_rows: int, num_steps: int) -> FakeSize:
    blocks = (_PROMPT_TOKENS + num_steps) // 16 + 3
    return FakeSize(
        num_blocks=2 * num_rows * blocks, max_num_seqs=num_rows, max_num_batched_tokens=8192
    )


def measure_policy(num_rows: int, num_steps: int, lease_steps: int) -> dict[str, float]:
    """Reading, planning and framing, in this process."""
    size = size_of(num_rows, num_steps + 300)
    sim = SimulatedCell(size, settings=SchedulerSettings(lease_steps=lease_steps))
    for i in range(num_rows):
        # Staggered prompts: each step, some rows cross a block border.
        sim.submit(prompt_of(_PROMPT_TOKENS - i % 16, seed=i), num_steps + 250)
    member = sim.members[0]
    link = sim.links[member]
    while sim.cell.queue or member.state.prefilling:
        sim.step()
    for _ in range(20):
        sim.step()
    gc.collect()
    gc.freeze()
    times: list[float] = []
    for _ in range(num_steps):
        arrived = [dispatch.outcome_from_proto(result) for result in link.step()]
        started = time.thread_time()
        sim.cell.read(member, arrived)
        sim.outbox.take()
        times.append(time.thread_time() - started)
    assert member.state.num_decoding == num_rows
    gc.unfreeze()
    return percentiles(times)


@contextmanager
def process(ready: str, *command: str) -> Generator[tuple[subprocess.Popen[str], str]]:
    """A child and the address from its ready line; ended on the way out."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    child = subprocess.Popen(
        [sys.executable, "-m", *command], stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert child.stderr is not None
        for line in child.stderr:
            if found := re.search(rf"ready: {ready} on (\S+)", line):
                yield child, found.group(1)
                break
        else:
            raise RuntimeError(f"{command} ended before it was ready")
    finally:
        child.kill()
        child.communicate()


def cpu_s(pid: int) -> float:
    """User and system CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_end_to_end(
    num_rows: int, num_steps: int, lease_steps: int, *, num_workers: int = 1, step_ms: float = 5
) -> dict[str, float]:
    """CPU of a scheduler process, a step, with all rows decoding."""
    size = size_of(num_rows, 6 * num_steps)
    worker_command = (
        "tests.fakes.fake_worker",
        *("--num-blocks", str(size.num_blocks)),
        *("--max-num-seqs", str(size.max_num_seqs)),
        *("--max-num-batched-tokens", str(size.max_num_batched_tokens)),
        *("--step-ms", str(step_ms)),
    )
    with ExitStack() as fleet:
        workers = [
            fleet.enter_context(process("worker", *worker_command))[1] for _ in range(num_workers)
        ]
        command = ("octavo_scheduler", "--port", "0", "--workers", ",".join(workers))
        lease = ("--lease-steps", str(lease_steps))
        child, address = fleet.enter_context(process("scheduler", *command, *lease))
        return asyncio.run(_drive(child.pid, address, num_rows, num_steps, num_workers))


async def _drive(
    pid: int, address: str, num_rows: int, num_steps: int, num_workers: int
) -> dict[str, float]:
    """CPU of the process `pid` for `num_steps` steps of all workers together."""
    async with open_channel(address) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        call = stub.Session()
        hello = scheduler_pb2.SessionHello(wire_version=WIRE_VERSION, router_id="bench")
        await call.write(scheduler_pb2.SchedulerSessionRequest(hello=hello))
        described = scheduler_pb2.SchedulerDescribeRequest()
        while len((await stub.Describe(described)).workers) < num_workers:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        for i in range(num_rows * num_workers):
            sampling = sampling_of(None)
            sampling.max_tokens = 5 * num_steps
            submit = scheduler_pb2.Submit(
                handle=i + 1,
                prompt_token_ids=np.array(prompt_of(15, seed=i), "<u4").tobytes(),
                root_hash=bytes(16),
                sampling=sampling,
                num_sequences=1,
            )
            await call.write(scheduler_pb2.SchedulerSessionRequest(submit=submit))
        num_frames = 0
        while True:
            frame = await call.read()
            if frame.load.num_running == num_rows * num_workers and not frame.load.num_waiting:
                break

        async def count_steps() -> int:
            return sum(worker.step for worker in (await stub.Describe(described)).workers)

        for _ in range(20):
            await call.read()
        first = await count_steps()
        cpu, wall = cpu_s(pid), time.perf_counter()
        while await count_steps() < first + num_steps:
            for _ in range(20):
                await call.read()
                num_frames += 1
        last = await count_steps()
        cpu, wall = cpu_s(pid) - cpu, time.perf_counter() - wall
        call.cancel()
    num = last - first
    return {
        "cpu_us": round(1e6 * cpu / num, 1),
        "step_wall_us": round(1e6 * wall / num, 1),
        "frames_a_step": round(num_frames / num, 3),
        "cores": round(cpu / wall, 4),
        "steps_per_s": round(num / wall, 1),
    }


def measure_fleet(num_workers: int, num_steps: int) -> dict[str, float]:
    """So many workers of 256 rows at 20 steps/s each, and how many would fill a core."""
    costs = measure_end_to_end(
        256, num_steps, _LEASE_STEPS, num_workers=num_workers, step_ms=1000 / _FLEET_STEPS_PER_S
    )
    costs["workers_per_core"] = round(1e6 / (costs["cpu_us"] * _FLEET_STEPS_PER_S), 1)
    return costs


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--fleet", default="", help="numbers of workers (comma list)")
    parser.add_argument("--record", type=Path, help="append one JSON line to this file")
    arguments = parser.parse_args(argv)
    record: dict[str, Any] = {
        "bench": "scheduler_step",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": cpu_name(),
        "python": platform.python_version(),
        "steps": arguments.steps,
    }
    for num_workers in map(int, filter(None, arguments.fleet.split(","))):
        costs = record[f"fleet{num_workers}"] = measure_fleet(num_workers, arguments.steps)
        print(
            f"{num_workers} workers x 256 rows: {costs['cpu_us']:.0f} µs CPU a step, "
            f"{costs['steps_per_s']} steps/s, {costs['cores']:.3f} cores; at "
            f"{_FLEET_STEPS_PER_S} steps/s {costs['workers_per_core']} workers fill one"
        )
    for num_rows in () if arguments.fleet else BUDGET_US:
        for name, lease_steps in (("plan every step", 0), ("leased", 8)):
            policy = measure_policy(num_rows, arguments.steps, lease_steps)
            end_to_end = measure_end_to_end(num_rows, arguments.steps, lease_steps)
            key = f"rows{num_rows}_{'leased' if lease_steps else 'planned'}"
            record[key] = {"policy": policy, "end_to_end": end_to_end}
            share = policy["mean_us"] / BUDGET_US[num_rows]
            print(
                f"{num_rows:5} rows, {name:15}: policy {policy['mean_us']:7.1f} µs "
                f"(p50 {policy['p50_us']:.1f}, p99 {policy['p99_us']:.1f}; {share:.0%} of the "
                f"budget), end to end {end_to_end['cpu_us']:7.1f} µs CPU"
            )
    if arguments.record:
        arguments.record.parent.mkdir(parents=True, exist_ok=True)
        with arguments.record.open("a") as file:
            file.write(json.dumps(record) + "\n")
    return 0


def commit() -> str:
    command = ("git", "rev-parse", "--short", "HEAD")
    answer = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return answer.stdout.strip()


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    sys.exit(main())
