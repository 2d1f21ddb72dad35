"""Percentiles by nearest rank: values that occurred. Entry point: `percentiles`."""

from collections.abc import Sequence

_PERCENTILES = (50, 90, 99)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90, p99 by nearest rank; empty if there is none."""
    if not values:
        return {}
    ordered = sorted(values)
    ranks = {p: max(0, -(-p * len(ordered) // 100) - 1) for p in _PERCENTILES}
    return {f"p{p}": round(ordered[rank], 3) for p, rank in ranks.items()}
