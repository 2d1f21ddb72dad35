"""The flags of `octavo bench`, checked. Entry point: `parse_bench_options`."""

import argparse
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from octavo.cli.bench_cases import Case
from octavo.cli.devices import num_cores
from octavo.cli.measurement import gpu_name
from octavo.cli.model_shapes import ensure_shape_folder
from octavo.cli.serve import add_stack_arguments, stack_options
from octavo.cli.stack import StackOptions
from octavo.cli.workloads import last_id_of, load_shapes, load_workloads, make_requests
from octavo.errors import ConfigurationError
from octavo.hub import DEMO_MODEL, model_name_of, resolve_model

_PATHS = {"worker": ("worker",), "stack": ("stack",), "both": ("worker", "stack")}
_SAMPLING = {"greedy": (False,), "sampled": (True,), "both": (False, True)}
_PROTOCOLS = ("http", "grpc")
_MAX_CLIENTS = 8
_CORES_PER_CLIENT = 4


@dataclass(frozen=True)
class BenchOptions:
    """What to measure, and how. Of both `paths` the worker comes first."""

    stack: StackOptions
    # As in the model's config.json.
    config: dict[str, Any]
    model: str
    gpu: str | None
    dtype: str
    cases: tuple[Case, ...]
    paths: tuple[str, ...]
    protocols: tuple[str, ...]
    num_clients: int
    url: str | None
    scale: float
    record: Path | None
    profile: Path | None
    is_verbose: bool

    @property
    def num_measurements(self) -> int:
        per_path = {"worker": 1, "stack": len(self.protocols)}
        return len(self.cases) * sum(per_path[path] for path in self.paths)


def parse_bench_options(argv: Sequence[str] | None) -> BenchOptions:
    """Flags and environment; fetches the model's configuration. Raises ConfigurationError."""
    arguments = _parser().parse_args(argv)
    _check(arguments)
    if arguments.model_shape:
        shape = load_shapes()[arguments.model_shape]
        arguments.model = str(ensure_shape_folder(arguments.model_shape, shape))
        arguments.load_format = arguments.load_format or "random"
    stack = _stack_options(arguments)
    folder = resolve_model(stack.model, stack.worker.revision)
    config = json.loads((folder / "config.json").read_text())
    options = BenchOptions(
        stack=stack,
        config=config,
        model=arguments.model_shape or model_name_of(stack.model),
        gpu=(gpu := gpu_name()),
        dtype=_dtype_of(config, stack.worker.dtype, has_gpu=gpu is not None),
        cases=_cases(arguments, config["vocab_size"]),
        paths=_PATHS[arguments.path],
        protocols=_names(arguments.protocol, _PROTOCOLS, "protocol"),
        num_clients=_num_clients(arguments),
        url=arguments.url,
        scale=arguments.scale,
        record=Path(arguments.record) if arguments.record else None,
        profile=Path(stack.worker.profile) if stack.worker.profile else None,
        is_verbose=arguments.verbose,
    )
    if options.profile and (options.url or stack.num_workers > 1 or options.num_measurements > 1):
        raise ConfigurationError(
            "--profile shows one worker, in a stack of its own, and one workload, sampling, path "
            "and protocol"
        )
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="octavo bench",
        description="Measure fixed workloads on one start of a worker, a stack, or both.",
        epilog="All settings of the services apply, to the bare worker too.",
    )
    add = parser.add_argument
    workloads = ", ".join(load_workloads())
    add("--workload", default="bs1", help=f"comma list of {workloads}; or all [bs1]")
    add("--sampling", choices=_SAMPLING, help="[greedy]")
    add("--sampled", action="store_true", help="--sampling sampled: temperature 1, top_p 0.95")
    add(
        "--path",
        default="stack",
        choices=_PATHS,
        help="worker: the bare loop alone; stack: through router and scheduler; both: one after "
        "the other, with the ratio [stack]",
    )
    add("--protocol", default="http", help="for stacks: comma list of http, grpc; or all [http]")
    add("--runs", type=int, help="of each, the fastest counts [2 where all lengths are alike]")
    add("--clients", type=int, help="processes that send a stack's load [a quarter of the cores]")
    add("--routers", type=int, default=1, help="router processes that clients are dealt to [1]")
    add("--url", help="a running server (http://host:port, or host:port for gRPC)")
    add("--model-shape", choices=load_shapes(), help="random weights of this shape, not MODEL")
    add("--scale", type=float, default=1.0, help="shrink requests and lengths, for CPUs [1]")
    add("--record", metavar="FILE", help="append a JSON line to FILE as soon as one is measured")
    # --profile FILE is a setting of the worker's.
    add("--verbose", action="store_true", help="show the services' logs")
    add_stack_arguments(parser)
    return parser


def _check(arguments: argparse.Namespace) -> None:
    if arguments.scale <= 0:
        raise ConfigurationError(f"--scale {arguments.scale}: must be above 0")
    for name in ("runs", "clients", "routers"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigurationError(f"--{name} {value}: must be at least 1")
    if arguments.sampled and arguments.sampling not in (None, "sampled"):
        raise ConfigurationError(f"--sampled and --sampling {arguments.sampling}: give one of them")
    if arguments.model_shape and arguments.model != DEMO_MODEL:
        raise ConfigurationError("give MODEL or --model-shape, not both")
    if arguments.url and (arguments.path != "stack" or arguments.routers > 1):
        raise ConfigurationError("--url measures a running server: no other path, no more routers")


def _stack_options(arguments: argparse.Namespace) -> StackOptions:
    options = stack_options(arguments)
    # Every run sends the same prompts: each must compute them again. Any free port will do.
    scheduler = replace(options.scheduler, enable_prefix_caching=False)
    router = options.router if arguments.port else replace(options.router, port=0)
    return replace(options, scheduler=scheduler, router=router, num_routers=arguments.routers)


def _cases(arguments: argparse.Namespace, vocab_size: int) -> tuple[Case, ...]:
    workloads = load_workloads()
    cases: list[Case] = []
    for name in _names(arguments.workload, workloads, "workload"):
        workload = workloads[name].scaled(arguments.scale)
        requests = tuple(make_requests(workload, vocab_size))
        num_runs = arguments.runs or workload.num_runs
        for is_sampled in _SAMPLING[arguments.sampling or _default_sampling(arguments)]:
            cases.append(Case(workload, is_sampled, requests, num_runs, last_id_of(vocab_size)))
    return tuple(cases)


def _default_sampling(arguments: argparse.Namespace) -> str:
    return "sampled" if arguments.sampled else "greedy"


def _names(text: str, known: Collection[str], what: str) -> tuple[str, ...]:
    """The parts of a comma list, each once; "all" = all that there are."""
    if text == "all":
        return tuple(known)
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in names:
        if name not in known:
            raise ConfigurationError(f"--{what} {name!r}: must be of {', '.join(known)}, or all")
    if not names:
        raise ConfigurationError(f"--{what}: names nothing")
    return names


def _num_clients(arguments: argparse.Namespace) -> int:
    """Each router has a client at least: a client keeps to one of them."""
    usual = min(_MAX_CLIENTS, max(1, num_cores() // _CORES_PER_CLIENT))
    return max(arguments.routers, arguments.clients or usual)


def _dtype_of(config: dict[str, Any], setting: str, *, has_gpu: bool) -> str:
    """What a worker with this setting computes in."""
    if setting != "auto":
        return setting
    if not has_gpu:
        return "float32"
    return config.get("dtype") or config.get("torch_dtype") or "float32"
