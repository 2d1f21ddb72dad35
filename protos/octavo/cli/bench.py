"""`octavo bench`: fixed workloads through a bare worker, a whole stack, or both; read this first.

One start of each path measures all that is asked for; the bare worker's comes first and ends
before the stack starts, so that both have the device to themselves. Entry point: `main`.
"""

import asyncio
from dataclasses import replace

from octavo.cli.bench_bare import measure_bare, measure_bare_in_child
from octavo.cli.bench_options import parse_bench_options
from octavo.cli.bench_report import BenchReport
from octavo.cli.bench_stack import measure_stack
from octavo.cli.event_loop import loop_factory
from octavo.cli.serve_run import allow_many_connections


def main(argv: list[str] | None = None) -> int:
    """Measure; the table goes to stderr, JSON lines to stdout when that is no terminal."""
    options = parse_bench_options(argv)
    report = BenchReport(options)
    if "worker" in options.paths:
        settings = replace(options.stack.worker, model=options.stack.model)
        measure = measure_bare if len(options.paths) == 1 else measure_bare_in_child
        measure(settings, options.cases, report.add)
    if "stack" in options.paths:
        allow_many_connections()
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(measure_stack(options, report.add))
    return 0
