"""A real worker process on a tiny checkpoint: start, greedy tokens over gRPC, signals, errors."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator
from pathlib import Path

import grpc.aio
import pytest

from octavo.v1 import worker_pb2
from tests.fakes.leader_client import chunk, leader_client, row_add
from tests.oracle import check_greedy
from tests.tiny_fallbacks import save_fallback_model

START_TIMEOUT_S = 60.0
NUM_PROMPTS, NUM_TOKENS = 6, 40


class WorkerProcess:
    """`python -m octavo_worker` on free ports."""

    def __init__(self, folder: Path, tmp_path: Path, *flags: str) -> None:
        self.ready_path = tmp_path / "ready.json"
        self.log_path = tmp_path / "worker.log"
        environment = {
            **os.environ,
            "OCTAVO_READY_FILE": str(self.ready_path),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "octavo_worker", "--model", str(folder), "--port", "0"]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--backend", "cpu", *flags], env=environment, stderr=log, stdout=log
            )

    def log(self) -> str:
        return self.log_path.read_text()

    def address(self) -> str:
        """Once the worker is ready."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.ready_path.exists():
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)
        return f"127.0.0.1:{json.loads(self.ready_path.read_text())['port']}"

    def wait(self) -> int:
        return self.process.wait(timeout=START_TIMEOUT_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def worker_process(folder: Path, tmp_path: Path, *flags: str) -> Generator[WorkerProcess]:
    process = WorkerProcess(folder, tmp_path, *flags)
    try:
        yield process
    finally:
        process.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


PROMPTS = [[(7 * i + 11 * j * j) % 380 + 3 for j in range(1 + 9 * i)] for i in range(NUM_PROMPTS)]


async def generate(address: str, model_name: str) -> list[list[int]]:
    """Six prompts prefilled in two plans, decoded together by the worker alone."""
    async with leader_client(address) as client, asyncio.timeout(60):
        described = await client.describe()
        assert described.phase == worker_pb2.WORKER_PHASE_RUNNING
        assert described.model.name == model_name
        assert described.capacity.num_blocks == 64
        steps = await client.lead()
        adds = [
            row_add(row, range(1 + 8 * row, 9 + 8 * row), len(prompt) + NUM_TOKENS)
            for row, prompt in enumerate(PROMPTS)
        ]
        chunks = [chunk(row, prompt) for row, prompt in enumerate(PROMPTS)]
        for plan_id, part in ((1, slice(0, 2)), (2, slice(2, 6))):
            plan = worker_pb2.Plan(
                plan_id=plan_id,
                added_rows=adds[part],
                chunks=chunks[part],
                decode_until=10_000 if plan_id == 2 else 0,
            )
            await steps.send(plan=plan)
        await steps.read_steps(NUM_TOKENS + 1)
        return [steps.tokens(row) for row in range(len(PROMPTS))]


def test_greedy_over_grpc_equals_transformers(tiny_folder: Path, tmp_path: Path) -> None:
    metrics_port = free_port()
    flags = ("--num-kv-blocks", "64", "--max-num-seqs", "8", "--metrics-port", str(metrics_port))
    flags += ("--vllm-metrics", "false")
    with worker_process(tiny_folder, tmp_path, *flags) as worker:
        answers = asyncio.run(generate(worker.address(), tiny_folder.name))
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics") as page:
            metrics = page.read().decode()
        worker.process.send_signal(signal.SIGTERM)
        assert worker.wait() == 0
        assert worker.log().count("ready: worker on 127.0.0.1:") == 1
    assert f"octavo_worker_steps_total {NUM_TOKENS + 1}.0" in metrics
    assert f'octavo_worker_tokens_total{{kind="prefill"}} {sum(map(len, PROMPTS))}.0' in metrics
    assert "octavo_redis_lag_seconds 0.0" in metrics
    assert "vllm:" not in metrics
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert len(answer) == NUM_TOKENS
        assert check_greedy(tiny_folder, prompt, answer).is_right


def test_a_family_without_a_native_path_runs_in_transformers_code(tmp_path: Path) -> None:
    folder = tmp_path / "olmo2"
    save_fallback_model(folder, "olmo2")
    flags = ("--num-kv-blocks", "64", "--max-num-seqs", "8")
    with worker_process(folder, tmp_path, *flags) as worker:
        answers = asyncio.run(generate(worker.address(), "olmo2"))
        assert "Olmo2ForCausalLM runs in transformers' code" in worker.log()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert len(answer) == NUM_TOKENS
        assert check_greedy(folder, prompt, answer).is_right


def test_sigterm_lets_rows_end_within_the_grace(tiny_folder: Path, tmp_path: Path) -> None:
    async def run(worker: WorkerProcess, address: str) -> None:
        async with leader_client(address) as client, asyncio.timeout(60):
            steps = await client.lead()
            add = row_add(0, range(1, 70), 1000)
            plan = worker_pb2.Plan(
                plan_id=1, added_rows=[add], chunks=[chunk(0, [5, 6, 7])], decode_until=10_000
            )
            await steps.send(plan=plan)
            await steps.read_steps(5)
            worker.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await steps.read() != "end":
                    pass
            assert steps.progress[-1].phase == worker_pb2.WORKER_PHASE_DRAINING
            assert len(steps.tokens(0)) == 997

    with worker_process(tiny_folder, tmp_path, "--num-kv-blocks", "80") as worker:
        asyncio.run(run(worker, worker.address()))
        assert worker.wait() == 0


def test_the_grace_is_an_upper_bound(tiny_folder: Path, tmp_path: Path) -> None:
    async def run(worker: WorkerProcess, address: str) -> int:
        async with leader_client(address) as client, asyncio.timeout(60):
            steps = await client.lead()
            plan = worker_pb2.Plan(plan_id=1, added_rows=[row_add(0, range(1, 70), 1000)])
            await steps.send(plan=plan)
            await steps.read_steps(1)
            worker.process.send_signal(signal.SIGTERM)
            return worker.wait()

    flags = ("--num-kv-blocks", "80", "--drain-grace-s", "0.3")
    with worker_process(tiny_folder, tmp_path, *flags) as worker:
        assert asyncio.run(run(worker, worker.address())) == 0
        assert "the drain grace is over" in worker.log()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "/no/such/folder"), "no such folder"),
        (("--kv-cache-memory", "many"), "OCTAVO_KV_CACHE_MEMORY='many' is no size"),
        (("--block-size", "17"), "OCTAVO_BLOCK_SIZE=17: must be one of 16, 32"),
        (("--backend", "cuda"), "OCTAVO_BACKEND=cuda: torch finds no CUDA device"),
    ],
)
def test_mistakes_end_the_start_with_their_reason(
    tiny_folder: Path, tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    with worker_process(tiny_folder, tmp_path, *flags) as worker:
        assert worker.wait() == 2
        assert message in worker.log()
        assert "Traceback" not in worker.log()
        assert not worker.ready_path.exists()


def test_a_signal_while_loading_ends_the_process(tiny_folder: Path, tmp_path: Path) -> None:
    with worker_process(tiny_folder, tmp_path, "--log-level", "debug") as worker:
        while "loading weights" not in worker.log() and worker.process.poll() is None:
            time.sleep(0.01)
        worker.process.send_signal(signal.SIGTERM)
        assert worker.wait() == 0


def test_a_metrics_port_that_is_taken_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with worker_process(tiny_folder, tmp_path, "--metrics-port", str(port)) as worker:
            assert worker.wait() == 2
            assert f"OCTAVO_METRICS_PORT={port}: can't listen" in worker.log()


LEADER = """
import asyncio, sys
from tests.fakes.leader_client import LeaderClient

async def main():
    client = LeaderClient(sys.argv[1], "doomed")
    steps = await client.lead()
    print("leading", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_a_killed_leader_frees_the_worker_at_once(tiny_folder: Path, tmp_path: Path) -> None:
    async def attach(address: str) -> int:
        async with leader_client(address, "next") as client, asyncio.timeout(30):
            await client.until_not_led()
            attached, _ = await client.attach(1)
            return attached.epoch

    # Silence alone would take ten minutes.
    flags = ("--num-kv-blocks", "16", "--leader-silence-s", "600")
    with worker_process(tiny_folder, tmp_path, *flags) as worker:
        command = [sys.executable, "-c", LEADER, worker.address()]
        leader = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3])
        assert leader.stdout is not None
        with leader.stdout:
            assert leader.stdout.readline() == b"leading\n"
            leader.kill()
            leader.wait()
        assert asyncio.run(attach(worker.address())) == 2
