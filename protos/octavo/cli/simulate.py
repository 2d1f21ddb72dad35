"""`octavo bench simulate`: recorded traffic against fleets in virtual time, policy by policy.

The scheduler and the router's choice are the production modules; workers only take time
(tests/bench/simulator; run this in a checkout). Must not know: what a fleet is (loaded by name).
Entry point: `main`.
"""

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole

from octavo.cli.checkout import load_from_checkout
from octavo.cli.measurement import append_record, commit
from octavo.cli.serve_plots import check_matplotlib
from octavo.cli.simulate_report import flood_table, runs_table, write_plots
from octavo.errors import ConfigurationError

_TABLE_WIDTH = 116
_FLOODS = (1.0, 3.0, 10.0)


def main(argv: list[str] | None = None) -> int:
    """Run what was asked for; the tables go to stderr, the JSON line to stdout."""
    experiment = load_from_checkout("simulator.experiment", "the simulator lies")
    arguments = _parse(argv, experiment)
    if arguments.plot:
        check_matplotlib()
    screen = RichConsole(stderr=True, width=None if sys.stderr.isatty() else _TABLE_WIDTH)

    def on_run(run: Any) -> None:
        screen.print(f"{run.workload} · {run.shape.policy}, {run.shape}: {run.wall_s:.1f} s")

    shapes = [
        *experiment.OCTAVO_SHAPES,
        *(() if arguments.no_baselines else experiment.BASELINES),
    ]
    size = {"share": arguments.share, "seed": arguments.seed}
    findings = experiment.run(arguments.workload, shapes, **size, on_run=on_run)
    floods = {f"{factor:g}": experiment.flood(factor) for factor in _floods(arguments)}
    record: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "bench": "simulate",
        **size,
        "runs": [run.summary() for run in findings],
        "floods": floods,
    }
    for name in arguments.workload:
        screen.print(runs_table(name, record["runs"]))
    if floods:
        screen.print(flood_table(floods))
    if arguments.plot:
        for path in write_plots(Path(arguments.plot), findings):
            screen.print(f"wrote {path}")
    line = json.dumps(record)
    print(line, flush=True)
    append_record(arguments.record, line)
    return 0


def _floods(arguments: argparse.Namespace) -> tuple[float, ...]:
    return () if arguments.no_flood else _FLOODS


def _parse(argv: list[str] | None, experiment: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="octavo bench simulate",
        description="Replay recorded traffic on simulated fleets of 8 workers.",
        epilog="All of it takes about ten minutes on one core; --share 0.1 one.",
    )
    parser.add_argument(
        "--workload",
        action="append",
        choices=experiment.WORKLOADS,
        help="conversation, synthetic (recorded by Mooncake) or chats (generated); may be repeated",
    )
    parser.add_argument("--share", type=float, default=1.0, help="the first part of a trace [1]")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn at random [0]")
    parser.add_argument("--no-baselines", action="store_true", help="Octavo's policy only")
    parser.add_argument("--no-flood", action="store_true", help="without the two tenants")
    parser.add_argument("--plot", metavar="FOLDER", help="write PNGs there (needs matplotlib)")
    parser.add_argument("--record", metavar="FILE", help="append the JSON line to FILE")
    arguments = parser.parse_args(argv)
    if not 0 < arguments.share <= 1:
        raise ConfigurationError(f"--share {arguments.share}: must be above 0, at most 1")
    arguments.workload = arguments.workload or list(experiment.WORKLOADS)
    return arguments
