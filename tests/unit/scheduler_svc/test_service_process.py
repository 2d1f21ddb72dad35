"""Scheduler and workers as processes of their own: readiness, SIGTERM, kill -9."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.fakes.fake_device import expected_tokens
from tests.fakes.simulated_cell import prompt_of
from tests.unit.scheduler_svc.running_scheduler import is_quiet, run, scheduler, session, until

REPOSITORY = Path(__file__).parents[3]


def child_environment() -> dict[str, str]:
    """Of a process that runs these very sources."""
    path = f"{os.environ.get('PYTHONPATH', '')}:{REPOSITORY}"
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def test_process_is_ready_and_ends_at_sigterm(tmp_path: Path) -> None:
    environment = child_environment()
    processes: list[subprocess.Popen[str]] = []

    def start(*command: str, ready: str) -> str:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=REPOSITORY,
        )
        processes.append(process)
        assert process.stderr is not None
        for line in process.stderr:
            if ready in line:
                return line.strip().rsplit(" ", 1)[1]
        raise AssertionError("the process ended before it was ready")

    try:
        worker = start("tests.fakes.fake_worker", ready="ready: worker on")
        arguments = ("--port", "0", "--workers", worker)
        start("octavo_scheduler", *arguments, ready="ready: scheduler on")
        processes[1].send_signal(signal.SIGTERM)
        assert processes[1].wait(timeout=20) == 0
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_kill_minus_nine_of_one_of_two_workers() -> None:
    environment = child_environment()
    command = [sys.executable, "-m", "tests.fakes.fake_worker", "--step-ms", "3"]
    processes = [
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]

    def address_of(process: subprocess.Popen[str]) -> str:
        assert process.stderr is not None
        lines = (line for line in process.stderr if "ready: worker on" in line)
        return next(lines).strip().rsplit(" ", 1)[1]

    async def test() -> None:
        addresses = [address_of(process) for process in processes]
        async with scheduler(*addresses) as (process, stub), session(stub) as router:
            prompts = [prompt_of(20 + 5 * i, seed=i) for i in range(20)]
            flights = [await router.submit(p, 150) for p in prompts]
            for flight in flights:
                await flight.until(lambda flight=flight: len(flight.tokens.get(0, [])) > 9)
            assert all(member.state.rows.num_held for member in process.cell.members)
            processes[0].kill()
            await asyncio.gather(*(flight.over() for flight in flights))
            for prompt, flight in zip(prompts, flights, strict=True):
                assert flight.tokens[0] == expected_tokens(prompt, 150)
            assert sum(flight.finished[0].num_moves for flight in flights) > 0
            assert len(process.cell.members) == 1
            await until(lambda: is_quiet(process))

    try:
        run(test)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
