"""Overload: what a stack delivers at three times the requests that it can serve.

    python -m tests.bench.overload [--seconds 10] [--step-ms 20] [--record FILE]

Router, scheduler and a worker, each a process: the worker's steps take a fixed time, so that what
is measured is what the services do and not who gets the CPU; with `--step-ms 0` it is a tiny
random model on the CPU, and refusals cost it some of that CPU. First clients
that always have a request open say how much can be served; then requests come at a multiple of
that rate and nobody waits for an answer before the next. Goodput counts the tokens of whole
answers. Budget: 0.9 of the goodput at capacity; every request is answered or refused at once.
Entry points: `offer`, `serve_steadily`, `main`.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import grpc
import numpy as np

from octavo.cli.measurement import commit
from octavo.serving import open_channel
from octavo.v1 import inference_pb2, inference_pb2_grpc
from tests.bench.scheduler_step import cpu_name
from tests.bench.split_cost import PacedStack
from tests.e2e.generation import Answer, generate, request
from tests.e2e.stack import Stack
from tests.fakes.fake_device import FakeSize
from tests.tiny_models import save_tiny_model

NUM_ROWS = 16
MAX_WAIT_S = 2.0
FACTOR = 3.0
BUDGET = 0.9
SCHEDULER_FLAGS = ("--max-queue-wait-s", str(MAX_WAIT_S))
_PROMPT_TOKENS, _OUTPUT_TOKENS = 48, 64


@dataclass(slots=True)
class Offered:
    """One request: when it was sent, and how it went. Times from the load's start."""

    sent_s: float
    first_s: float | None = None
    ended_s: float = 0.0
    num_tokens: int = 0
    # Why it was refused; None = it was answered.
    status: grpc.StatusCode | None = None
    retry_after_ms: int | None = None


def message(number: int) -> inference_pb2.InferenceGenerateRequest:
    rng = Random(number)
    ids = [rng.randrange(3, 200) for _ in range(_PROMPT_TOKENS)]
    return request(ids, max_tokens=_OUTPUT_TOKENS, ignore_eos=True)


async def _send(stub: inference_pb2_grpc.InferenceStub, number: int, started: float) -> Offered:
    offered = Offered(time.perf_counter() - started)

    def note(answer: Answer) -> None:
        del answer
        if offered.first_s is None:
            offered.first_s = time.perf_counter() - started

    try:
        answer = await generate(stub, message(number), on_message=note)
        offered.num_tokens = answer.completion_tokens
    except grpc.aio.AioRpcError as error:
        offered.status = error.code()
        trailers = dict(error.trailing_metadata() or ())
        if (text := trailers.get("octavo-retry-after-ms")) is not None:
            offered.retry_after_ms = int(text)
    offered.ended_s = time.perf_counter() - started
    return offered


async def serve_steadily(address: str, num_clients: int, seconds: float) -> list[Offered]:
    """Clients that send the next request when the last one was answered."""
    async with open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        started = time.perf_counter()
        numbers = iter(range(10**9))

        async def client() -> list[Offered]:
            mine: list[Offered] = []
            while time.perf_counter() - started < seconds:
                mine.append(await _send(stub, next(numbers), started))
            return mine

        lists = await asyncio.gather(*(client() for _ in range(num_clients)))
        return [offered for mine in lists for offered in mine]


async def offer(address: str, per_s: float, seconds: float, seed: int = 0) -> list[Offered]:
    """A Poisson process of requests, whatever becomes of them."""
    rng = Random(seed)
    async with open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        started = time.perf_counter()
        tasks: list[asyncio.Task[Offered]] = []
        due_s = 0.0
        while (due_s := due_s + rng.expovariate(per_s)) < seconds:
            await asyncio.sleep(max(0.0, started + due_s - time.perf_counter()))
            tasks.append(asyncio.create_task(_send(stub, 10**6 + len(tasks), started)))
        return list(await asyncio.gather(*tasks))


def goodput(offered: Sequence[Offered]) -> float:
    """Tokens/s of whole answers, while requests came."""
    seconds = max(one.sent_s for one in offered)
    # An answer that runs past the end counts by its part before it.
    tokens = sum(
        one.num_tokens * min(1.0, (seconds - one.sent_s) / (one.ended_s - one.sent_s))
        for one in offered
        if one.status is None
    )
    return tokens / seconds


def _stack(folder: Path, model: Path, step_ms: float) -> Stack:
    if not step_ms:
        flags = ("--max-num-seqs", str(NUM_ROWS))
        return Stack(folder, model=model, worker_flags=flags, scheduler_flags=SCHEDULER_FLAGS)
    size = FakeSize(max_num_seqs=NUM_ROWS)
    return PacedStack(folder, model, size, step_ms, scheduler_flags=SCHEDULER_FLAGS)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load [10]")
    parser.add_argument(
        "--step-ms", type=float, default=20.0, help="of the paced worker; 0 = a real one [20]"
    )
    parser.add_argument("--record", type=Path, help="append one JSON line to this file")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        save_tiny_model(model)
        with _stack(Path(folder), model, arguments.step_ms) as stack:
            address = stack.grpc_address
            asyncio.run(serve_steadily(address, 2 * NUM_ROWS, 2.0))  # warm up
            steady = asyncio.run(serve_steadily(address, 2 * NUM_ROWS, arguments.seconds))
            capacity = goodput(steady)
            per_s = FACTOR * capacity / _OUTPUT_TOKENS
            offered = asyncio.run(offer(address, per_s, arguments.seconds))
    refused = [one for one in offered if one.status is not None]
    first_s = [one.first_s - one.sent_s for one in offered if one.first_s is not None]
    refusal_s = [one.ended_s - one.sent_s for one in refused]
    record = {
        "bench": "overload",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": cpu_name(),
        "seconds": arguments.seconds,
        "step_ms": arguments.step_ms,
        "max_wait_s": MAX_WAIT_S,
        "capacity_tok_s": round(capacity, 1),
        "offered_per_s": round(per_s, 1),
        "offered": len(offered),
        "refused": len(refused),
        "goodput_tok_s": round(goodput(offered), 1),
        "goodput_share": round(goodput(offered) / capacity, 3),
        "ttft_p50_s": round(float(np.percentile(first_s, 50)), 3),
        "ttft_p99_s": round(float(np.percentile(first_s, 99)), 3),
        "refusal_p50_ms": round(1e3 * float(np.percentile(refusal_s, 50)), 1),
        "refusal_p99_ms": round(1e3 * float(np.percentile(refusal_s, 99)), 1),
    }
    print(
        f"capacity {capacity:.0f} tokens/s; at {FACTOR:g} x the requests: "
        f"{record['goodput_tok_s']:.0f} tokens/s ({record['goodput_share']:.0%}, budget "
        f"{BUDGET:.0%}), {len(refused)} of {len(offered)} refused after "
        f"{record['refusal_p50_ms']} ms (p99 {record['refusal_p99_ms']}), first token "
        f"p50 {record['ttft_p50_s']} s, p99 {record['ttft_p99_s']} s (bound {MAX_WAIT_S:g} s)"
    )
    if arguments.record:
        with arguments.record.open("a") as file:
            file.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
