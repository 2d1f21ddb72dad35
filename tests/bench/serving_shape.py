"""How a served model answers at half its capacity, at most of it, and close to all of it.

    python -m tests.bench.serving_shape --model-shape llama8b --preset latency [--record FILE]

One start of a stack (`octavo serve`'s, all its flags apply). Clients that always have a request
open tell how many requests/s of these lengths it serves; then requests arrive at random, at
fractions of that rate, and nothing waits for answers. Lengths are those of Azure's recorded
conversations, drawn with a seed; prompts are random ids, so that nothing is found in a prefix
cache. Each fraction is one window of a load that goes on: its beginning, until about as many
streams run as belong to its rate, and its last second don't count. A record is written as soon as
its window is over.

Times are the clients', over HTTP, from when a request was due; a gap is from frame to frame.
Presets are compared at the same rates: pass the first one's capacity to the second (`--capacity`).
Entry points: `ServingShape`, `main`.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx

from octavo.cli.console import Console
from octavo.cli.event_loop import loop_factory
from octavo.cli.measurement import commit, gpu_name, package_version
from octavo.cli.model_shapes import ensure_shape_folder
from octavo.cli.serve import add_stack_arguments, stack_options
from octavo.cli.serve_client import Server
from octavo.cli.serve_load import Arrival, PromptMaker
from octavo.cli.serve_trace import TraceEntry, load_trace
from octavo.cli.service_readings import Readings, read_histograms, read_services
from octavo.cli.stack import Stack, StackOptions
from octavo.cli.step_report import Histogram
from octavo.cli.workloads import load_shapes
from octavo.errors import ConfigurationError, OctavoError
from octavo.hub import model_name_of, resolve_model
from tests.bench.serving_clients import Arrivals, ClosedLoop, ServingClients
from tests.bench.serving_windows import Slo, Stream, Window

TRACE = Path(__file__).parent / "traces" / "azure_conversation_trace.csv.gz"
FRACTIONS = (0.5, 0.8, 0.95)
# Of a phase's end, so that first tokens of what arrived before can still come.
_TAIL_S = 1.0
# Between the order to begin and the beginning.
_LEAD_S = 0.05
_QUEUE_SECONDS = "octavo_queue_time_seconds"
_WARM_UP_TOKENS = ((2000, 16), (500, 16), (100, 16), (4000, 16), (30, 16), (1000, 16))
_WARM_UP_LIMIT_S = 60.0
_START_LIMIT_S = 180.0


@dataclass(frozen=True)
class Shape:
    """What is measured. Times in seconds; a capacity of None is measured first."""

    options: StackOptions
    model: str
    vocab_size: int
    capacity: float | None
    fractions: tuple[float, ...]
    seconds: float
    ramp_s: float
    capacity_s: float
    num_at_once: int
    num_processes: int
    lengths: tuple[tuple[int, int], ...]
    slo: Slo
    seed: int

    def drawn(self, seed: int) -> Iterator[tuple[int, int]]:
        """Prompt and answer lengths, endless."""
        source = Random(seed)
        while True:
            yield source.choice(self.lengths)

    @property
    def mean_lengths(self) -> tuple[float, float]:
        prompts, answers = zip(*self.lengths, strict=True)
        return sum(prompts) / len(prompts), sum(answers) / len(answers)


Emit = Callable[[dict[str, Any]], None]


class _Read(NamedTuple):
    """What the services counted so far; `queue`: seconds from Submit to the first row."""

    services: Readings
    queue: Histogram


class ServingShape:
    """One start of a stack, measured phase by phase."""

    def __init__(self, shape: Shape, stack: Stack, clients: ServingClients) -> None:
        self._shape = shape
        self._stack = stack
        self._clients = clients
        self._num_requests = 0

    async def measure(self, emit: Emit) -> None:
        """`emit` hears of each phase when it is over. The stack runs."""
        shape = self._shape
        door = self._stack.doors[0]
        fields = {"temperature": 0.0, "ignore_eos": True}
        server = Server("octavo", f"{door.url}/v1", door.model, is_chat=False, options=fields)
        await self._clients.connect(server, PromptMaker(shape.seed, False, shape.vocab_size))
        await self._warm_up()
        capacity = shape.capacity
        if capacity is None:
            record = await self._measure_capacity()
            capacity = record["capacity_req_s"]
            emit(record)
        schedules = [
            self._arrivals(fraction * capacity, shape.seed + 1 + number)
            for number, fraction in enumerate(shape.fractions)
        ]
        await self._clients.prepare([arrival for schedule in schedules for arrival in schedule])
        start_s = time.perf_counter() + _LEAD_S
        for fraction, schedule in zip(shape.fractions, schedules, strict=True):
            record = await self._measure_open(schedule, start_s)
            rate = fraction * capacity
            emit({"fraction": fraction, "rate_req_s": round(rate, 3), **record})
            start_s = max(start_s + shape.seconds, time.perf_counter() + _LEAD_S)

    async def _warm_up(self) -> None:
        """Short and long prompts, alone and beside streams: what is compiled late, is compiled."""
        longest = max(prompt for prompt, _ in self._shape.lengths)
        lengths = [(min(prompt, longest), answer) for prompt, answer in _WARM_UP_TOKENS]
        for num_clients in (1, 3):
            end_s = time.perf_counter() + _WARM_UP_LIMIT_S
            loop = ClosedLoop(num_clients, self._numbered(lengths), end_s)
            streams = await self._clients.run(loop)
            for error in {stream.error for stream in streams if stream.error}:
                raise OctavoError(f"a request failed before anything was measured: {error}")

    async def _measure_capacity(self) -> dict[str, Any]:
        shape = self._shape
        lengths = shape.drawn(shape.seed)
        # More than can be served: who runs out of requests measures nothing.
        most = shape.num_at_once + round(shape.capacity_s * 100)
        requests = self._numbered([next(lengths) for _ in range(most)])
        start_s = time.perf_counter()
        end_s = start_s + shape.capacity_s
        before = await self._read()
        streams = await self._clients.run(ClosedLoop(shape.num_at_once, requests, end_s))
        window = Window(streams, start_s + shape.capacity_s / 2, end_s, end_s)
        capacity = window.requests_per_s(*shape.mean_lengths)
        if not capacity:
            raise OctavoError("nothing was answered while capacity was measured")
        return {
            "fraction": None,
            "capacity_req_s": round(capacity, 3),
            "num_at_once": shape.num_at_once,
            **await self._record(window, before),
        }

    async def _measure_open(self, schedule: Sequence[Arrival], start_s: float) -> dict[str, Any]:
        shape = self._shape
        end_s = start_s + shape.seconds
        before = await self._read()
        streams = await self._clients.run(Arrivals(schedule, start_s, end_s))
        window = Window(streams, start_s + shape.ramp_s, end_s - _TAIL_S, end_s)
        return await self._record(window, before)

    async def _record(self, window: Window, before: "_Read") -> dict[str, Any]:
        after = await self._read()
        queue = after.queue.since(before.queue)
        return {
            **window.to_record(self._shape.slo),
            "queue_ms": {f"p{p}": round(1e3 * queue.quantile(p / 100), 1) for p in (50, 90, 99)},
            "num_running": _num_running(window.streams, window.end_s),
            **after.services.steps_since(before.services).to_record(),
            "cores": after.services.cores_since(before.services),
        }

    async def _read(self) -> "_Read":
        ports = self._stack.schedulers[0].ports
        assert ports is not None, "the stack is ready"
        async with httpx.AsyncClient(trust_env=False, timeout=10.0) as client:
            answer = await client.get(f"http://127.0.0.1:{ports['metrics_port']}/metrics")
        answer.raise_for_status()
        queue = read_histograms(answer.text, [_QUEUE_SECONDS])[_QUEUE_SECONDS]
        return _Read(await read_services(self._stack), queue)

    def _arrivals(self, per_s: float, seed: int) -> list[Arrival]:
        """A Poisson process for the seconds of a phase."""
        lengths, times = self._shape.drawn(seed), Random(-seed)
        due_s: list[float] = []
        at_s = 0.0
        while (at_s := at_s + times.expovariate(per_s)) < self._shape.seconds:
            due_s.append(at_s)
        requests = self._numbered([next(lengths) for _ in due_s])
        return [replace(r, due_s=at_s) for r, at_s in zip(requests, due_s, strict=True)]

    def _numbered(self, lengths: Sequence[tuple[int, int]]) -> list[Arrival]:
        """Requests of which no two have the same number, and so the same prompt."""
        first, self._num_requests = self._num_requests, self._num_requests + len(lengths)
        return [Arrival(first + i, None, *pair) for i, pair in enumerate(lengths)]


def _num_running(streams: Sequence[Stream], at_s: float) -> int:
    """Streams that had a first token and would have another."""
    return sum(
        bool(s.times_s) and s.times_s[0] <= at_s and (not s.num_tokens or s.times_s[-1] > at_s)
        for s in streams
    )


async def run(shape: Shape, emit: Emit, *, is_verbose: bool) -> None:
    """Start everything, measure, end everything."""
    stack = Stack(shape.options, Console(is_quiet=not is_verbose))
    try:
        # The clients start beside the stack, which takes longer.
        with ServingClients(shape.num_processes) as clients:
            async with asyncio.timeout(_START_LIMIT_S):
                await stack.start()
            watching = asyncio.create_task(stack.watch())
            measuring = asyncio.create_task(ServingShape(shape, stack, clients).measure(emit))
            await asyncio.wait([watching, measuring], return_when=asyncio.FIRST_COMPLETED)
            await (measuring if measuring.done() else watching)
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
    finally:
        # Answers that still run are nobody's any more.
        await stack.kill()


def parse(argv: Sequence[str] | None) -> tuple[Shape, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model-shape", choices=load_shapes(), help="random weights of this shape, not MODEL")
    add("--capacity", type=float, metavar="R", help="requests/s that count as all [measured]")
    add("--fractions", default=",".join(map(str, FRACTIONS)), help="of it [0.5,0.8,0.95]")
    add("--seconds", type=float, default=18.0, help="of each fraction's load [18]")
    add("--ramp", type=float, default=4.0, help="of these, seconds that don't count [4]")
    add("--capacity-seconds", type=float, default=13.0, help="to measure it; half count [13]")
    add("--at-once", type=int, default=128, help="requests under way meanwhile [128]")
    add("--clients", type=int, default=4, help="processes that send the load [4]")
    add("--scale", type=float, default=1.0, help="shrink lengths, for CPUs [1]")
    add("--slo-ttft-ms", type=float, default=1000.0, help="for goodput [1000]")
    add("--slo-tpot-ms", type=float, default=50.0, help="for goodput [50]")
    add("--seed", type=int, default=0, help="of lengths, arrivals and prompts [0]")
    add("--record", type=Path, metavar="FILE", help="append each JSON line to FILE")
    add("--verbose", action="store_true", help="show the services' logs")
    add_stack_arguments(parser)
    given = parser.parse_args(argv)
    if given.seconds <= given.ramp + _TAIL_S:
        least = given.ramp + _TAIL_S
        raise ConfigurationError(
            f"--seconds {given.seconds}: must be above {least}, else none count"
        )
    if given.model_shape:
        given.model = str(ensure_shape_folder(given.model_shape, load_shapes()[given.model_shape]))
        given.load_format = given.load_format or "random"
    options = stack_options(given)
    router = options.router if given.port else replace(options.router, port=0)
    folder = resolve_model(options.model, options.worker.revision)
    config = json.loads((folder / "config.json").read_text())
    longest = options.worker.max_model_len or config["max_position_embeddings"]
    shape = Shape(
        options=replace(options, router=router),
        model=given.model_shape or model_name_of(options.model),
        vocab_size=config["vocab_size"],
        capacity=given.capacity,
        fractions=tuple(float(part) for part in given.fractions.split(",")),
        seconds=given.seconds,
        ramp_s=given.ramp,
        capacity_s=given.capacity_seconds,
        num_at_once=given.at_once,
        num_processes=given.clients,
        lengths=_lengths(given.scale, longest),
        slo=Slo(given.slo_ttft_ms, given.slo_tpot_ms),
        seed=given.seed,
    )
    return shape, given


@cache
def _trace() -> tuple[TraceEntry, ...]:
    return tuple(load_trace(TRACE))


def _lengths(scale: float, longest: int) -> tuple[tuple[int, int], ...]:
    """The trace's prompts and answers; those that the model can't hold are left out."""
    pairs = (
        (max(1, round(e.num_prompt_tokens * scale)), max(1, round(e.num_output_tokens * scale)))
        for e in _trace()
    )
    return tuple(pair for pair in pairs if sum(pair) < longest)


_HEAD = (
    f"{'load':>6} {'req/s':>7} {'good':>7}  {'TTFT ms p50/p90/p99':>22}  {'ITL ms p50/p90/p99':>20}"
    f" {'p99/p50':>7} {'queue p99':>9} {'tok/s':>7} {'rows':>5} {'refused':>7}"
)


def row_of(record: dict[str, Any]) -> str:
    """A record as a line of the table."""
    ttft = "/".join(f"{value:.0f}" for value in record["ttft_ms"].values()) or "-"
    itl = "/".join(f"{value:.1f}" for value in record["itl_ms"].values()) or "-"
    load = "all" if record["fraction"] is None else f"{record['fraction']:.0%}"
    queue_ms = record["queue_ms"].get("p99", 0.0)
    return (
        f"{load:>6} {record['req_s']:7.2f} {record['goodput_req_s']:7.2f}  {ttft:>22}  {itl:>20}"
        f" {record['itl_p99_over_p50'] or 0:7.2f} {queue_ms:9.0f} {record['out_tok_s']:7.0f}"
        f" {record['num_running']:5} {sum(record['errors'].values()):7}"
    )


def main(argv: list[str] | None = None) -> int:
    """The table goes to stderr, a JSON line of each phase to stdout, as soon as it is over."""
    shape, given = parse(argv)
    scheduler = shape.options.scheduler
    facts = {
        "bench": "serving_shape",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "gpu": gpu_name(),
        "torch": package_version("torch"),
        "triton": package_version("triton"),
        "model": shape.model,
        "lengths": TRACE.name,
        "scale": given.scale,
        "preset": scheduler.preset,
        "itl_limits": scheduler.itl_limits._asdict(),
        "capacity_given": shape.capacity,
        "clients": shape.num_processes,
        "seed": shape.seed,
    }
    title = f"{shape.model}, preset {scheduler.preset}, on {facts['gpu'] or 'the CPU'}"
    print(title, _HEAD, sep="\n", file=sys.stderr, flush=True)

    def emit(record: dict[str, Any]) -> None:
        print(row_of(record), file=sys.stderr, flush=True)
        line = json.dumps(facts | record)
        print(line, flush=True)
        if given.record:
            with given.record.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run(shape, emit, is_verbose=given.verbose))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OctavoError as failed:
        sys.exit(f"serving_shape: {failed.message}")
