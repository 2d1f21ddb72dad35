"""What each idea is worth: all twins on one worker, and the ratios between them.

Every twin gets the same model, the same KV memory and the same requests. Must not know: command
lines, tables. Entry points: `Size`, `run`, `summary`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.cli.workloads import BenchRequest
from octavo.settings import SchedulerSettings, WorkerSettings
from tests.bench.ablation.dialogues import Dialogue, mixed_dialogues, shared_dialogues
from tests.bench.ablation.race import BenchWorker, Result, load_worker, race
from tests.bench.ablation.twins import CACHED, CLASSIC, CONTIGUOUS, PAGED, Twin

# The longest request of both workloads at full size, in tokens.
_LONGEST = 2048
_WARM_UP = [Dialogue((BenchRequest(tuple(range(10, 42)), 8),))]
OnResult = Callable[[str, Result], None]


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run: lengths times `scale`; KV memory for `num_reserved` longest requests.

    Of `num_rounds` runs of each twin the fastest counts.
    """

    num_requests: int
    num_dialogues: int
    scale: float
    num_reserved: int
    num_rounds: int


def worker_settings(size: Size, settings: WorkerSettings) -> WorkerSettings:
    """The worker's settings with a cache of the experiment's size, unless one was asked for."""
    block_size = settings.block_size
    num_blocks = -(-max(block_size, round(_LONGEST * size.scale)) // block_size)
    max_model_len = settings.max_model_len or num_blocks * block_size
    num_kv_blocks = settings.num_kv_blocks
    if not (num_kv_blocks or settings.kv_cache_memory):
        num_kv_blocks = 1 + size.num_reserved * (-(-max_model_len // block_size))
    return replace(settings, max_model_len=max_model_len, num_kv_blocks=num_kv_blocks)


def run(
    size: Size, worker: WorkerSettings, scheduler: SchedulerSettings, on_result: OnResult
) -> dict[str, Any]:
    """Run everything; `on_result` hears of each run. The record's part of the experiment.

    Raises ConfigurationError if the model can't be loaded.
    """
    settings = worker_settings(size, worker)
    loaded = load_worker(settings)
    vocab_size = loaded.model.vocab_size
    mixed = mixed_dialogues(size.num_requests, size.scale, vocab_size)
    shared = shared_dialogues(size.num_dialogues, size.scale, vocab_size)
    # Once each for kernels, graphs and allocators: the first race must not pay for all.
    race(PAGED, loaded, _WARM_UP, scheduler)
    race(PAGED, loaded, mixed[: size.num_requests // 4], scheduler)

    def run_all(workload: str, twins: Sequence[Twin], dialogues: list[Dialogue]) -> list[Result]:
        best: dict[Twin, Result] = {}
        # Round by round: what else the machine does meanwhile meets all twins alike.
        for _ in range(size.num_rounds):
            for twin in twins:
                result = race(twin, loaded, dialogues, scheduler)
                on_result(workload, result)
                best[twin] = min(best.get(twin, result), result, key=lambda run: run.time_s)
        return [best[twin] for twin in twins]

    one_turn = run_all("mixed", (CLASSIC, *CONTIGUOUS, PAGED), mixed)
    turns = run_all("shared", (PAGED, CACHED), shared)
    return {
        **_memory(loaded, settings),
        "runs": [
            *(summary("mixed", result) for result in one_turn),
            *(summary("shared", result) for result in turns),
        ],
        "ratios": ratios(one_turn, turns),
    }


def ratios(mixed: Sequence[Result], shared: Sequence[Result]) -> dict[str, dict[str, float]]:
    """One idea against its absence, all else equal; `mixed` and `shared` in the order of `run`."""
    classic, longest, pow2, oracle, paged = mixed
    without, cached = shared
    return {
        "continuous_over_static": _gain(longest, classic),
        "paged_over_contiguous_max": _gain(paged, longest),
        "paged_over_contiguous_pow2": _gain(paged, pow2),
        "paged_over_contiguous_oracle": _gain(paged, oracle),
        "continuous_and_paged_over_neither": _gain(paged, classic),
        "prefix_cache_on_over_off": _gain(cached, without),
    }


def _gain(ours: Result, other: Result) -> dict[str, float]:
    """How many times better `ours` is: above 1 is better in every measure."""
    values = {
        "useful_tok_s": _rate(ours) / _rate(other),
        # Where a step's time is that of reading the weights, this is the gain in speed.
        "fewer_steps": other.num_steps / ours.num_steps,
        "sequences": ours.occupancy.mean_sequences / other.occupancy.mean_sequences,
        "fewer_computed_tok": other.num_computed_tokens / ours.num_computed_tokens,
        "ttft_p50": other.ttft_ms["p50"] / ours.ttft_ms["p50"],
    }
    return {name: round(value, 3) for name, value in values.items()}


def _rate(result: Result) -> float:
    return result.num_useful_tokens / result.time_s


def _memory(worker: BenchWorker, settings: WorkerSettings) -> dict[str, Any]:
    return {
        "backend": worker.backend,
        "clock": "cpu" if worker.clock is time.process_time else "wall",
        "block_size": worker.model.block_size,
        "kv_slots": (worker.capacity.num_blocks - 1) * worker.model.block_size,
        "max_model_len": worker.model.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": worker.capacity.max_num_batched_tokens,
    }


def summary(workload: str, result: Result) -> dict[str, Any]:
    """One run, as the record keeps it."""
    time_s, occupancy = result.time_s, result.occupancy
    return {
        "workload": workload,
        "twin": result.twin.name,
        "requests": len(result.timings),
        "time_s": round(time_s, 3),
        "steps": result.num_steps,
        "computed_tok_s": round(result.num_computed_tokens / time_s, 1),
        "useful_tok_s": round(_rate(result), 1),
        "useful_tok": result.num_useful_tokens,
        "cached_tok": sum(timing.num_cached_tokens for timing in result.timings),
        "mean_sequences": occupancy.mean_sequences,
        "max_sequences": occupancy.max_sequences,
        "kv_utilization": occupancy.kv_utilization,
        "kv_fill": occupancy.kv_fill,
        "preemptions": result.num_preemptions,
        "ttft_ms": result.ttft_ms,
    }
