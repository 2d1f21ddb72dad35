"""Chrome's trace event format: processes with lanes of spans, for chrome://tracing and Perfetto.

Format: the "Trace Event Format" document of the Chromium project; here complete events ("X")
and names of processes and threads ("M"). Times are perf_counter's, which on Linux all
processes of a machine share. Must not know: what is traced. Entry points: `write_trace`,
`read_events`.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple


class Span(NamedTuple):
    """Something with a begin and an end, in ns of one clock."""

    name: str
    begin_ns: int
    end_ns: int


class Lane(NamedTuple):
    """A row of the picture: spans one after the other, or overlapping."""

    name: str
    spans: tuple[Span, ...]


def write_trace(
    path: Path, process: str, lanes: Iterable[Lane], more: Iterable[dict[str, Any]] = ()
) -> None:
    """Write one process's lanes, and `more` events of others (`read_events`), as JSON."""
    others = list(more)
    process_id = 1 + max((event["pid"] for event in others), default=0)
    events = [*others, _name_of("process", process_id, 0, process)]
    for number, lane in enumerate(lanes):
        events.append(_name_of("thread", process_id, number, lane.name))
        events += (
            {
                "ph": "X",
                "name": span.name,
                "pid": process_id,
                "tid": number,
                "ts": span.begin_ns / 1000,
                "dur": max(0, span.end_ns - span.begin_ns) / 1000,
            }
            for span in lane.spans
        )
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a trace that `write_trace` wrote."""
    return json.loads(path.read_text())["traceEvents"]


def _name_of(what: str, process_id: int, number: int, name: str) -> dict[str, Any]:
    return {
        "ph": "M",
        "name": f"{what}_name",
        "pid": process_id,
        "tid": number,
        "args": {"name": name},
    }
