"""The thread that runs steps: plans in the order they came, repeats in between.

Torch work happens here and nowhere else. Other threads hand plans in and get outcomes through
the sink, called in this thread. Must not know: gRPC, who leads. Entry point: `Engine`.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from octavo.errors import FailedPreconditionError
from octavo.metrics import WorkerMetrics
from octavo_worker.plan import Plan, StepOutcome
from octavo_worker.runner import Runner
from octavo_worker.step_trace import StepTrace

_logger = logging.getLogger(__name__)
ENGINE_THREAD = "engine"
_CLOSE_TIMEOUT_S = 5.0

Sink = Callable[[StepOutcome], None]
Inventory = list[tuple[int, bytes]]


class Progress(NamedTuple):
    """Steps completed in this epoch; plans received and not yet launched."""

    step: int
    num_queued_plans: int


class Engine:
    """Owns a runner. All methods may be called from any thread.

    `max_in_flight`: steps launched and not yet read. `on_fatal` is called once, in the
    engine's thread, with the reason for which no step will ever run again.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        max_in_flight: int,
        max_num_batched_tokens: int,
        num_blocks: int,
        metrics: WorkerMetrics,
        on_fatal: Callable[[str], None],
    ) -> None:
        self._runner = runner
        self._max_in_flight = max_in_flight
        self._max_num_batched_tokens = max_num_batched_tokens
        self._num_blocks = num_blocks
        self._metrics = metrics
        metrics.rows.set_function(lambda: runner.num_live_rows)
        self._on_fatal = on_fatal
        self._trace: StepTrace | None = None
        self._changed = threading.Condition()
        # Guarded by `_changed`:
        self._plans: deque[tuple[Plan, int]] = deque()
        self._reset: Future[Inventory] | None = None
        self._sink: Sink | None = None
        self._num_plans = 0
        self._step = 0
        self._is_busy = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=ENGINE_THREAD, daemon=True)

    @property
    def runner(self) -> Runner:
        """For who runs steps without the thread (`bare_loop`): never once started."""
        return self._runner

    @property
    def max_in_flight(self) -> int:
        return self._max_in_flight

    def trace_steps(self, trace: StepTrace) -> None:
        """Tell `trace` of every step; before `start`."""
        self._trace = trace

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop after the running step; one that hangs is left behind."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(_CLOSE_TIMEOUT_S)
        self._runner.close()

    def attach(self, sink: Sink) -> None:
        """A leader's stream begins: outcomes go to `sink`."""
        with self._changed:
            self._sink = sink

    def detach(self, *, drop_plans: bool) -> None:
        """The leader's stream is over: no outcome goes out, nothing is repeated.

        A leader that released the worker has its queued plans run, for their seals.
        """
        with self._changed:
            self._sink = None
            if drop_plans:
                self._plans.clear()

    def submit(self, plan: Plan) -> None:
        """Queue `plan`. Raises FailedPreconditionError if it can't be a plan of this epoch."""
        arrived_ns = time.perf_counter_ns()
        with self._changed:
            self._check(plan)
            self._num_plans += 1
            self._plans.append((plan, arrived_ns))
            self._changed.notify()

    def _check(self, plan: Plan) -> None:
        if plan.plan_id != self._num_plans + 1:
            raise FailedPreconditionError(
                f"plan_id is {plan.plan_id}, expected {self._num_plans + 1}"
            )
        if plan.num_chunk_tokens > self._max_num_batched_tokens:
            raise FailedPreconditionError(
                f"plan {plan.plan_id} has {plan.num_chunk_tokens} chunk tokens; "
                f"max_num_batched_tokens is {self._max_num_batched_tokens}"
            )
        for block_id, _ in plan.sealed:
            if not 0 < block_id < self._num_blocks:
                raise FailedPreconditionError(
                    f"plan {plan.plan_id} seals block {block_id}; "
                    f"blocks are 1 .. {self._num_blocks - 1}"
                )

    def reset(self) -> "Future[Inventory]":
        """A new epoch, once the queued plans have run: all rows are freed. Detach first.

        The result lists the sealed blocks, least recently used first. Who asked may go away, but
        can't call it off: others may wait for the same one.
        """
        with self._changed:
            assert self._sink is None
            if self._reset is None:
                self._reset = Future()
                self._reset.set_running_or_notify_cancel()
            self._changed.notify()
            return self._reset

    def progress(self) -> Progress:
        with self._changed:
            return Progress(self._step, len(self._plans))

    @property
    def is_idle(self) -> bool:
        """No plan waits, no step runs, no row lives."""
        with self._changed:
            return not (self._plans or self._is_busy or self._runner.num_live_rows)

    # The engine's thread --------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._advance():
                pass
        except BaseException as error:
            # Nothing is known of the device or the rows any more: the process has to go.
            _logger.critical("the engine stopped", exc_info=True)
            self._on_fatal(f"{type(error).__name__}: {error}")

    def _advance(self) -> bool:
        """Launch a step, or read one, or wait; False when closed."""
        runner = self._runner
        with self._changed:
            self._is_busy = runner.num_in_flight > 0
            self._changed.wait_for(self._has_work)
            if self._is_closed:
                return False
            self._is_busy = True
            has_launch = self._plans or self._can_repeat()
            is_launch = has_launch and runner.num_in_flight < self._max_in_flight
            plan, arrived_ns = self._plans.popleft() if is_launch and self._plans else (None, None)
            num_queued = len(self._plans)
            last_until = self._plans[-1][0].decode_until if num_queued else None
        if is_launch:
            if self._trace is not None:
                self._trace.launch(plan)
            if arrived_ns is not None:
                self._note_launch(arrived_ns)
            runner.submit(plan, arrived_ns)
            self._metrics.plan_lead.observe(max(num_queued, runner.num_steps_left(last_until)))
        if runner.num_in_flight >= self._max_in_flight or not is_launch:
            self._read()
        return True

    def _note_launch(self, arrived_ns: int) -> None:
        """A plan is about to be launched: how long it could have been already."""
        since_ns = max(arrived_ns, self._runner.room_ns)
        self._metrics.plan_launch.observe((time.perf_counter_ns() - since_ns) / 1e9)

    def _has_work(self) -> bool:
        has_step = self._plans or self._is_busy or self._can_repeat()
        return bool(has_step or self._reset is not None or self._is_closed)

    def _can_repeat(self) -> bool:
        return self._sink is not None and self._runner.can_repeat

    def _read(self) -> None:
        """Read the oldest step in flight; if there is none, a reset was asked for."""
        outcome = self._runner.poll()
        if outcome is None:
            self._finish_reset()
            return
        with self._changed:
            self._step = outcome.step
            sink = self._sink
        if sink is not None:
            sink(outcome)
        if self._runner.profile is not None:
            self._runner.profile.note_emitted()
        self._count(outcome)
        if self._trace is not None:
            self._trace.read(outcome)

    def _finish_reset(self) -> None:
        with self._changed:
            reset, self._reset = self._reset, None
            assert reset is not None
            self._runner.reset()
            if self._trace is not None:
                self._trace.clear()
            self._num_plans = self._step = 0
            self._is_busy = False  # who waits for the reset finds an idle engine
            inventory = list(self._runner.sealed.inventory())
        reset.set_result(inventory)

    def _count(self, outcome: StepOutcome) -> None:
        metrics = self._metrics
        metrics.steps.inc()
        metrics.step_time.observe(outcome.step_us / 1e6)
        metrics.step_gap.observe(outcome.gap_us / 1e6)
        metrics.step_launch.observe(outcome.launch_us / 1e6)
        metrics.step_tokens.observe(outcome.num_prefill_tokens + outcome.num_decode_tokens)
        if outcome.repeat == 0:
            metrics.plan_wait.observe(outcome.wait_us / 1e6)
        metrics.tokens.labels("prefill").inc(outcome.num_prefill_tokens)
        metrics.tokens.labels("decode").inc(outcome.num_decode_tokens)
        metrics.row_errors.inc(len(outcome.faults))
