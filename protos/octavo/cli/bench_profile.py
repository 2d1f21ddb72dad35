"""A benchmark's Chrome trace: the worker's lanes, what they say, and the clients beside them.

Must not know: how the worker collected them. Entry points: `report`, `add_clients`.
"""

from pathlib import Path
from typing import Any

from octavo.chrome_trace import Lane, Span, read_events, write_trace
from octavo.cli.measurement import Run
from octavo.cli.percentiles import percentiles

# More lanes than a screen holds help nobody.
_MAX_CLIENTS = 8
# A gap longer than this is no pause between two steps: nothing was there to compute.
_LONGEST_GAP_US = 50_000.0


def report(path: Path) -> dict[str, Any]:
    """Step times and the device's idle share, from the worker's trace at `path`.

    `idle_fraction` is the time between a step's end and the next one's begin over the time from
    the first begin to the last end; gaps over 50 ms count as neither. A step begins on the device
    when it has come to it, also if the host is not done launching it: `late_launch_fraction` is
    how long, of the same time, it was in steps that were still being launched. Of a step that is
    launched as one graph that is idle time too; of others it is more than that.
    """
    events = read_events(path)
    steps = sorted(_spans(events, "device"), key=lambda span: span[0])
    idle_us = busy_us = 0.0
    end_us = steps[0][0] if steps else 0.0
    for begin_us, done_us in steps:
        gap_us = max(0.0, begin_us - end_us)
        idle_us += gap_us if gap_us <= _LONGEST_GAP_US else 0.0
        busy_us += done_us - begin_us
        end_us = max(end_us, done_us)
    total_us = idle_us + busy_us
    # Lanes hold the same steps in the same order.
    pairs = zip(_spans(events, "launch"), _spans(events, "device"), strict=False)
    late_us = sum(max(0.0, min(left, done) - begin) for (_, left), (begin, done) in pairs)
    return {
        "num_steps": len(steps),
        "step_ms": percentiles([(done - begin) / 1e3 for begin, done in steps]),
        "idle_fraction": round(idle_us / total_us, 4) if total_us else 0.0,
        "late_launch_fraction": round(late_us / total_us, 4) if total_us else 0.0,
    }


def _spans(events: list[dict[str, Any]], lane: str) -> list[tuple[float, float]]:
    """Begins and ends in µs of the spans in the lanes that are called so."""
    lanes = {
        (event["pid"], event["tid"])
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name" and event["args"]["name"] == lane
    }
    return [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["ph"] == "X" and (event["pid"], event["tid"]) in lanes
    ]


def add_clients(path: Path, run: Run) -> None:
    """Add the frames of the first requests, as their client saw them, to the trace at `path`."""
    lanes: list[Lane] = []
    for number, timing in enumerate(run.timings[:_MAX_CLIENTS]):
        begin_ns, spans = int(1e9 * timing.submitted_s), list[Span]()
        arrivals_s = [timing.first_s]
        for gap_s in timing.gaps_s:
            arrivals_s.append(arrivals_s[-1] + gap_s)
        for index, arrival_s in enumerate(arrivals_s):
            end_ns = int(1e9 * arrival_s)
            spans.append(Span(f"frame {index}", begin_ns, end_ns))
            begin_ns = end_ns
        lanes.append(Lane(f"request {number}", tuple(spans)))
    write_trace(path, "client", lanes, more=read_events(path))
