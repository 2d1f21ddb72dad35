"""What a person sees of a benchmark's records: one in full, or a row of each.

No I/O. Entry points: `one_table`; `HEAD`, `row_of`.
"""

from collections.abc import Mapping
from typing import Any

from rich.table import Table


def one_table(record: Mapping[str, Any]) -> Table:
    """Everything of one measurement, a line each."""
    table = Table(title=f"{record['workload']} · {record['model']} · {record['path']}")
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_row("wall time", f"{record['wall_s']:.2f} s")
    table.add_row("tokens in / out", f"{record['in_tok']:,} / {record['out_tok']:,}")
    table.add_row("output", f"{record['out_tok_s']:,.1f} tokens/s")
    table.add_row("input", f"{record['in_tok_s']:,.1f} tokens/s")
    for label, key in (
        ("first token", "ttft_ms"),
        ("inter-token", "itl_ms"),
        ("step", "step_ms"),
        ("plan to launch", "plan_launch_ms"),
    ):
        values = record.get(key)
        if values:
            text = " / ".join(f"{value:.2f}" for value in values.values())
            table.add_row(f"{label} {' / '.join(values)}", f"{text} ms")
    if record.get("scheduler_ms") is not None:
        table.add_row("scheduler's CPU a step", f"{record['scheduler_ms']:.2f} ms")
    if "idle_fraction" in record:
        table.add_row("device idle between steps", _percent(record["idle_fraction"]))
    if "late_launch_fraction" in record:
        table.add_row("in steps still being launched", _percent(record["late_launch_fraction"]))
    if "worst_launch_ms" in record:
        table.add_row("longest launch of a step", f"{record['worst_launch_ms']:.2f} ms")
    for kind, cores in record.get("cores", {}).items():
        table.add_row(f"{kind}'s CPU", f"{cores:.2f} cores")
    table.add_row("of the card's limit", _percent(record["limit_fraction"]))
    return table


def _rate(record: Mapping[str, Any]) -> str:
    """Output tokens a second; input tokens where answers have one token."""
    is_prefill = record["out_tok_s"] * 100 < record["in_tok_s"]
    return f"{record['in_tok_s']:,.0f} in" if is_prefill else f"{record['out_tok_s']:,.1f}"


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.1f} %"


def _two(values: Mapping[str, float]) -> str:
    return f"{values['p50']:,.1f} / {values['p99']:,.1f}" if values else "-"


def _last(values: Mapping[str, float] | None) -> str:
    return f"{values['p99']:.2f}" if values else "-"


def _cores(cores: Mapping[str, float] | None) -> str:
    """What is at 1 and has one thread may be what was measured."""
    kinds = ("client", "router", "scheduler", "worker")
    return " ".join(f"{cores[kind]:.2f}" for kind in kinds if kind in cores) if cores else "-"


# Heading, width, and what stands there of a record.
_COLUMNS = (
    ("workload", -10, lambda r: r["workload"]),
    ("sampling", -9, lambda r: "sampled" if r["sampled"] else "greedy"),
    ("path", -7, lambda r: r["protocol"] or "bare"),
    ("tokens/s", 12, _rate),
    ("wall s", 8, lambda r: f"{r['wall_s']:.2f}"),
    ("stack/bare", 11, lambda r: f"{r['split_ratio']:.3f}" if "split_ratio" in r else "-"),
    ("limit", 7, lambda r: _percent(r["limit_fraction"])),
    ("TTFT p50/p99 ms", 20, lambda r: _two(r["ttft_ms"])),
    ("ITL p50/p99 ms", 16, lambda r: _two(r["itl_ms"])),
    ("step ms", 9, lambda r: f"{r['step_ms']['mean']:.2f}" if r.get("step_ms") else "-"),
    ("idle", 7, lambda r: _percent(r.get("idle_fraction"))),
    ("launch p99 ms", 14, lambda r: _last(r.get("plan_launch_ms"))),
    ("CPU cl ro sch wo", 21, lambda r: _cores(r.get("cores"))),
)
HEAD = "".join(
    f"{name:<{-width}}" if width < 0 else f"{name:>{width}}" for name, width, _ in _COLUMNS
)


def row_of(record: Mapping[str, Any]) -> str:
    """A measurement in a line, under `HEAD`."""
    return "".join(
        f"{text_of(record):<{-width}}" if width < 0 else f"{text_of(record):>{width}}"
        for _, width, text_of in _COLUMNS
    )
