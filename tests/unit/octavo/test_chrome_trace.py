"""Chrome traces, and what a benchmark reads in them."""

from pathlib import Path

from octavo.chrome_trace import Lane, Span, read_events, write_trace
from octavo.cli.bench_profile import add_clients, report
from octavo.cli.measurement import RequestTiming, Run

MS = 1_000_000


def test_events_come_back_and_processes_stand_side_by_side(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, "worker", [Lane("device", (Span("step", 1500, 4000), Span("odd", 9, 8)))])
    write_trace(path, "client", [Lane("request 0", ())], more=read_events(path))
    events = read_events(path)
    names = [(e["pid"], e["tid"], e["args"]["name"]) for e in events if e["ph"] == "M"]
    assert names == [(1, 0, "worker"), (1, 0, "device"), (2, 0, "client"), (2, 0, "request 0")]
    spans = [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert spans == [("step", 1.5, 2.5), ("odd", 0.009, 0.0)]


def test_a_report_counts_gaps_between_steps(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    # Two steps of 9 ms with 1 ms between them; after a pause for want of work one of 2 ms.
    steps = (
        Span("a", 0, 9 * MS),
        Span("b", 10 * MS, 19 * MS),
        Span("c", 119 * MS, 121 * MS),
    )
    # The first was launched before; the second 1 ms after its begin; the third not until its end.
    launches = (
        Span("a", -2 * MS, -1 * MS),
        Span("b", 5 * MS, 11 * MS),
        Span("c", 119 * MS, 123 * MS),
    )
    write_trace(path, "worker", [Lane("launch", launches), Lane("device", steps)])
    assert report(path) == {
        "num_steps": 3,
        "step_ms": {"p50": 9.0, "p90": 9.0, "p99": 9.0},
        "idle_fraction": round(1 / 21, 4),
        "late_launch_fraction": round((1 + 2) / 21, 4),
    }
    write_trace(path, "worker", [Lane("device", ())])
    assert report(path) == {
        "num_steps": 0,
        "step_ms": {},
        "idle_fraction": 0.0,
        "late_launch_fraction": 0.0,
    }


def test_clients_are_shown_frame_by_frame(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, "worker", [Lane("device", ())])
    timing = RequestTiming(4, submitted_s=1.0)
    for now_s in (1.5, 1.75, 2.0):
        timing.frame(now_s)
    add_clients(path, Run((timing,) * 9))
    spans = [e for e in read_events(path) if e["ph"] == "X"]
    assert {e["tid"] for e in spans} == set(range(8))
    first = [(e["name"], e["ts"], e["dur"]) for e in spans if e["tid"] == 0]
    assert first == [
        ("frame 0", 1e6, 5e5),
        ("frame 1", 1.5e6, 2.5e5),
        ("frame 2", 1.75e6, 2.5e5),
    ]
