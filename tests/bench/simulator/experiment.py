"""What the simulator is asked: which policy, how many routers and cells, which workload.

Must not know: command lines, tables. Entry points: `Size`, `run`, `simulate`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from octavo.settings import SchedulerSettings
from tests.bench.simulator.ceiling import pooled_lru_hits, reusable_tokens
from tests.bench.simulator.device import Cost
from tests.bench.simulator.fleet import Fleet, Outcome, Shape, Trouble
from tests.bench.simulator.policies import POLICIES
from tests.bench.simulator.workload import (
    CHAT_BLOCK_TOKENS,
    TRACE_BLOCK_TOKENS,
    Workload,
    chats,
    recorded,
    steady,
    together,
)

NUM_WORKERS = 8
# How many times as fast as they were recorded.
SPEEDS = {"conversation": 2.5, "synthetic": 1.5}
WORKLOADS = (*SPEEDS, "chats")
# Steps of a size that costs a short prompt little; 8 tokens drawn as one keep an hour in seconds.
COST = Cost(max_num_batched_tokens=512, stride=8)
# As much KV memory, in small blocks; a token is a token.
CHAT_COST = Cost(
    num_blocks=COST.num_blocks * TRACE_BLOCK_TOKENS // CHAT_BLOCK_TOKENS,
    max_num_batched_tokens=512,
)
# Nobody is refused: hits and times are compared over the same requests.
SETTINGS = SchedulerSettings(preset="throughput", max_queue_tokens=1 << 40, max_queue_wait_s=0)
OCTAVO_SHAPES = (
    Shape(num_routers=1, num_cells=1, workers_per_cell=8),
    Shape(num_routers=4, num_cells=1, workers_per_cell=8),
    Shape(num_routers=4, num_cells=2, workers_per_cell=4),
    Shape(num_routers=1, num_cells=4, workers_per_cell=2),
    Shape(num_routers=4, num_cells=4, workers_per_cell=2),
    Shape(num_routers=4, num_cells=8, workers_per_cell=1),
)
BASELINES = tuple(
    Shape(policy=name, num_routers=4, num_cells=8, workers_per_cell=1)
    for name in POLICIES
    if name != "octavo"
)


@dataclass(frozen=True, slots=True)
class Findings:
    """One run. Hits in tokens; `ceiling_tokens`: what one pooled cache could hit."""

    workload: str
    shape: Shape
    outcomes: list[Outcome]
    prompt_tokens: int
    hit_tokens: int
    ceiling_tokens: int
    computed_tokens: list[int]  # by worker
    wall_s: float

    @property
    def ttfts_s(self) -> list[float]:
        return [o.ttft_s for o in self.outcomes if o.ttft_s is not None]

    @property
    def ceiling_share(self) -> float:
        # Where nothing repeats (the first minutes of a trace), nothing was missed.
        return self.hit_tokens / self.ceiling_tokens if self.ceiling_tokens else 1.0

    @property
    def imbalance(self) -> float:
        """Prompt tokens that the busiest worker computed, over the mean."""
        return max(self.computed_tokens) * len(self.computed_tokens) / sum(self.computed_tokens)

    def ttft_s(self, percent: float) -> float:
        return float(np.percentile(self.ttfts_s, percent))

    @property
    def mean_ttft_s(self) -> float:
        return float(np.mean(self.ttfts_s))

    def summary(self) -> dict[str, Any]:
        """The run, as the record keeps it."""
        return {
            "workload": self.workload,
            "policy": self.shape.policy,
            "routers": self.shape.num_routers,
            "cells": self.shape.num_cells,
            "workers_per_cell": self.shape.workers_per_cell,
            "requests": len(self.outcomes),
            "hit_share": round(self.hit_tokens / self.prompt_tokens, 4),
            "ceiling_share": round(self.ceiling_share, 4),
            "ttft_mean_s": round(self.mean_ttft_s, 3),
            "ttft_p50_s": round(self.ttft_s(50), 3),
            "ttft_p99_s": round(self.ttft_s(99), 3),
            "imbalance": round(self.imbalance, 3),
            "preemptions": sum(outcome.num_preemptions for outcome in self.outcomes),
            "wall_s": round(self.wall_s, 1),
        }


def workload_of(name: str, *, share: float = 1.0, seed: int = 0) -> tuple[Workload, Cost, int]:
    """A workload by name, the workers it is run on, and the tokens that could be hit at best."""
    if name == "chats":
        workload = chats(num_chats=max(1, round(240 * share)), seed=seed)
        return workload, CHAT_COST, reusable_tokens(workload)
    workload = recorded(name, speed=SPEEDS[name], share=share, seed=seed)
    return workload, COST, pooled_lru_hits(workload, NUM_WORKERS * COST.num_blocks)


def simulate(
    workload: Workload,
    shape: Shape,
    cost: Cost,
    ceiling_tokens: int,
    *,
    settings: SchedulerSettings = SETTINGS,
    troubles: Sequence[Trouble] = (),
) -> Findings:
    """One run to the end of its last request."""
    started = time.perf_counter()
    fleet = Fleet(workload, shape, cost, settings)
    outcomes = fleet.run(troubles)
    devices = [device for cell in fleet.cells.values() for device in cell.devices]
    return Findings(
        workload.name,
        shape,
        outcomes,
        sum(request.num_prompt_tokens for request in workload.requests),
        sum(outcome.num_cached_tokens for outcome in outcomes),
        ceiling_tokens,
        [device.num_prefill_tokens for device in devices],
        time.perf_counter() - started,
    )


def run(
    names: Sequence[str],
    shapes: Sequence[Shape],
    *,
    share: float,
    seed: int,
    on_run: Callable[[Findings], None],
) -> list[Findings]:
    """Every workload with every shape; `on_run` hears of each."""
    findings: list[Findings] = []
    for name in names:
        workload, cost, ceiling = workload_of(name, share=share, seed=seed)
        for shape in shapes:
            findings.append(simulate(workload, shape, cost, ceiling))
            on_run(findings[-1])
    return findings


def flood(factor: float, *, duration_s: float = 120.0, num_workers: int = 2) -> dict[str, Any]:
    """Two tenants at half the capacity each; one sends `factor` times as much.

    Capacity is prefill's. What each tenant got: times to first token, and what was refused.
    """
    cost = replace(COST, stride=4)
    num_prompt, num_output = 3000, 100
    prompt_s = cost.prompt_s + num_prompt / cost.prefill_tokens_per_s
    half_per_s = num_workers / prompt_s / 2
    sizes = {
        "duration_s": duration_s,
        "num_prompt_tokens": num_prompt,
        "num_output_tokens": num_output,
    }
    workload = together(
        f"flood x {factor:g}",
        steady("calm", per_s=half_per_s, seed=1, **sizes),
        steady("loud", per_s=half_per_s * factor, seed=2, **sizes),
    )
    settings = replace(SETTINGS, max_queue_tokens=1 << 20, max_queue_wait_s=10.0)
    shape = Shape(num_cells=1, workers_per_cell=num_workers)
    outcomes = Fleet(workload, shape, cost, settings).run()
    return {
        tenant: _told([o for o in outcomes if o.tenant == tenant]) for tenant in ("calm", "loud")
    }


def _told(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    ttfts_s = [o.ttft_s for o in outcomes if o.ttft_s is not None]
    return {
        "requests": len(outcomes),
        "answered": len(ttfts_s),
        "refused": sum(o.retry_after_ms is not None and o.ttft_s is None for o in outcomes),
        "ttft_p50_s": round(float(np.percentile(ttfts_s, 50)), 3),
        "ttft_p99_s": round(float(np.percentile(ttfts_s, 99)), 3),
        "ttft_max_s": round(max(ttfts_s), 3),
    }
