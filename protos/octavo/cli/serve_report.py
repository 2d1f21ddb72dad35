"""What a load came to: a record per server, and a table that compares them.

Must not know: how requests were sent. Entry points: `make_serve_record`, `comparison`,
`warnings`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from octavo.cli.measurement import Run, make_record
from octavo.cli.percentiles import percentiles
from octavo.cli.serve_client import Outcome
from octavo.cli.serve_run import LoadResult

_BUSY_CPU = 0.8
_LATE_MS = 20.0
_CACHED_SHARE = 0.05


class Slo(NamedTuple):
    """What a request must keep to count as good, in milliseconds; None = no such limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def is_kept(self, outcome: Outcome) -> bool:
        """Failed requests are never good. An answer of one token has no pace to miss."""
        if outcome.error is not None:
            return False
        measured = (outcome.ttft_s, outcome.tpot_s, outcome.e2e_s)
        return all(
            limit_ms is None or value_s is None or 1e3 * value_s <= limit_ms
            for limit_ms, value_s in zip(self, measured, strict=True)
        )


def make_serve_record(result: LoadResult, facts: dict[str, Any], slo: Slo) -> dict[str, Any]:
    """One server's JSON line. Latencies are those of the answers that came whole."""
    whole = [item for item in result.outcomes if item.error is None]
    timings = tuple(item.timing for item in whole)
    # Without any answer there is still a line: it says how all failed.
    record = make_record(Run(timings), facts, None) if whole else facts
    wall_s = record.get("wall_s") or result.elapsed_s
    num_good = sum(map(slo.is_kept, result.outcomes))
    return {
        **record,
        "elapsed_s": round(result.elapsed_s, 4),
        "num_requests": len(result.outcomes),
        "num_ok": len(whole),
        "req_s": round(len(whole) / wall_s, 4),
        "tpot_ms": percentiles([1e3 * t for item in whole if (t := item.tpot_s) is not None]),
        "e2e_ms": percentiles([1e3 * item.e2e_s for item in whole]),
        "slo": {name: value for name, value in slo._asdict().items() if value is not None},
        "good_fraction": round(num_good / max(1, len(result.outcomes)), 4),
        "goodput_req_s": round(num_good / wall_s, 4),
        "errors": dict(Counter(i.error for i in result.outcomes if i.error).most_common()),
        "max_in_flight": result.max_in_flight,
        "send_lag_ms": percentiles([1e3 * item.lag_s for item in result.outcomes]),
        "client_cpu": result.client_cpu,
    }


def warnings(record: dict[str, Any], result: LoadResult) -> list[str]:
    """Why the numbers may not be the server's."""
    found: list[str] = []
    if record["client_cpu"] > _BUSY_CPU:
        found.append(
            f"this client used {100 * record['client_cpu']:.0f} % of a CPU: it may be the limit; "
            "lower the rate, or run several clients"
        )
    lag_ms = record["send_lag_ms"].get("p99", 0.0)
    if lag_ms > _LATE_MS:
        found.append(f"1 % of the requests were sent {lag_ms:.0f} ms late or more (it is counted)")
    num_prompt = record.get("in_tok", 0)
    num_cached = record.get("cached_tok", 0)
    if num_prompt and num_cached > _CACHED_SHARE * num_prompt:
        found.append(f"{num_cached:,} of {num_prompt:,} prompt tokens came from a prefix cache")
    details = {item.error: item.detail for item in result.outcomes if item.error}
    found += [f"{kind}: {' '.join(text.split())[:300]}" for kind, text in details.items() if text]
    return found


class _Row(NamedTuple):
    """A measure: its name, how to find it, how to show it, and whether less is better."""

    name: str
    value: Callable[[dict[str, Any]], float | None]
    shape: str
    is_less_better: bool | None = None


def _latencies(name: str, key: str) -> list[_Row]:
    return [
        _Row(
            f"{name} {p}" if p == "p50" else f"{'':{len(name)}} {p}",
            lambda record, p=p: record[key].get(p) if key in record else None,
            "{:,.1f} ms",
            True,
        )
        for p in ("p50", "p90", "p99")
    ]


_ROWS = (
    _Row("requests", lambda r: r["num_requests"], "{:,.0f}"),
    _Row("failed", lambda r: r["num_requests"] - r["num_ok"], "{:,.0f}", True),
    _Row("duration", lambda r: r.get("wall_s", r["elapsed_s"]), "{:,.2f} s"),
    _Row("prompt tokens", lambda r: r.get("in_tok"), "{:,.0f}"),
    _Row("output tokens", lambda r: r.get("out_tok"), "{:,.0f}"),
    _Row("most in flight", lambda r: r["max_in_flight"], "{:,.0f}"),
    _Row("requests/s", lambda r: r["req_s"], "{:,.2f}", False),
    _Row("output tokens/s", lambda r: r.get("out_tok_s"), "{:,.1f}", False),
    _Row("prompt tokens/s", lambda r: r.get("in_tok_s"), "{:,.1f}", False),
    *_latencies("first token (TTFT)", "ttft_ms"),
    *_latencies("per token (TPOT)", "tpot_ms"),
    *_latencies("between frames (ITL)", "itl_ms"),
    *_latencies("whole answer", "e2e_ms"),
)
_GOODPUT_ROWS = (
    _Row("kept the SLOs", lambda r: 100 * r["good_fraction"], "{:.1f} %", False),
    _Row("goodput", lambda r: r["goodput_req_s"], "{:,.2f} requests/s", False),
)
_SECTION_ENDS = ("most in flight", "prompt tokens/s")


def comparison(title: str, records: Sequence[dict[str, Any]]) -> Table:
    """A column per server; from the second on, one more with its ratio to the first."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for position, record in enumerate(records):
        table.add_column(record["label"], justify="right", overflow="fold")
        if position:
            table.add_column("ratio", justify="right")
    for row in (*_ROWS, *(_GOODPUT_ROWS if records[0]["slo"] else ())):
        values = [row.value(record) for record in records]
        cells = ["-" if values[0] is None else row.shape.format(values[0])]
        for value in values[1:]:
            cells += ["-" if value is None else row.shape.format(value)]
            cells += [_ratio(row, values[0], value)]
        table.add_row(row.name, *cells, end_section=row.name in _SECTION_ENDS or " p99" in row.name)
    return table


def _ratio(row: _Row, first: float | None, value: float | None) -> str:
    """How many times the first's value; green if better, red if worse by more than noise."""
    if row.is_less_better is None or not first or value is None:
        return ""
    ratio = value / first
    text = f"{ratio:.2f}×"
    if 0.95 < ratio < 1.05:
        return text
    colour = "green" if (ratio < 1) == row.is_less_better else "red"
    return f"[{colour}]{text}[/]"
