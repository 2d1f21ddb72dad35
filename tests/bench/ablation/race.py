"""Runs a twin on a real worker, in this process: model, runner and cell, but no gRPC.

    dialogues -> TwinCell -> plans -> Runner (the worker's own) -> outcomes -> TwinCell

Plans and outcomes pass through the real messages, so that both sides see what they see in
service. Must not know: what is compared with what. Entry points: `load_worker`, `race`.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from prometheus_client import CollectorRegistry

from octavo.blocks import BlockHashRoot, chain
from octavo.capacity import Capacity
from octavo.cli.measurement import RequestTiming, Run
from octavo.metrics import SchedulerMetrics, WorkerMetrics
from octavo.model_spec import ModelSpec
from octavo.settings import SchedulerSettings, WorkerSettings
from octavo.v1 import common_pb2, worker_pb2
from octavo_scheduler import dispatch
from octavo_scheduler.outbox import Frame, Outbox
from octavo_scheduler.plan import Plan
from octavo_scheduler.sequence import FinishReason, Submission
from octavo_worker import wire
from octavo_worker.loading import load
from octavo_worker.runner import Runner
from tests.bench.ablation.dialogues import Dialogue
from tests.bench.ablation.occupancy import Occupancy, OccupancyMeter
from tests.bench.ablation.twins import Twin, TwinCell, make_state, settings_of

_SESSION = 1
_GREEDY = common_pb2.SamplingParams(temperature=0.0, top_p=1.0).SerializeToString()


class BenchWorker(NamedTuple):
    """A loaded worker whose steps this process runs itself, and the clock to time them by."""

    runner: Runner
    max_in_flight: int
    model: ModelSpec
    capacity: Capacity
    backend: str
    clock: Callable[[], float]


def load_worker(settings: WorkerSettings) -> BenchWorker:
    """Raises ConfigurationError for what can't be loaded."""
    loaded = load(settings, WorkerMetrics(CollectorRegistry()), _raise)
    engine = loaded.engine
    is_cpu = loaded.capacity.backend == "cpu"
    if is_cpu:
        torch.set_num_threads(1)
    return BenchWorker(
        engine.runner,
        engine.max_in_flight,
        loaded.spec,
        loaded.capacity,
        loaded.capacity.backend,
        # On a CPU all work is this thread's: what else the machine does then doesn't count.
        time.process_time if is_cpu else time.perf_counter,
    )


@dataclass(frozen=True, slots=True)
class Result:
    """One twin's run. Useful tokens are those that were asked for. Times by the worker's clock.

    `timings` in the order of submission, `answers` (useful tokens) by handle, which is 1 for the
    first that was submitted.
    """

    twin: Twin
    timings: tuple[RequestTiming, ...]
    answers: dict[int, tuple[int, ...]]
    time_s: float
    num_steps: int
    num_computed_tokens: int
    num_preemptions: int
    occupancy: Occupancy

    @property
    def num_useful_tokens(self) -> int:
        return sum(timing.num_output_tokens for timing in self.timings)

    @property
    def ttft_ms(self) -> dict[str, float]:
        """Percentiles of the time from submit to first token."""
        return Run(self.timings).ttft_ms


def race(
    twin: Twin, worker: BenchWorker, dialogues: Sequence[Dialogue], settings: SchedulerSettings
) -> Result:
    """Run all `dialogues`, submitted at once, by the twin's rules."""
    return _Race(twin, worker, settings).run(dialogues)


@dataclass(slots=True)
class _Live:
    """A turn that was submitted: `history` are its prompt and the answer so far."""

    dialogue: Dialogue
    turn: int
    history: list[int]
    timing: RequestTiming

    @property
    def num_missing(self) -> int:
        return self.dialogue.turns[self.turn].num_output_tokens - self.timing.num_output_tokens


class _Race:
    """One run: the cell, the queue of its plans, and what the one client receives."""

    def __init__(self, twin: Twin, worker: BenchWorker, settings: SchedulerSettings) -> None:
        settings = settings_of(twin, settings)
        self._twin = twin
        self._runner = worker.runner
        self._clock = worker.clock
        self._max_in_flight = worker.max_in_flight
        self._block_size = worker.model.block_size
        model = worker.model
        self._root = BlockHashRoot(
            model.name, model.revision, model.block_size, model.kv_scheme
        ).digest()
        self._metrics = SchedulerMetrics(CollectorRegistry())
        self._cell = TwinCell(twin, model, settings, self._metrics, self._clock)
        self._outbox = Outbox(lambda: None)
        self._cell.open_session(_SESSION, self._outbox)
        state = make_state(twin, model, worker.capacity, settings)
        self._member = self._cell.attach(state, model, self)
        self._plans: deque[Plan] = deque()
        self._live: dict[int, _Live] = {}
        self._timings: list[RequestTiming] = []
        self._answers: dict[int, tuple[int, ...]] = {}
        self._meter = OccupancyMeter(state)
        self._num_steps = self._num_computed = self._num_preemptions = 0

    def send(self, plan: Plan) -> None:
        """The cell's way to the worker."""
        self._plans.append(plan)

    def run(self, dialogues: Sequence[Dialogue]) -> Result:
        runner = self._runner
        runner.reset()
        started_s = self._clock()
        for dialogue in dialogues:
            self._submit(dialogue, 0, [])
        self._cell.pump()
        while self._cell.requests or self._plans or runner.num_in_flight:
            has_step = self._plans or runner.can_repeat
            if has_step and runner.num_in_flight < self._max_in_flight:
                self._launch()
            else:
                self._read()
        assert not self._live
        return Result(
            self._twin,
            tuple(self._timings),
            self._answers,
            max(timing.last_s for timing in self._timings) - started_s,
            self._num_steps,
            self._num_computed,
            self._num_preemptions,
            self._meter.occupancy(),
        )

    def _launch(self) -> None:
        if not self._plans:
            self._runner.submit(None)
            return
        message = dispatch.plan_to_proto(self._plans.popleft()).SerializeToString()
        self._runner.submit(wire.plan_from_proto(worker_pb2.Plan.FromString(message)))

    def _read(self) -> None:
        outcome = self._runner.poll()
        assert outcome is not None, "requests live, but no step is owed"
        assert not outcome.faults, outcome.faults
        results = wire.results_to_proto([outcome]).results.results
        self._num_steps += 1
        self._num_computed += outcome.num_prefill_tokens + outcome.num_decode_tokens
        self._meter.sample(len(self._cell.queue))
        self._cell.read(self._member, [dispatch.outcome_from_proto(results[0])])
        self._take(self._outbox.take(), self._clock())

    def _take(self, frame: Frame, now_s: float) -> None:
        """The client's side of a frame; answered turns call for the next ones."""
        assert not frame.rejected, frame.rejected
        for note in frame.started:
            self._live[note.handle].timing.num_cached_tokens = note.num_cached_tokens
        if frame.tokens is not None:
            start = 0
            columns = (frame.tokens.handles.tolist(), frame.tokens.counts.tolist())
            for handle, count in zip(*columns, strict=True):
                token_ids = frame.tokens.token_ids[start : start + count].tolist()
                self._receive(handle, token_ids, now_s)
                start += count
        for note in frame.finished:
            assert note.reason is FinishReason.LENGTH, note
            self._num_preemptions += note.num_preemptions
            self._meter.forget(note.handle)
            live = self._live.pop(note.handle)
            assert not live.num_missing, (note.handle, live.num_missing)
            num_useful = live.timing.num_output_tokens
            self._answers[note.handle] = tuple(live.history[-num_useful:])
            if live.turn + 1 < len(live.dialogue.turns):
                self._submit(live.dialogue, live.turn + 1, live.history)
                self._cell.pump()

    def _receive(self, handle: int, token_ids: list[int], now_s: float) -> None:
        live = self._live[handle]
        useful = token_ids[: live.num_missing]
        if not useful:
            return
        live.history += useful
        live.timing.num_output_tokens += len(useful)
        live.timing.frame(now_s)
        if not live.num_missing:
            self._meter.note_answered(handle)

    def _submit(self, dialogue: Dialogue, turn: int, history: list[int]) -> None:
        request = dialogue.turns[turn]
        prompt = [*history, *request.token_ids]
        timing = RequestTiming(len(prompt), self._clock())
        self._timings.append(timing)
        handle = len(self._timings)
        self._live[handle] = _Live(dialogue, turn, prompt, timing)
        token_ids = np.array(prompt, np.uint32)
        hashes = chain(self._root, token_ids, self._block_size)
        self._cell.submit(
            _SESSION,
            Submission(
                handle=handle,
                request_id=f"bench-{handle}",
                prompt_token_ids=token_ids.tobytes(),
                root_hash=self._root,
                block_hashes=tuple(hashes) if self._twin.caches_prefixes else (),
                sampling=_GREEDY,
                max_tokens=request.num_output_tokens,
                min_tokens=0,
                ending_ids=frozenset(),
            ),
        )


def _raise(reason: str) -> None:
    raise AssertionError(reason)
