"""What a trace costs: CPU per request of router, scheduler and worker, with tracing off and on.

    python -m tests.bench.trace_cost [--requests 600] [--rounds 3] [--record FILE]

The three real services with a tiny model, requests of sixteen tokens, eight at a time. Three
stacks, round by round one after the other, so that a busy machine is busy for all: tracing off;
on with no request sampled (the clients' parents say so); on with every request sampled and
exported to a real OTLP receiver in this process. CPU is each process's user + system time, its
export thread's included, over the requests; the least of the rounds. That is told to some 100 us;
what tracing's own calls cost is measured by themselves (`trace_calls`) and printed beside it.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from octavo.cli.measurement import commit
from tests.bench.scheduler_step import cpu_name, cpu_s
from tests.bench.trace_calls import SAMPLED, UNSAMPLED, measure_calls
from tests.e2e.stack import Stack
from tests.fakes.otlp_receiver import OtlpReceiver
from tests.tiny_models import save_tiny_model

SERVICES = ("router", "scheduler", "worker")
_AT_ONCE = 8
_BATCH_S = 5.5
_MAX_TOKENS = 16
_BODY = {
    "messages": [{"role": "user", "content": "What does a trace cost?"}],
    "max_tokens": _MAX_TOKENS,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run: a stack, and the header that its requests bring."""

    name: str
    stack: Stack
    headers: dict[str, str]

    def cpu_s(self) -> dict[str, float]:
        stack = self.stack
        services = (stack.routers[0], stack.schedulers[0], stack.workers[0])
        used = [cpu_s(service.process.pid) for service in services]
        return dict(zip(SERVICES, used, strict=True))


async def send(way: Way, num_requests: int) -> None:
    gate = asyncio.Semaphore(_AT_ONCE)
    async with httpx.AsyncClient(base_url=way.stack.url, timeout=60) as client:

        async def one() -> None:
            async with gate:
                answer = await client.post("/v1/chat/completions", json=_BODY, headers=way.headers)
                assert answer.text.endswith("data: [DONE]\n\n"), answer.text

        await asyncio.gather(*(one() for _ in range(num_requests)))


def measure(way: Way, num_requests: int) -> dict[str, float]:
    """CPU in us a request, by service."""
    before = way.cpu_s()
    asyncio.run(send(way, num_requests))
    # The last batch leaves within the SDK's delay.
    time.sleep(_BATCH_S)
    after = way.cpu_s()
    return {name: 1e6 * (after[name] - before[name]) / num_requests for name in SERVICES}


def run(num_requests: int, num_rounds: int) -> tuple[dict[str, dict[str, float]], int]:
    """Way -> service -> us a request; and how many spans came in."""
    with contextlib.ExitStack() as stacks, OtlpReceiver() as receiver:
        folder = Path(stacks.enter_context(tempfile.TemporaryDirectory()))
        model = save_tiny_model(_made(folder / "model"))

        def start(name: str, environ: dict[str, str]) -> Stack:
            stack = Stack(_made(folder / name), model=model, environ=environ)
            return stacks.enter_context(stack)

        endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint}
        off, on = start("off", {}), start("on", endpoint)
        ways = [
            Way("off", off, {}),
            Way("on, not sampled", on, {"traceparent": UNSAMPLED}),
            Way("on, sampled", on, {"traceparent": SAMPLED}),
        ]
        for way in ways:
            asyncio.run(send(way, 50))
        rounds = [{way.name: measure(way, num_requests) for way in ways} for _ in range(num_rounds)]
        num_spans = len(receiver.spans)
    least = {
        way.name: {
            name: round(min(one_round[way.name][name] for one_round in rounds), 1)
            for name in SERVICES
        }
        for way in ways
    }
    return least, num_spans


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def print_table(costs: dict[str, dict[str, float]], num_requests: int) -> None:
    print(f"CPU in us a request of {_MAX_TOKENS} tokens; {num_requests} requests a round")
    print(f"{'':18}" + "".join(f"{name:>11}" for name in (*SERVICES, "together")))
    base = costs["off"]
    for name, cost in costs.items():
        cells = [cost[service] for service in SERVICES]
        print(f"{name:18}" + "".join(f"{cell:11.0f}" for cell in (*cells, sum(cells))))
        if cost is not base:
            added = [cost[service] - base[service] for service in SERVICES]
            print(f"{'  added':18}" + "".join(f"{cell:+11.0f}" for cell in (*added, sum(added))))


def print_calls(calls: dict[str, float]) -> None:
    print("\nus a request of tracing's own calls, in one process:")
    for name, cost in calls.items():
        print(f"{name:18}{cost:11.1f}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=600, help="requests a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--record", help="append one JSON line here")
    arguments = parser.parse_args(argv)
    costs, num_spans = run(arguments.requests, arguments.rounds)
    print_table(costs, arguments.requests)
    calls = measure_calls()
    print_calls(calls)
    if arguments.record:
        record: dict[str, Any] = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "commit": commit(),
            "what": "trace_cost",
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "requests": arguments.requests,
            "rounds": arguments.rounds,
            "max_tokens": _MAX_TOKENS,
            "spans": num_spans,
            "us_per_request": costs,
            "calls_us_per_request": calls,
        }
        with open(arguments.record, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
