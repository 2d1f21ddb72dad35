"""What workers say of a run's steps: how long they took, and for how long the device idled.

Of the bare loop each step is known, of services only their histograms before and after a run,
with percentiles as Prometheus's histogram_quantile makes them: between a bucket's bounds a value
is assumed to be anywhere alike, so whether a percentile is below a bound is exact. Must not know:
where histograms come from. Entry points: `StepReport`, `Histogram`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from octavo.cli.percentiles import percentiles

STEP_SECONDS = "octavo_step_seconds"
GAP_SECONDS = "octavo_step_gap_seconds"
LAUNCH_SECONDS = "octavo_plan_launch_seconds"
STEP_LAUNCH_SECONDS = "octavo_step_launch_seconds"
# What workers count, and what schedulers do.
OF_WORKERS = (STEP_SECONDS, GAP_SECONDS, LAUNCH_SECONDS, STEP_LAUNCH_SECONDS)
OF_SCHEDULERS = ("octavo_plan_seconds", "octavo_result_seconds")


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of values up to each bound, and above the one before; the last bound is infinite."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float

    @property
    def num_values(self) -> float:
        return sum(self.counts)

    def since(self, before: "Histogram") -> "Histogram":
        """What was added after `before`."""
        counts = tuple(now - then for now, then in zip(self.counts, before.counts, strict=True))
        return Histogram(self.bounds, counts, self.total - before.total)

    def with_others(self, others: Sequence["Histogram"]) -> "Histogram":
        """The values of several, together; all have the same bounds."""
        columns = zip(self.counts, *(other.counts for other in others), strict=True)
        total = self.total + sum(other.total for other in others)
        return Histogram(self.bounds, tuple(map(sum, columns)), total)

    def quantile(self, share: float) -> float:
        """The value that `share` of all don't exceed; the last finite bound for what is above."""
        rank, below, low = share * self.num_values, 0.0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if bound == float("inf"):
                break
            if count and below + count >= rank:
                return low + (bound - low) * (rank - below) / count
            below, low = below + count, bound
        return low


@dataclass(frozen=True, slots=True)
class StepReport:
    """`step_ms` has the mean, and percentiles where each step is known. `idle_fraction`: of the
    time from step to step while rows were live, the part in which the device idled.
    `plan_launch_ms`: percentiles of the time from when a plan could be launched to its launch;
    empty without a scheduler. `worst_launch_ms`: the longest that the host took to launch a step;
    of histograms a bound above it. `scheduler_ms`: the schedulers' CPU time a step."""

    num_steps: int
    step_ms: dict[str, float]
    idle_fraction: float
    plan_launch_ms: dict[str, float] = field(default_factory=dict[str, float])
    worst_launch_ms: float = 0.0
    scheduler_ms: float | None = None

    @classmethod
    def of_steps(
        cls, steps_us: Sequence[int], gaps_us: Sequence[int], launches_us: Sequence[int]
    ) -> Self:
        """Of each step's time, of the gap before it, and of the host's time to launch it."""
        mean_ms = {"mean": round(sum(steps_us) / len(steps_us) / 1e3, 4)} if steps_us else {}
        steps_ms = percentiles([step_us / 1e3 for step_us in steps_us])
        share = _share(sum(gaps_us), sum(steps_us))
        worst_ms = max(launches_us, default=0) / 1e3
        return cls(len(steps_us), mean_ms | steps_ms, share, worst_launch_ms=worst_ms)

    @classmethod
    def of_histograms(cls, histograms: Mapping[str, Histogram]) -> Self:
        """Of what `/metrics` counted during the run."""
        steps, gaps = histograms[STEP_SECONDS], histograms[GAP_SECONDS]
        launches, num_steps = histograms[LAUNCH_SECONDS], round(steps.num_values)
        if num_steps == 0:
            return cls(0, {}, 0.0)
        quantiles = (50, 90, 99) if launches.num_values else ()
        scheduler_s = sum(histograms[name].total for name in OF_SCHEDULERS)
        return cls(
            num_steps,
            {"mean": round(1e3 * steps.total / num_steps, 4)},
            _share(gaps.total, steps.total),
            {f"p{p}": round(1e3 * launches.quantile(p / 100), 3) for p in quantiles},
            round(1e3 * histograms[STEP_LAUNCH_SECONDS].quantile(1.0), 3),
            round(1e3 * scheduler_s / num_steps, 4),
        )

    def to_record(self) -> dict[str, Any]:
        return {
            "num_steps": self.num_steps,
            "step_ms": self.step_ms,
            "idle_fraction": self.idle_fraction,
            "plan_launch_ms": self.plan_launch_ms,
            "worst_launch_ms": self.worst_launch_ms,
            "scheduler_ms": self.scheduler_ms,
        }


def _share(part: float, rest: float) -> float:
    return round(part / (part + rest), 4) if part + rest else 0.0
