"""What a stack's services say and use during a run: histograms of `/metrics`, CPU by process.

Read before and after, so that it costs a run nothing. Must not know: what is measured meanwhile.
Entry points: `read_services`, `Readings`.
"""

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from octavo.cli.child import Child
from octavo.cli.stack import Stack
from octavo.cli.step_report import OF_SCHEDULERS, OF_WORKERS, Histogram, StepReport

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Readings:
    """Histograms of all workers, and schedulers, together; each process's CPU seconds by kind."""

    time_s: float
    histograms: Mapping[str, Histogram]
    cpu_s: Mapping[str, tuple[float, ...]]

    def steps_since(self, before: "Readings") -> StepReport:
        """What the steps were since then."""
        return StepReport.of_histograms(
            {name: now.since(before.histograms[name]) for name, now in self.histograms.items()}
        )

    def cores_since(self, before: "Readings") -> dict[str, float]:
        """CPU seconds per second of the busiest process of each kind."""
        elapsed_s = self.time_s - before.time_s
        return {
            kind: round(max(map(float.__sub__, now, before.cpu_s[kind])) / elapsed_s, 3)
            for kind, now in self.cpu_s.items()
        }


async def read_services(stack: Stack) -> Readings:
    """All of them, now. Raises httpx.HTTPError if one doesn't answer."""
    async with httpx.AsyncClient(trust_env=False, timeout=_TIMEOUT_S) as client:
        histograms = {
            **await _histograms(client, stack.workers, OF_WORKERS),
            **await _histograms(client, stack.schedulers, OF_SCHEDULERS),
        }
    kinds = {"router": stack.routers, "scheduler": stack.schedulers, "worker": stack.workers}
    cpu_s = {kind: tuple(map(_cpu_s, children)) for kind, children in kinds.items()}
    return Readings(time.perf_counter(), histograms, cpu_s)


async def _histograms(
    client: httpx.AsyncClient, children: Sequence[Child], names: Sequence[str]
) -> dict[str, Histogram]:
    """The histograms `names` of all children together."""
    texts = await asyncio.gather(*(_metrics(client, child) for child in children))
    first, *others = [read_histograms(text, names) for text in texts]
    return {name: first[name].with_others([other[name] for other in others]) for name in names}


def read_histograms(text: str, names: Sequence[str]) -> dict[str, Histogram]:
    """The histograms `names`, without labels, of a `/metrics` page."""
    found: dict[str, Histogram] = {}
    for family in text_string_to_metric_families(text):
        if family.name not in names:
            continue
        bounds: list[float] = []
        counts: list[float] = []
        total = below = 0.0
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                bounds.append(float(sample.labels["le"]))
                counts.append(sample.value - below)
                below = sample.value
            elif sample.name.endswith("_sum"):
                total = sample.value
        found[family.name] = Histogram(tuple(bounds), tuple(counts), total)
    return found


async def _metrics(client: httpx.AsyncClient, child: Child) -> str:
    ports = child.ports
    assert ports is not None, "read of services that are ready"
    answer = await client.get(f"http://127.0.0.1:{ports['metrics_port']}/metrics")
    answer.raise_for_status()
    return answer.text


def _cpu_s(child: Child) -> float:
    """User and system CPU seconds of a child so far; 0 where the system doesn't say."""
    try:
        line = Path(f"/proc/{child.pid}/stat").read_text()
    except OSError:
        return 0.0
    fields = line.rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
