"""`octavo bench ablation`: what continuous batching, paging and the prefix cache are worth.

Runs the scheduler with each idea taken out (the twins in tests/bench/ablation) on one worker and
in the same KV memory, and prints how they compare. A twin imports scheduler and worker, which no
installed package may: so they lie with the tests, and the command needs a source checkout.

Must not know: what a twin is (loaded by name). Entry point: `main`.
"""

import argparse
import json
import os
import sys
from datetime import UTC, datetime
from typing import Any, NamedTuple

from rich.console import Console as RichConsole

from octavo.cli.ablation_tables import gains_table, runs_table
from octavo.cli.checkout import load_from_checkout
from octavo.cli.measurement import append_record, commit, gpu_name, package_version
from octavo.cli.model_shapes import ensure_shape_folder
from octavo.cli.workloads import load_shapes
from octavo.errors import ConfigurationError
from octavo.hub import model_name_of
from octavo.settings import SchedulerSettings, WorkerSettings, add_arguments, load

_TABLE_WIDTH = 116
# No service is started: nothing listens, nothing is found.
_UNUSED = (
    *("host", "port", "metrics_port", "redis_url", "fleet", "drain_grace_s", "workers", "model"),
    *("scheduler_id", "worker_id", "leader_silence_s", "max_queue_tokens", "session_flush_ms"),
    *("enable_prefix_caching", "hang_floor_s", "max_moves"),
)


class Defaults(NamedTuple):
    """What is run unless flags say otherwise."""

    model_shape: str
    requests: int
    dialogues: int
    scale: float
    memory: int
    rounds: int


# Less than a minute on one idle core.
ON_CPU = Defaults("tiny", requests=48, dialogues=24, scale=0.25, memory=8, rounds=2)
ON_CARD = Defaults("llama8b", requests=256, dialogues=64, scale=1.0, memory=32, rounds=1)


def main(argv: list[str] | None = None) -> int:
    """Run all twins; the tables go to stderr, the JSON line to stdout."""
    arguments = _parse(argv)
    experiment = load_from_checkout("ablation.experiment", "the twins lie")
    worker = load(WorkerSettings, _model_flags(arguments))
    size = experiment.Size(
        arguments.requests,
        arguments.dialogues,
        arguments.scale,
        arguments.memory,
        arguments.rounds,
    )
    # A file or a pipe has no width: take what the tables need.
    screen = RichConsole(stderr=True, width=None if sys.stderr.isatty() else _TABLE_WIDTH)

    def record_of(bench: str, findings: dict[str, Any]) -> dict[str, Any]:
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "bench": bench,
            "gpu": gpu_name(),
            "torch": package_version("torch"),
            "model": arguments.model_shape or model_name_of(worker.model),
            **{name: getattr(arguments, name) for name in ("scale", "memory", "rounds")},
            **findings,
        }

    def on_result(workload: str, result: Any) -> None:
        """What a command keeps that is cut short."""
        screen.print(f"{workload:>7} · {result.twin.name}: {result.time_s:.2f} s")
        run = record_of("ablation run", experiment.summary(workload, result))
        append_record(arguments.record, json.dumps(run))

    findings = experiment.run(size, worker, _scheduler_settings(arguments), on_result)
    record = record_of("ablation", findings)
    screen.print(runs_table(record))
    screen.print(gains_table(record))
    line = json.dumps(record)
    print(line, flush=True)
    append_record(arguments.record, line)
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    backend = _backend_of(argv)
    usual = ON_CARD if backend != "cpu" and gpu_name() else ON_CPU
    parser = argparse.ArgumentParser(
        prog="octavo bench ablation",
        description="Run the scheduler without each of its ideas; print what they are worth.",
        epilog="Settings of scheduler and worker apply to all twins alike.",
    )
    parser.add_argument("model", nargs="?", default="", metavar="MODEL", help="id or folder")
    parser.add_argument(
        "--model-shape",
        choices=load_shapes(),
        help=f"random weights of this shape, not MODEL [{usual.model_shape}]",
    )
    counts = {
        "requests": "single requests of mixed lengths",
        "dialogues": "dialogues of three turns behind one system prompt",
        "memory": "KV memory, in requests of the greatest length",
        "rounds": "times that each twin runs; the fastest counts",
    }
    for name, text in counts.items():
        default = getattr(usual, name)
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{text} [{default}]"
        )
    parser.add_argument(
        *("--scale",), type=float, default=usual.scale, help=f"times all lengths [{usual.scale}]"
    )
    parser.add_argument(
        "--record", metavar="FILE", help="append a JSON line a run and one of all to FILE"
    )
    parser.usage = "%(prog)s [MODEL] [OPTIONS]"
    add_arguments(parser, SchedulerSettings, WorkerSettings, exclude=_UNUSED)
    arguments = parser.parse_args(argv)
    for name in (*counts, "scale"):
        if getattr(arguments, name) <= 0:
            raise ConfigurationError(f"--{name} {getattr(arguments, name)}: must be above 0")
    if arguments.model and arguments.model_shape:
        raise ConfigurationError("give MODEL or --model-shape, not both")
    if not arguments.model:
        arguments.model_shape = arguments.model_shape or usual.model_shape
    return arguments


def _backend_of(argv: list[str] | None) -> str | None:
    """What `--backend` says: the defaults depend on it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--backend", default=os.environ.get("OCTAVO_BACKEND"))
    return parser.parse_known_args(argv)[0].backend


def _model_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """The worker's flags, with the model's folder."""
    flags = dict(vars(arguments))
    if arguments.model_shape:
        shape = load_shapes()[arguments.model_shape]
        flags["model"] = str(ensure_shape_folder(arguments.model_shape, shape))
        flags["load_format"] = flags["load_format"] or "random"
    return flags


def _scheduler_settings(arguments: argparse.Namespace) -> SchedulerSettings:
    """All requests come at once: throughput counts, unless another preset is asked for."""
    return load(SchedulerSettings, {**vars(arguments), "preset": arguments.preset or "throughput"})
