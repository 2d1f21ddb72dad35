"""What the router costs: CPU per SSE frame and per request, and time per routing decision.

    python tests/bench/router_frame.py [--streams 1,100,500] [--record FILE]

Three processes: a fake scheduler that gives each stream one token per step, the real router
(`octavo router`, demo tokenizer), and this one, which reads the streams. CPU is the router
process's user + system time, gRPC's threads included, over the frames read in the same window:
receiving the session's frames, detokenizing, rendering, writing. Nothing else runs in it.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from octavo.blocks import BlockHashRoot, chain
from octavo.bloom import BloomFilter, build_filter
from octavo_router.cells import Cell, choose_cell

BUDGET_US, AIM_US = 35.0, 20.0
DEMO = Path("~/.cache/octavo/models/SmolLM2-135M-Instruct").expanduser()
_TICKS = os.sysconf("SC_CLK_TCK")


class FrameCost(NamedTuple):
    """One measurement; `frames_per_s` says how far the machine kept up."""

    streams: int
    us_per_frame: float
    frames_per_s: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", default="1,100,500", help="numbers of streams, comma list")
    parser.add_argument("--step-ms", type=float, default=25.0, help="a token per stream and step")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of a measurement")
    parser.add_argument("--requests", type=int, default=1000, help="requests of one token")
    parser.add_argument("--model", default=str(DEMO), help="folder of a tokenizer")
    parser.add_argument("--record", help="append one JSON line here")
    arguments = parser.parse_args()
    counts = [int(text) for text in arguments.streams.split(",")]
    with router_process(arguments.model, arguments.step_ms) as (pid, port):
        costs = [asyncio.run(measure(pid, port, n, arguments.seconds)) for n in counts]
        request_us = asyncio.run(measure_requests(pid, port, arguments.requests))
    print(f"{'streams':>8} {'us/frame':>9} {'frames/s':>9}   budget {BUDGET_US:g}, aim {AIM_US:g}")
    for cost in costs:
        print(f"{cost.streams:8} {cost.us_per_frame:9.1f} {cost.frames_per_s:9.0f}")
    print(f"{request_us:.0f} us a request (a chat of one token, a connection each)")
    decisions = [decide(num_tokens) for num_tokens in (1_000, 32_000, 128_000)]
    print(f"{'tokens':>8} {'choose us':>9} {'hash us/block':>14}   8 cells")
    for row in decisions:
        print(f"{row['tokens']:8} {row['choose_us']:9.1f} {row['hash_us_per_block']:14.2f}")
    if arguments.record:
        record = {
            "date": time.strftime("%Y-%m-%d"),
            "commit": _commit(),
            "what": "router_frame",
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "step_ms": arguments.step_ms,
            "frames": [cost._asdict() for cost in costs],
            "request_us": request_us,
            "decisions": decisions,
        }
        with open(arguments.record, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    return 0


@contextlib.contextmanager
def router_process(model: str, step_ms: float) -> Generator[tuple[int, int]]:
    """A router on a fake scheduler; (process id, HTTP port)."""
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    fake = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.fake_scheduler", "--interval-ms", str(step_ms)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    )
    router: subprocess.Popen[bytes] | None = None
    try:
        assert fake.stdout is not None
        address = fake.stdout.readline().strip()
        with tempfile.TemporaryDirectory() as folder:
            ready = Path(folder) / "ready.json"
            flags = ["--model", model, "--schedulers", address, "--port", "0", "--grpc-port", "0"]
            router = subprocess.Popen(
                [sys.executable, "-m", "octavo_router", *flags, "--log-level", "warning"],
                env={**environ, "OCTAVO_READY_FILE": str(ready)},
            )
            while not ready.exists():
                assert router.poll() is None, "the router ended"
                time.sleep(0.02)
            port = json.loads(ready.read_text())["port"]
        time.sleep(0.5)
        yield router.pid, port
    finally:
        if router is not None:
            router.terminate()
            router.wait(timeout=30)
        assert fake.stdin is not None
        fake.stdin.close()
        fake.wait(timeout=30)


async def measure(pid: int, port: int, num_streams: int, seconds: float) -> FrameCost:
    """CPU per frame while `num_streams` streams run."""
    counts = [0] * num_streams
    tasks = [asyncio.create_task(_read(port, counts, i)) for i in range(num_streams)]
    while not all(counts):  # noqa: ASYNC110 - counts, not an event
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    frames, cpu_s, started_at = sum(counts), _cpu_s(pid), time.perf_counter()
    await asyncio.sleep(seconds)
    wall_s = time.perf_counter() - started_at
    frames, cpu_s = sum(counts) - frames, _cpu_s(pid) - cpu_s
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0.5)
    return FrameCost(num_streams, round(cpu_s / frames * 1e6, 1), round(frames / wall_s, 1))


async def measure_requests(pid: int, port: int, num_requests: int) -> float:
    """CPU in µs of a whole request that asks for one token, sixteen at a time."""
    body = {"messages": [{"role": "user", "content": "What is a router?"}], "max_tokens": 1}
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
    message = head.encode() + b"Connection: close\r\n\r\n" + data
    gate = asyncio.Semaphore(16)

    async def one() -> None:
        async with gate:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(message)
            answer = await reader.read()
            writer.close()
            assert b" 200 OK" in answer[:20], answer[:200]

    await asyncio.gather(*(one() for _ in range(50)))
    cpu_s = _cpu_s(pid)
    await asyncio.gather(*(one() for _ in range(num_requests)))
    return round((_cpu_s(pid) - cpu_s) / num_requests * 1e6, 1)


async def _read(port: int, counts: list[int], index: int) -> None:
    """One streaming client; `counts[index]` events read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = {"messages": [{"role": "user", "content": f"hello {index}"}], "stream": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    try:
        while part := await reader.read(65536):
            counts[index] += part.count(b"data: ")
    finally:
        writer.transport.abort()


def _cpu_s(pid: int) -> float:
    """User + system time of a process, all threads, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def decide(num_tokens: int) -> dict[str, Any]:
    """Time of one choice among 8 cells of which two hold the prompt, and of the hashes."""
    token_ids = np.arange(num_tokens, dtype=np.uint32)
    root = BlockHashRoot("m", "r", 16, "bf16").digest()
    started_at = time.perf_counter()
    hashes = chain(root, token_ids, 16)
    hash_us = (time.perf_counter() - started_at) * 1e6
    held = BloomFilter.from_bytes(build_filter(hashes))
    cells = [
        Cell(f"cell-{i}", 100 * i, 5000, leading_run=held.leading_run if i < 2 else None)
        for i in range(8)
    ]
    num_rounds = 50
    started_at = time.perf_counter()
    for _ in range(num_rounds):
        choose_cell(cells, hashes, 16)
    choose_us = (time.perf_counter() - started_at) / num_rounds * 1e6
    return {
        "tokens": num_tokens,
        "choose_us": round(choose_us, 1),
        "hash_us_per_block": round(hash_us / len(hashes), 2),
    }


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent,
    )
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
