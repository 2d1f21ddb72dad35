"""What the split costs: tokens/s of the whole stack over those of its worker alone.

    python -m tests.bench.split_cost [--step-ms 5,10] [--batch 1,8,64,256] [--record FILE]

Client -> router (HTTP streaming, then gRPC) -> scheduler -> a worker whose steps take a fixed
time (`paced_worker`), each a process of its own, over the same worker without any of them, on the
same batch. `whole`: from the first submit to the last token; `steady`: between each stream's
first and last token, so without admission. Beside it the CPU of each process, in cores: where
they reach the machine's, its size is measured and not the split. Budget: 0.97.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from octavo.cli.grpc_load import run_grpc
from octavo.cli.http_load import run_http
from octavo.cli.measurement import Run, commit
from octavo.cli.workloads import BenchRequest
from octavo.hub import model_name_of, resolve_model
from tests.bench.paced_worker import bare_tokens_per_s
from tests.bench.scheduler_step import cpu_name, cpu_s
from tests.e2e.stack import REPO, Service, Stack
from tests.fakes.fake_device import FakeSize
from tests.fakes.simulated_cell import prompt_of

BUDGET = 0.97
_PROMPT_TOKENS = 32
_PROTOCOLS = ("http", "grpc")
_GREEDY = {"temperature": 0.0}


@dataclass(frozen=True, slots=True)
class Cost:
    """One batch by one protocol. Ratios over the bare worker; CPU in cores."""

    protocol: str
    step_ms: float
    batch: int
    bare_tok_s: float
    whole: float
    steady: float
    cpu: dict[str, float]


class PacedStack(Stack):
    """The real router and scheduler in front of a paced worker."""

    def __init__(
        self, folder: Path, model: Path, size: FakeSize, step_ms: float, **options: Any
    ) -> None:
        super().__init__(folder, model=model, **options)
        self._size = size
        self._step_ms = step_ms

    def start_worker(self) -> Service:
        size = self._size
        command = [
            *(sys.executable, "-m", "tests.bench.paced_worker", "--step-ms", str(self._step_ms)),
            *("--num-blocks", str(size.num_blocks), "--max-num-seqs", str(size.max_num_seqs)),
            *("--max-num-batched-tokens", str(size.max_num_batched_tokens)),
        ]
        log, ready = self.folder / "worker.log", self.folder / "worker.ready"
        environ = {**os.environ, "OCTAVO_READY_FILE": str(ready), "OMP_NUM_THREADS": "1"}
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environ, cwd=REPO
            )
        worker = Service("worker", process, log, ready)
        self.services.append(worker)
        self.workers.append(worker)
        return worker

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of each process so far, the client's (this one's) too."""
        services = {
            "router": self.routers[0],
            "scheduler": self.schedulers[0],
            "worker": self.workers[0],
        }
        used = {name: cpu_s(service.process.pid) for name, service in services.items()}
        return {"client": time.process_time(), **used}


def measure(
    stack: PacedStack, model: str, protocol: str, requests: list[BenchRequest]
) -> tuple[Run, dict[str, float]]:
    """Run `requests`; what came of it, and the cores that each process was busy on."""

    def send(items: list[BenchRequest]) -> Run:
        if protocol == "http":
            return asyncio.run(run_http(stack.url, model, items, _GREEDY, _ignore))
        return asyncio.run(run_grpc(stack.grpc_address, items, _GREEDY, _ignore))

    send([BenchRequest(requests[0].token_ids, 8)])
    before = stack.cpu_s()
    run = send(requests)
    after = stack.cpu_s()
    return run, {name: round((after[name] - before[name]) / run.wall_s, 3) for name in after}


def steady_tokens_per_s(run: Run) -> float:
    """All streams' rates between their first and last tokens, added up."""
    rates = [
        (timing.num_output_tokens - 1) / (timing.last_s - timing.first_s) for timing in run.timings
    ]
    return sum(rates)


def costs_of(
    model_folder: Path, batch: int, step_ms: float, seconds: float, num_rounds: int
) -> list[Cost]:
    """Both protocols on one batch; the best of `num_rounds` each."""
    num_tokens = max(32, round(1000 * seconds / step_ms))
    requests = [
        BenchRequest(tuple(prompt_of(_PROMPT_TOKENS, seed=i)), num_tokens) for i in range(batch)
    ]
    blocks_a_row = (_PROMPT_TOKENS + num_tokens) // 16 + 2
    size = FakeSize(
        num_blocks=2 * batch * blocks_a_row + 64,
        max_num_seqs=max(batch, 8),
        max_num_batched_tokens=16_384,
    )
    prompts = [request.token_ids for request in requests]
    bare = max(
        asyncio.run(bare_tokens_per_s(size, step_ms / 1000, prompts, num_tokens))
        # A slow moment of the machine must not make the stack look faster than its worker.
        for _ in range(num_rounds + 2)
    )
    costs: list[Cost] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        PacedStack(Path(folder), model_folder, size, step_ms) as stack,
    ):
        name = model_name_of(str(model_folder))
        for protocol in _PROTOCOLS:
            rounds = [measure(stack, name, protocol, requests) for _ in range(num_rounds)]
            run, cpu = min(rounds, key=lambda pair: pair[0].wall_s)
            assert run.num_output_tokens == batch * num_tokens
            costs.append(
                Cost(
                    protocol,
                    step_ms,
                    batch,
                    round(bare, 1),
                    round(run.num_output_tokens / run.wall_s / bare, 4),
                    round(steady_tokens_per_s(run) / bare, 4),
                    cpu,
                )
            )
    return costs


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--step-ms", default="5,10", help="times of a step, comma list [5,10]")
    parser.add_argument("--batch", default="1,8,64,256", help="streams, comma list [1,8,64,256]")
    parser.add_argument("--seconds", type=float, default=4.0, help="of decoding a measurement [4]")
    parser.add_argument("--rounds", type=int, default=2, help="the fastest counts [2]")
    parser.add_argument("--model", default="demo", help="whose tokenizer the router has [demo]")
    parser.add_argument("--record", type=Path, help="append one JSON line to this file")
    arguments = parser.parse_args(argv)
    folder = resolve_model(arguments.model, None, weights=False)
    load_before = os.getloadavg()[0]
    print(f"{'':24}{'ratio':>14}   cores busy")
    print(
        f"{'step':>6} {'batch':>6} {'by':>5}{'whole':>12}{'steady':>8}   client router sched worker"
    )
    costs: list[Cost] = []
    for step_ms in _numbers(arguments.step_ms, float):
        for batch in _numbers(arguments.batch, int):
            for cost in costs_of(folder, batch, step_ms, arguments.seconds, arguments.rounds):
                costs.append(cost)
                cores = " ".join(f"{share:6.2f}" for share in cost.cpu.values())
                print(
                    f"{step_ms:4g} ms {batch:6} {cost.protocol:>5}{cost.whole:12.3f}"
                    f"{cost.steady:8.3f}   {cores}",
                    flush=True,
                )
    if arguments.record:
        record: dict[str, Any] = {
            "bench": "split_cost",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "load_before": round(load_before, 2),
            "python": platform.python_version(),
            "seconds": arguments.seconds,
            "rounds": arguments.rounds,
            "costs": [
                {name: getattr(cost, name) for name in Cost.__dataclass_fields__} for cost in costs
            ],
        }
        with arguments.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    return 0


def _numbers(text: str, kind: Callable[[str], Any]) -> list[Any]:
    return [kind(part) for part in text.split(",")]


def _ignore(count: int) -> None:
    del count


if __name__ == "__main__":
    sys.exit(main())
