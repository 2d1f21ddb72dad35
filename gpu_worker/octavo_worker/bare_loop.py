"""The worker's bare loop: batching at its simplest, in process, to measure what the worker can do.

What the whole stack is held against. Rows are filled in the order of the requests, blocks are
taken for a request's whole length at once, prompts are computed in chunks as wide as a step
allows. No prefix cache, no policy, no wire. Entry point: `BareLoop`.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from prometheus_client import CollectorRegistry

from octavo.cli.measurement import RequestTiming, Run
from octavo.cli.step_report import StepReport
from octavo.cli.workloads import BenchRequest
from octavo.errors import ContextLengthError
from octavo.metrics import WorkerMetrics
from octavo.row_event import RowEvent
from octavo.settings import WorkerSettings
from octavo_worker.loading import load
from octavo_worker.plan import I64, Chunk, Plan, RowAdd, Sampling, StepOutcome
from octavo_worker.step_profile import write_profile

OnTokens = Callable[[int], None]
# No plan ends the repeats: the loop itself says when a step runs.
_FOREVER = 1 << 40


@dataclass(slots=True)
class _Holder:
    """A request that holds a row. `num_planned` prompt tokens are in plans already."""

    request: BenchRequest
    timing: RequestTiming
    token_ids: I64
    block_ids: I64
    num_planned: int = 0


class BareLoop:
    """Loads a model once; runs lists of requests on it."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Raises ConfigurationError for what can't be loaded."""
        loaded = load(settings, WorkerMetrics(CollectorRegistry()), _raise)
        self._settings = settings
        self._runner = loaded.engine.runner
        self._max_in_flight = loaded.engine.max_in_flight
        self._capacity = loaded.capacity
        self._block_size = loaded.spec.block_size

    def run(self, requests: Sequence[BenchRequest], sampling: Sampling, on_tokens: OnTokens) -> Run:
        """Run `requests`, all submitted now. `on_tokens` is told of each step's new tokens.

        Raises ContextLengthError for a request that doesn't fit into the cache.
        """
        batch = _Batch(
            requests,
            sampling,
            num_blocks=self._capacity.num_blocks,
            num_rows=self._capacity.max_num_seqs,
            max_num_batched_tokens=self._capacity.max_num_batched_tokens,
            block_size=self._block_size,
        )
        runner = self._runner
        runner.reset()
        if runner.profile is not None:
            runner.profile.clear()
        while not batch.is_done:
            plan = None
            can_launch = runner.num_in_flight < self._max_in_flight
            if can_launch:
                plan = batch.next_plan()
            if can_launch and (plan is not None or runner.can_repeat):
                runner.submit(plan)
                continue
            outcome = runner.poll()
            assert outcome is not None, "neither a step to launch nor one in flight"
            on_tokens(batch.take(outcome, time.perf_counter()))
        while runner.poll() is not None:
            pass
        return Run(
            batch.timings, StepReport.of_steps(batch.steps_us, batch.gaps_us, batch.launches_us)
        )

    def close(self) -> None:
        """End what else computes, if the model is shared by ranks."""
        self._runner.close()

    def write_profile(self) -> None:
        """The Chrome trace of the last run's steps, if the settings ask for one."""
        if self._settings.profile:
            write_profile(self._settings.profile, "bare worker", self._runner.profile)


def _raise(reason: str) -> None:
    raise AssertionError(reason)


class _Batch:
    """Which requests wait, which hold rows; makes plans and reads outcomes."""

    def __init__(
        self,
        requests: Sequence[BenchRequest],
        sampling: Sampling,
        *,
        num_blocks: int,
        num_rows: int,
        max_num_batched_tokens: int,
        block_size: int,
    ) -> None:
        self._sampling = sampling
        self._max_num_batched_tokens = max_num_batched_tokens
        self._block_size = block_size
        now = time.perf_counter()
        self.timings = tuple(RequestTiming(len(item.token_ids), now) for item in requests)
        self._waiting = deque(zip(requests, self.timings, strict=True))
        self._holders: dict[int, _Holder] = {}
        self._prefilling: deque[int] = deque()
        self._free_rows = deque(range(num_rows))
        self._free_blocks = deque(range(1, num_blocks))
        self._removed: list[int] = []
        self._plan_id = 0
        self._num_usable_blocks = num_blocks - 1
        self.steps_us: list[int] = []
        self.launches_us: list[int] = []
        self.gaps_us: list[int] = []

    @property
    def is_done(self) -> bool:
        return not (self._waiting or self._holders)

    def next_plan(self) -> Plan | None:
        """The next step's plan; None if nothing changes."""
        added = self._admit()
        chunks = self._next_chunks()
        if not (added or chunks or self._removed):
            return None
        removed, self._removed = tuple(self._removed), []
        self._plan_id += 1
        return Plan(
            plan_id=self._plan_id,
            decode_until=_FOREVER,
            removed_rows=removed,
            added_rows=tuple(added),
            chunks=tuple(chunks),
        )

    def take(self, outcome: StepOutcome, now_s: float) -> int:
        """Note an outcome's times, tokens and ends; returns the number of tokens."""
        self.steps_us.append(outcome.step_us)
        self.launches_us.append(outcome.launch_us)
        self.gaps_us.append(outcome.gap_us)
        columns = (outcome.rows.tolist(), outcome.events.tolist())
        for row, event in zip(*columns, strict=True):
            assert event != RowEvent.ERROR, outcome.faults
            holder = self._holders[row]
            holder.timing.num_output_tokens += 1
            holder.timing.frame(now_s)
            if event != RowEvent.ALIVE:
                self._free(row)
        return len(outcome.rows)

    def _admit(self) -> list[RowAdd]:
        added: list[RowAdd] = []
        while self._waiting and self._free_rows:
            request, timing = self._waiting[0]
            total = len(request.token_ids) + request.num_output_tokens
            num_blocks = -(-total // self._block_size)
            if num_blocks > self._num_usable_blocks:
                raise ContextLengthError(
                    f"a request of {total} tokens needs {num_blocks} blocks; the cache has "
                    f"{self._num_usable_blocks}: give it more memory (--kv-cache-memory)"
                )
            if num_blocks > len(self._free_blocks):
                break
            self._waiting.popleft()
            row = self._free_rows.popleft()
            blocks = np.array([self._free_blocks.popleft() for _ in range(num_blocks)], np.int64)
            token_ids = np.array(request.token_ids, np.int64)
            self._holders[row] = _Holder(request, timing, token_ids, blocks)
            self._prefilling.append(row)
            added.append(
                RowAdd(
                    row=row,
                    generation=1,
                    # As different requests do, each draws numbers of its own.
                    sampling=replace(self._sampling, seed=len(self._waiting)),
                    sequence_index=0,
                    block_ids=blocks,
                    num_computed_tokens=0,
                    max_total_tokens=total,
                )
            )
        return added

    def _next_chunks(self) -> list[Chunk]:
        """Prompt tokens in the order of admission; the decode rows' tokens come first."""
        budget = self._max_num_batched_tokens - (len(self._holders) - len(self._prefilling))
        chunks: list[Chunk] = []
        while self._prefilling and budget > 0:
            row = self._prefilling[0]
            holder = self._holders[row]
            start = holder.num_planned
            end = min(len(holder.token_ids), start + budget)
            is_last = end == len(holder.token_ids)
            chunks.append(Chunk(row, start, holder.token_ids[start:end], is_last))
            holder.num_planned = end
            budget -= end - start
            if is_last:
                self._prefilling.popleft()
        return chunks

    def _free(self, row: int) -> None:
        holder = self._holders.pop(row)
        self._free_blocks.extend(holder.block_ids.tolist())
        self._free_rows.append(row)
        self._removed.append(row)
