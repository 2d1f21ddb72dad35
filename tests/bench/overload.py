"""Overload: what a stack delivers at three times the requests that it can serve.

    python -m tests.bench.overload [--seconds 10] [--step-ms 20] [--door http] [--record FILE]

Router, scheduler and a worker, each a process: the worker's steps take a fixed time, so that what
is measured is what the services do and not who gets the CPU; with `--step-ms 0` it is a tiny
random model on the CPU, and refusals cost it some of that CPU. First clients
that always have a request open say how much can be served; then requests come at a multiple of
that rate and nobody waits for an answer before the next; so by turns, since a machine is not
equally fast all the time, and the median of the rounds' shares counts. Goodput counts the tokens
of whole answers. Budget: 0.9 of the goodput at capacity; every request is answered or refused at
once. The clients take a part of the same cores: how much of them is told beside.
Entry points: `offer`, `serve_steadily`, `main`.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from octavo.cli.measurement import commit
from tests.bench.overload_doors import OUTPUT_TOKENS, Door, GrpcDoor, HttpDoor, Offered
from tests.bench.scheduler_step import cpu_name, cpu_s
from tests.bench.split_cost import PacedStack
from tests.e2e.stack import Stack
from tests.fakes.fake_device import FakeSize
from tests.tiny_models import save_tiny_model

NUM_ROWS = 16
MAX_WAIT_S = 2.0
FACTOR = 3.0
BUDGET = 0.9
SCHEDULER_FLAGS = ("--max-queue-wait-s", str(MAX_WAIT_S))
# As many wait as run: less than the bound would refuse.
_NUM_CLIENTS = 2 * NUM_ROWS
_WARM_UP_S = 2.0
OpenDoor = Callable[[], Door]


@dataclass(frozen=True)
class Round:
    """What was served of just enough, and of too much; with the cores that each process took."""

    capacity_tok_s: float
    offered: Sequence[Offered]
    cores_at_capacity: dict[str, float]
    cores: dict[str, float]

    @property
    def goodput_tok_s(self) -> float:
        return goodput(self.offered)

    @property
    def share(self) -> float:
        return self.goodput_tok_s / self.capacity_tok_s


async def serve_steadily(open_door: OpenDoor, num_clients: int, seconds: float) -> list[Offered]:
    """Clients that send the next request when the last one was answered."""
    async with open_door() as door:
        started = time.perf_counter()
        numbers = iter(range(10**9))

        async def client() -> list[Offered]:
            mine: list[Offered] = []
            while time.perf_counter() - started < seconds:
                mine.append(await door.send(next(numbers), started))
            return mine

        lists = await asyncio.gather(*(client() for _ in range(num_clients)))
        return [offered for mine in lists for offered in mine]


async def offer(open_door: OpenDoor, per_s: float, seconds: float, seed: int = 0) -> list[Offered]:
    """A Poisson process of requests, whatever becomes of them."""
    rng = Random(seed)
    async with open_door() as door:
        started = time.perf_counter()
        tasks: list[asyncio.Task[Offered]] = []
        due_s = 0.0
        while (due_s := due_s + rng.expovariate(per_s)) < seconds:
            await asyncio.sleep(max(0.0, started + due_s - time.perf_counter()))
            tasks.append(asyncio.create_task(door.send(10**6 + len(tasks), started)))
        return list(await asyncio.gather(*tasks))


def goodput(offered: Sequence[Offered]) -> float:
    """Tokens/s of whole answers, while requests came."""
    seconds = max(one.sent_s for one in offered)
    # An answer that runs past the end counts by its part before it.
    tokens = sum(
        one.num_tokens * min(1.0, (seconds - one.sent_s) / (one.ended_s - one.sent_s))
        for one in offered
        if not one.is_refused
    )
    return tokens / seconds


class _Cores:
    """Measures the cores that each process is busy on: `with _Cores(stack) as cores: ...`."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self.busy: dict[str, float] = {}

    def __enter__(self) -> "_Cores":
        self._started_s, self._before = time.perf_counter(), self._cpu_s()
        return self

    def __exit__(self, *_: object) -> None:
        passed_s = time.perf_counter() - self._started_s
        after = self._cpu_s()
        self.busy = {k: round((after[k] - v) / passed_s, 3) for k, v in self._before.items()}

    def _cpu_s(self) -> dict[str, float]:
        processes = {s.name.partition("-")[0]: cpu_s(s.process.pid) for s in self._stack.services}
        return {"client": time.process_time(), **processes}


def run_round(stack: Stack, open_door: OpenDoor, seconds: float, seed: int) -> Round:
    """Measure the capacity, then offer too much."""
    with _Cores(stack) as at_capacity:
        steady = asyncio.run(serve_steadily(open_door, _NUM_CLIENTS, seconds))
    capacity = goodput(steady)
    per_s = FACTOR * capacity / OUTPUT_TOKENS
    with _Cores(stack) as overloaded:
        offered = asyncio.run(offer(open_door, per_s, seconds, seed))
    return Round(capacity, offered, at_capacity.busy, overloaded.busy)


def _stack(folder: Path, model: Path, step_ms: float) -> Stack:
    if not step_ms:
        flags = ("--max-num-seqs", str(NUM_ROWS))
        return Stack(folder, model=model, worker_flags=flags, scheduler_flags=SCHEDULER_FLAGS)
    size = FakeSize(max_num_seqs=NUM_ROWS)
    return PacedStack(folder, model, size, step_ms, scheduler_flags=SCHEDULER_FLAGS)


def _run(step_ms: float, door: str, seconds: float, num_rounds: int) -> list[Round]:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        save_tiny_model(model)
        with _stack(Path(folder), model, step_ms) as stack:
            open_door: OpenDoor = (
                partial(HttpDoor, stack.url)
                if door == "http"
                else partial(GrpcDoor, stack.grpc_address)
            )
            asyncio.run(serve_steadily(open_door, _NUM_CLIENTS, _WARM_UP_S))
            return [run_round(stack, open_door, seconds, seed) for seed in range(num_rounds)]


def _summary(rounds: Sequence[Round]) -> dict[str, Any]:
    """Medians over rounds, percentiles over all requests."""
    offered = [one for round_ in rounds for one in round_.offered]
    refused = [one for one in offered if one.is_refused]
    first_s = [one.first_s - one.sent_s for one in offered if one.first_s is not None]
    refusal_ms = [1e3 * (one.ended_s - one.sent_s) for one in refused]
    middle = sorted(rounds, key=lambda one: one.share)[len(rounds) // 2]
    return {
        "capacity_tok_s": round(statistics.median(one.capacity_tok_s for one in rounds), 1),
        "goodput_tok_s": round(statistics.median(one.goodput_tok_s for one in rounds), 1),
        "goodput_share": round(statistics.median(one.share for one in rounds), 3),
        "shares": [round(one.share, 3) for one in rounds],
        "cores_at_capacity": middle.cores_at_capacity,
        "cores": middle.cores,
        "offered": len(offered),
        "refused": len(refused),
        "refused_late": sum(one.is_late for one in refused),
        "ttft_p50_s": round(float(np.percentile(first_s, 50)), 3),
        "ttft_p99_s": round(float(np.percentile(first_s, 99)), 3),
        "refusal_p50_ms": round(float(np.percentile(refusal_ms, 50)), 1),
        "refusal_p99_ms": round(float(np.percentile(refusal_ms, 99)), 1),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load [10]")
    parser.add_argument("--rounds", type=int, default=3, help="of both loads [3]")
    parser.add_argument(
        "--step-ms", type=float, default=20.0, help="of the paced worker; 0 = a real one [20]"
    )
    parser.add_argument("--door", choices=("grpc", "http"), default="grpc", help="[grpc]")
    parser.add_argument("--record", type=Path, help="append one JSON line to this file")
    arguments = parser.parse_args(argv)
    load_before = os.getloadavg()[0]
    rounds = _run(arguments.step_ms, arguments.door, arguments.seconds, arguments.rounds)
    record = {
        "bench": "overload",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": cpu_name(),
        "num_cores": os.cpu_count(),
        "load_before": round(load_before, 2),
        "seconds": arguments.seconds,
        "step_ms": arguments.step_ms,
        "door": arguments.door,
        "max_wait_s": MAX_WAIT_S,
        **_summary(rounds),
    }
    print(
        f"capacity {record['capacity_tok_s']:.0f} tokens/s; at {FACTOR:g} x the requests: "
        f"{record['goodput_tok_s']:.0f} tokens/s ({record['goodput_share']:.0%}, budget "
        f"{BUDGET:.0%}; rounds {record['shares']}), {record['refused']} of {record['offered']} "
        f"refused after {record['refusal_p50_ms']} ms (p99 {record['refusal_p99_ms']}), first "
        f"token p50 {record['ttft_p50_s']} s, p99 {record['ttft_p99_s']} s (bound "
        f"{MAX_WAIT_S:g} s)\ncores busy at capacity {record['cores_at_capacity']}, "
        f"overloaded {record['cores']}"
    )
    if arguments.record:
        with arguments.record.open("a") as file:
            file.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
