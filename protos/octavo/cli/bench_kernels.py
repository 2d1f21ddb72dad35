"""`octavo bench kernels`: every kernel on this card, against what the card can do.

The ceilings (reading memory, a large bf16 product) are measured in the same run; a kernel's
fraction is of the one that binds it. Must not know: kernels (loaded by name, beside the worker).
Entry point: `main`.
"""

import argparse
import importlib
import json
from datetime import UTC, datetime
from typing import Any

from rich.console import Console as RichConsole
from rich.table import Table

from octavo.cli.measurement import append_record, commit, gpu_name, package_version


def main(argv: list[str] | None = None) -> int:
    """Measure; the table goes to stderr, a JSON line a case to stdout."""
    arguments = _parse(argv)
    # By name: this package imports no service.
    bench = importlib.import_module("octavo_worker.kernel_bench")
    linear = importlib.import_module("octavo_worker.kernel_bench.linear_cases")
    screen = RichConsole(stderr=True)
    facts = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "bench": "kernels",
        "gpu": gpu_name(),
        "torch": package_version("torch"),
        "triton": package_version("triton"),
    }
    results: list[Any] = []
    lines: list[str] = []
    for result in bench.measure_kernels(arguments.words):
        if isinstance(result, bench.Ceilings):
            screen.print(
                f"{facts['gpu']}: reads {result.bytes_s / 1e9:,.0f} GB/s, "
                f"multiplies {result.flops_s / 1e12:,.0f} TFLOP/s (bf16)"
            )
            continue
        screen.print(f"{result.case.name}: {result.us:.1f} µs, {100 * result.fraction:.0f} %")
        results.append(result)
        lines.append(json.dumps(facts | kernel_record(result)))
        print(lines[-1], flush=True)
    screen.print(kernel_table(results))
    for with_copies, held in ((False, ""), (True, " with copies")):
        for layer, ways in linear.fastest_ways(results, with_copies=with_copies).items():
            best = ", ".join(f"{num_rows}: {way}" for num_rows, way in ways.items())
            screen.print(f"fastest way of 4-bit {layer}{held} by rows: {best}")
    append_record(arguments.record, *lines)
    return 0


def kernel_record(result: Any) -> dict[str, Any]:
    """The JSON line of one `Measured`, without what is the same for all."""
    return {
        "case": result.case.name,
        "us": {"p50": round(result.us, 3), "p99": round(result.us_p99, 3)},
        "bytes": result.case.num_bytes,
        "flops": result.case.flops,
        "gb_s": round(result.gb_s, 1),
        "tflop_s": round(result.tflop_s, 2),
        "ceiling_gb_s": round(result.ceilings.bytes_s / 1e9, 1),
        "ceiling_tflop_s": round(result.ceilings.flops_s / 1e12, 1),
        "limit_fraction": round(result.fraction, 4),
    }


def kernel_table(results: list[Any]) -> Table:
    """A row a case: its time, its rate, and how much of the binding ceiling that is."""
    table = Table(title="kernels")
    table.add_column("case")
    for name in ("µs", "rate", "of the ceiling"):
        table.add_column(name, justify="right")
    for result in results:
        rate = f"{result.tflop_s:,.1f} TFLOP/s"
        if result.is_memory_bound:
            rate = f"{result.gb_s:,.0f} GB/s"
        fraction = f"{100 * result.fraction:.1f} %"
        table.add_row(result.case.name, f"{result.us:,.1f}", rate, fraction)
    return table


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="octavo bench kernels",
        description="Time every kernel on this card, as a fraction of what the card can do.",
        epilog="All of it takes a few minutes and 20 GB of the card's memory.",
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="only cases with these words in their names, such as `w4a16 down`",
    )
    parser.add_argument("--record", metavar="FILE", help="append the JSON lines to FILE")
    return parser.parse_args(argv)
