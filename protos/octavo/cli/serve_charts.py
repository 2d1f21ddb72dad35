"""Distributions drawn in the terminal: a histogram with its cumulative share beside it.

No I/O. Entry point: `histogram`.
"""

import math
from collections.abc import Sequence

_EIGHTHS = " ▏▎▍▌▋▊▉"
_NUM_BINS = 12
_WIDTH = 32


def histogram(title: str, values: Sequence[float], unit: str = "ms") -> str:
    """Lines of `low … high │bar│ count cumulative %`; bins are equal on a logarithmic scale, as
    latencies are. Values must not be negative; those of 0 count into the first bin."""
    if not values:
        return f"{title}: nothing measured"
    edges = _edges(min(values), max(values))
    counts = _counts(values, edges)
    tallest = max(counts)
    lines = [f"{title} ({len(values):,})"]
    num_so_far = 0
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        num_so_far += count
        share = 100 * num_so_far / len(values)
        label = f"{_short(low):>7} … {_short(high):>7} {unit}"
        lines.append(f"{label} │{_bar(count / tallest):<{_WIDTH}}│ {count:>6,} {share:5.1f} %")
    return "\n".join(lines)


def _edges(low: float, high: float) -> list[float]:
    low = max(low, 1e-3)
    if high <= low:
        return [low, high if high > low else low]
    step = math.log(high / low) / _NUM_BINS
    return [low * math.exp(step * number) for number in range(_NUM_BINS)] + [high]


def _counts(values: Sequence[float], edges: Sequence[float]) -> list[int]:
    counts = [0] * (len(edges) - 1)
    span = math.log(edges[-1] / edges[0])
    for value in values:
        place = math.log(max(value, edges[0]) / edges[0]) / span if span else 0.0
        counts[min(int(place * len(counts)), len(counts) - 1)] += 1
    return counts


def _bar(fraction: float) -> str:
    eighths = round(fraction * _WIDTH * 8)
    # What occurred is seen, however rare.
    eighths = max(eighths, 1) if fraction else 0
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (_EIGHTHS[rest] if rest else "")


def _short(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
