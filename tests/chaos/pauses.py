"""How long streams paused, by what had happened. Entry point: `Pauses`."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Pauses:
    """Seconds, one for each stream; 0.0 = none to speak of."""

    by_name: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, pauses_s: Sequence[float]) -> None:
        self.by_name.setdefault(name, []).extend(pauses_s)

    def update(self, other: "Pauses") -> None:
        for name, pauses_s in other.by_name.items():
            self.add(name, pauses_s)

    def summary(self) -> dict[str, dict[str, float]]:
        """p50, p99 and max of each, rounded to 10 ms."""
        return {name: _summary(sorted(pauses_s)) for name, pauses_s in self.by_name.items()}

    def __str__(self) -> str:
        return "\n".join(
            f"{name:45} p50 {row['p50_s']:5.2f}  p99 {row['p99_s']:5.2f}  max {row['max_s']:5.2f} s"
            for name, row in self.summary().items()
        )


def _summary(ordered: Sequence[float]) -> dict[str, float]:
    last = len(ordered) - 1
    marks = {"p50_s": 0.5 * last, "p99_s": 0.99 * last, "max_s": last}
    return {name: round(ordered[round(at)], 2) for name, at in marks.items()}
