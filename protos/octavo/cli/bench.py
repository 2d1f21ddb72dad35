"""`octavo bench`: a fixed workload through a bare worker or a whole stack; a table, a record.

Must not know: how a worker runs steps (loaded by name), how a stack starts (`stack`). Entry
point: `main`.
"""

import argparse
import asyncio
import importlib
import json
import os
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from octavo.cli.bench_profile import add_clients, report
from octavo.cli.console import Console
from octavo.cli.grpc_load import run_grpc
from octavo.cli.http_load import run_http
from octavo.cli.limits import knows_weights, limit_s, quant_method
from octavo.cli.measurement import Run, gpu_name, make_record, package_version
from octavo.cli.model_shapes import ensure_shape_folder
from octavo.cli.serve import add_stack_arguments, stack_options
from octavo.cli.stack import Stack, StackOptions
from octavo.cli.workloads import (
    BenchRequest,
    Workload,
    load_shapes,
    load_workloads,
    make_requests,
)
from octavo.errors import ConfigurationError, OctavoError
from octavo.hub import DEMO_MODEL, model_name_of, resolve_model

_SAMPLED = {"temperature": 1.0, "top_p": 0.95}
_WARM_UP = BenchRequest(tuple(range(10, 42)), 8)
RunOnce = Callable[[list[BenchRequest], Callable[[int], None]], Run]


def main(argv: list[str] | None = None) -> int:
    """Run one workload; the table goes to stderr, the JSON line to stdout."""
    arguments = _parse(argv)
    workload = load_workloads()[arguments.workload].scaled(arguments.scale)
    options = _options(arguments)
    folder = resolve_model(options.model, options.worker.revision)
    config = json.loads((folder / "config.json").read_text())
    requests = make_requests(workload, config["vocab_size"])
    bench = _Bench(arguments, options, workload, requests)
    run = bench.run_worker() if arguments.path == "worker" else asyncio.run(bench.run_stack())
    dtype = _dtype_of(config, options.worker.dtype)
    limit = limit_s(config, dtype, requests) if gpu_name() and knows_weights(config) else None
    if limit is not None:
        # As if the cards' exchange took no time.
        limit /= options.worker.tensor_parallel
    steps = None
    if arguments.profile:
        steps = report(Path(arguments.profile))
        add_clients(Path(arguments.profile), run)
    quant = quant_method(config)
    if options.worker.quantization != "auto":
        # Weights that are rounded at load: their bytes are not the folder's.
        quant, limit = options.worker.quantization, None
    record = make_record(run, bench.facts(dtype, quant), limit) | ({} if steps is None else steps)
    RichConsole(stderr=True).print(_table(record))
    line = json.dumps(record)
    print(line, flush=True)
    if arguments.record:
        with Path(arguments.record).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    return 0


class _Bench:
    """One workload by one path."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        options: StackOptions,
        workload: Workload,
        requests: list[BenchRequest],
    ) -> None:
        self._arguments = arguments
        self._options = options
        self._workload = workload
        self._requests = requests
        self._sampling = _SAMPLED if arguments.sampled else {"temperature": 0.0}

    def facts(self, dtype: str, quant: str | None) -> dict[str, Any]:
        """What ran, for the record."""
        arguments = self._arguments
        is_stack = arguments.path == "stack"
        return {
            "gpu": gpu_name(),
            "torch": package_version("torch"),
            "triton": package_version("triton"),
            "model": arguments.model_shape or model_name_of(self._options.model),
            "dtype": dtype,
            "quant": quant,
            "workload": self._workload.name,
            "scale": arguments.scale,
            "sampled": arguments.sampled,
            "path": arguments.path,
            "protocol": arguments.protocol if is_stack else None,
            "routers": 1 if is_stack else 0,
            "workers": self._options.num_workers if is_stack else 1,
            "tensor_parallel": self._options.worker.tensor_parallel,
        }

    def run_worker(self) -> Run:
        """The bare loop, in this process."""
        # By name: this package imports no service.
        bare_loop = importlib.import_module("octavo_worker.bare_loop")
        plan = importlib.import_module("octavo_worker.plan")
        loop = bare_loop.BareLoop(replace(self._options.worker, model=self._options.model))
        sampling = plan.Sampling(**self._sampling)
        loop.run([_WARM_UP], sampling, _ignore)
        runs: list[Run] = []
        for number in range(self._num_runs):
            with _Bar(self._workload, self._requests, number) as advance:
                runs.append(Run(loop.run(self._requests, sampling, advance)))
        loop.write_profile()
        loop.close()
        return min(runs, key=lambda run: run.wall_s)

    async def run_stack(self) -> Run:
        """Through HTTP or gRPC: a running server, or a stack of our own."""
        url = self._arguments.url
        if url:
            try:
                return await self._run_clients(url, url, "")
            except (OSError, ExceptionGroup) as error:
                raise OctavoError(f"{url}: {_first_cause(error)}") from error
        stack = Stack(self._options, Console(is_quiet=not self._arguments.verbose))
        try:
            endpoints = await stack.start()
            running = asyncio.create_task(stack.watch())
            clients = asyncio.create_task(
                self._run_clients(endpoints.url, endpoints.grpc_address, endpoints.model)
            )
            await asyncio.wait([running, clients], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                clients.cancel()
                await running
            running.cancel()
            return await clients
        finally:
            await stack.stop()

    async def _run_clients(self, url: str, grpc_address: str, model: str) -> Run:
        key = os.environ.get("OCTAVO_API_KEY")

        def run(
            requests: list[BenchRequest], on_tokens: Callable[[int], None]
        ) -> Coroutine[Any, Any, Run]:
            if self._arguments.protocol == "grpc":
                address = grpc_address.removeprefix("http://")
                return run_grpc(address, requests, self._sampling, on_tokens, key)
            return run_http(url.rstrip("/"), model, requests, self._sampling, on_tokens, key)

        await run([_WARM_UP], _ignore)
        runs: list[Run] = []
        for number in range(self._num_runs):
            with _Bar(self._workload, self._requests, number) as advance:
                runs.append(await run(self._requests, advance))
        best = min(runs, key=lambda run: run.wall_s)
        if best.num_cached_tokens:
            print(
                f"octavo bench: {best.num_cached_tokens} of {best.num_prompt_tokens} prompt tokens "
                "were found in a prefix cache: the numbers flatter the prefill",
                file=sys.stderr,
            )
        return best

    @property
    def _num_runs(self) -> int:
        # A server that others run caches prompts: a second run would find them all.
        return 1 if self._arguments.url else self._workload.num_runs


class _Bar:
    """A progress bar over a run's output tokens (terminals only)."""

    def __init__(self, workload: Workload, requests: list[BenchRequest], number: int) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tokens"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=RichConsole(stderr=True), transient=True)
        self._total = sum(request.num_output_tokens for request in requests)
        self._label = f"{workload.name}, run {number + 1}"

    def __enter__(self) -> Callable[[int], None]:
        self._progress.start()
        task = self._progress.add_task(self._label, total=self._total)
        return lambda count: self._progress.advance(task, count)

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="octavo bench",
        description="Run a fixed workload and print a table and one JSON line.",
        epilog="All settings of the services apply, to the bare worker too.",
    )
    parser.add_argument("--workload", default="bs1", choices=load_workloads(), help="what to send")
    parser.add_argument(
        "--path",
        default="stack",
        choices=("worker", "stack"),
        help="worker: the bare loop in this process; stack: through router and scheduler [stack]",
    )
    parser.add_argument(
        "--protocol", default="http", choices=("http", "grpc"), help="for stacks [http]"
    )
    parser.add_argument("--url", help="a running server (http://host:port, or host:port for gRPC)")
    parser.add_argument(
        "--model-shape", choices=load_shapes(), help="random weights of this shape, not MODEL"
    )
    parser.add_argument("--sampled", action="store_true", help="temperature 1, top_p 0.95")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="shrink requests and lengths, for CPUs [1]"
    )
    parser.add_argument("--record", metavar="FILE", help="append the JSON line to FILE")
    # --profile FILE is a setting of the worker's.
    parser.add_argument("--verbose", action="store_true", help="show the services' logs")
    add_stack_arguments(parser)
    return parser.parse_args(argv)


def _options(arguments: argparse.Namespace) -> StackOptions:
    if arguments.profile and (arguments.url or arguments.workers > 1):
        raise ConfigurationError("--profile shows one worker, in a stack of its own")
    if arguments.scale <= 0:
        raise ConfigurationError(f"--scale {arguments.scale}: must be above 0")
    if arguments.model_shape:
        if arguments.model != DEMO_MODEL:
            raise ConfigurationError("give MODEL or --model-shape, not both")
        shape = load_shapes()[arguments.model_shape]
        arguments.model = str(ensure_shape_folder(arguments.model_shape, shape))
        arguments.load_format = arguments.load_format or "random"
    options = stack_options(arguments)
    # The second run sends the same prompts: it must compute them again. Any free port will do.
    scheduler = replace(options.scheduler, enable_prefix_caching=False)
    router = options.router if arguments.port else replace(options.router, port=0)
    return replace(options, scheduler=scheduler, router=router)


def _dtype_of(config: dict[str, Any], setting: str) -> str:
    """What a worker with this setting computes in."""
    if setting != "auto":
        return setting
    if gpu_name() is None:
        return "float32"
    return config.get("dtype") or config.get("torch_dtype") or "float32"


def _table(record: dict[str, Any]) -> Table:
    table = Table(title=f"{record['workload']} · {record['model']} · {record['path']}")
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_row("wall time", f"{record['wall_s']:.2f} s")
    table.add_row("tokens in / out", f"{record['in_tok']:,} / {record['out_tok']:,}")
    table.add_row("output", f"{record['out_tok_s']:,.1f} tokens/s")
    table.add_row("input", f"{record['in_tok_s']:,.1f} tokens/s")
    for label, key in (("first token", "ttft_ms"), ("inter-token", "itl_ms")):
        values = record[key]
        text = " / ".join(f"{value:.1f}" for value in values.values())
        table.add_row(f"{label} {' / '.join(values)}", f"{text} ms" if values else "-")
    if "step_ms" in record:
        text = " / ".join(f"{value:.2f}" for value in record["step_ms"].values())
        table.add_row(f"step {' / '.join(record['step_ms'])}", f"{text} ms")
        table.add_row("device idle between steps", f"{100 * record['idle_fraction']:.1f} %")
    fraction = record["limit_fraction"]
    table.add_row("of the card's limit", "-" if fraction is None else f"{100 * fraction:.1f} %")
    return table


def _first_cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _ignore(count: int) -> None:
    del count
