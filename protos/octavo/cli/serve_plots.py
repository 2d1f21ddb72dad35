"""PNGs of a comparison: latency distributions, and the run over time. Needs matplotlib.

Must not know: how requests were sent. Entry points: `check_matplotlib`, `write_plots`.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.cli.serve_client import Outcome
from octavo.cli.serve_report import Slo
from octavo.cli.serve_run import LoadResult
from octavo.errors import ConfigurationError

_DPI = 130
_NUM_SLICES = 40
_WIDE = 30


def check_matplotlib() -> None:
    """Before an hour of measuring. Raises ConfigurationError."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError("--plot needs matplotlib: pip install 'octavo[plot]'")


def write_plots(folder: Path, results: Mapping[str, LoadResult], slo: Slo) -> list[Path]:
    """`latency.png` and `timeline.png` in `folder`, which is made; a line per server (label)."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        _write_latency(folder / "latency.png", results, slo),
        _write_timeline(folder / "timeline.png", results),
    ]


def _figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Sequence[Any]]:
    # Not pyplot: no global state, no display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns).flat


def _write_latency(path: Path, results: Mapping[str, LoadResult], slo: Slo) -> Path:
    """Cumulative distributions: how much of what took how long at most."""
    figure, axes = _figure(2, 2, (10, 7))
    panels = (
        ("time to first token", _ttft_ms, slo.ttft_ms),
        ("time per output token", _tpot_ms, slo.tpot_ms),
        ("between frames of a stream", _itl_ms, None),
        ("whole answer", _e2e_ms, slo.e2e_ms),
    )
    for axis, (title, values_of, limit_ms) in zip(axes, panels, strict=True):
        for label, result in results.items():
            values = sorted(values_of(_whole(result)))
            shares = [rank / max(1, len(values)) for rank in range(len(values) + 1)]
            # Where nothing was measured the legend still names the server.
            axis.step([*(values[:1] or [0.0]), *values], shares, where="post", label=label)
        if limit_ms is not None:
            axis.axvline(limit_ms, color="0.4", linestyle="--", label=f"SLO {limit_ms:g} ms")
        axis.set(title=title, xlabel="ms", ylabel="share at most", ylim=(0, 1.02))
        _scale(axis)
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=_DPI)
    return path


def _scale(axis: Any) -> None:
    """From 0 where values are near one another; logarithmic where a tail would hide the rest."""
    low, high = axis.dataLim.intervalx
    if low > 0 and high > _WIDE * low:
        axis.set_xscale("log")
    else:
        axis.set_xlim(left=0)


def _write_timeline(path: Path, results: Mapping[str, LoadResult]) -> Path:
    figure, axes = _figure(2, 1, (10, 6))
    in_flight, pace = axes
    for label, result in results.items():
        times, counts = _in_flight(result)
        in_flight.step(times, counts, where="post", label=label)
        pace.step(*_pace(result), where="mid", label=label)
    in_flight.set(title="requests in flight", ylabel="requests")
    pace.set(title="output", xlabel="seconds since the start", ylabel="tokens/s")
    for axis in (in_flight, pace):
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(loc="upper right", fontsize="small")
    figure.savefig(path, dpi=_DPI)
    return path


def _whole(result: LoadResult) -> list[Outcome]:
    return [outcome for outcome in result.outcomes if outcome.error is None]


def _ttft_ms(outcomes: Sequence[Outcome]) -> list[float]:
    return [1e3 * outcome.ttft_s for outcome in outcomes]


def _tpot_ms(outcomes: Sequence[Outcome]) -> list[float]:
    return [1e3 * tpot for outcome in outcomes if (tpot := outcome.tpot_s) is not None]


def _itl_ms(outcomes: Sequence[Outcome]) -> list[float]:
    return [1e3 * gap for outcome in outcomes for gap in outcome.timing.gaps_s]


def _e2e_ms(outcomes: Sequence[Outcome]) -> list[float]:
    return [1e3 * outcome.e2e_s for outcome in outcomes]


def _in_flight(result: LoadResult) -> tuple[list[float], list[int]]:
    """Times (s) and the count from each on."""
    changes = [(outcome.timing.submitted_s, 1) for outcome in _whole(result)]
    changes += [(outcome.timing.last_s, -1) for outcome in _whole(result)]
    times, counts, count = [0.0], [0], 0
    for time_s, change in sorted(changes):
        count += change
        times.append(time_s - result.started_s)
        counts.append(count)
    return times, counts


def _pace(result: LoadResult) -> tuple[list[float], list[float]]:
    """Output tokens/s in equal slices of the run; a request's tokens are shared by its frames."""
    slice_s = result.elapsed_s / _NUM_SLICES
    tokens = [0.0] * _NUM_SLICES
    for outcome in _whole(result):
        timing = outcome.timing
        share = timing.num_output_tokens / (len(timing.gaps_s) + 1)
        at_s = timing.first_s
        for gap_s in (0.0, *timing.gaps_s):
            at_s += gap_s
            tokens[min(int((at_s - result.started_s) / slice_s), _NUM_SLICES - 1)] += share
    middles = [(number + 0.5) * slice_s for number in range(_NUM_SLICES)]
    return middles, [count / slice_s for count in tokens]
