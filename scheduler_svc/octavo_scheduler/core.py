"""The cell: every request, every worker, and the order in which things happen. Read first.

Events come in (submit, cancel, results, a worker attached or lost, time); each changes state
and is followed by `pump`, which plans for every worker that may take another plan:

    admission -> binding -> batcher / composer -> plan -> link.send
                     results.read_outcome <- StepOutcome <- link

Everything here is synchronous and in memory: no I/O, no clock but the one given, no protos, no
tasks. The service calls in from its event loop; tests and simulators call in directly.

Must not know: grpc, protos, Redis. Entry point: `Cell`.
"""

import heapq
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from time import perf_counter
from typing import Protocol

import numpy as np

from octavo.errors import OctavoError, UnavailableError
from octavo.metrics import SchedulerMetrics
from octavo.settings import SchedulerSettings
from octavo_scheduler import admission, binding, composer, recovery, results
from octavo_scheduler.admission import AdmissionQueue
from octavo_scheduler.batcher import BatchLimits, Room, admission_room
from octavo_scheduler.binding import Candidate
from octavo_scheduler.outbox import FinishedNote, Outbox, RejectedNote, StartedNote
from octavo_scheduler.plan import Capacity, ModelSpec, Plan, StepOutcome
from octavo_scheduler.recovery import Loss
from octavo_scheduler.results import Reading
from octavo_scheduler.sequence import (
    FinishReason,
    Request,
    Sequence,
    State,
    Submission,
    already_ended,
    make_sequences,
)
from octavo_scheduler.worker_state import WorkerState

logger = logging.getLogger(__name__)

# How far behind the head of the queue a sequence may be to pass it.
_SCAN_DEPTH = 32
# How long requests wait for a worker when the cell has none left.
_NO_WORKER_PATIENCE_S = 30.0
# Taken for a worker's times before its first results: it may still warm up.
_UNMEASURED_STEP_S, _UNMEASURED_TOKEN_S = 1.0, 0.01
_LATENCY_PRESET_ITL_S = 0.05


class PlanSink(Protocol):
    """Where a worker's plans go; `send` never blocks and keeps the order."""

    def send(self, plan: Plan) -> None: ...


class CancelReason(Enum):
    """Why a router cancels."""

    CLIENT = auto()
    STOP = auto()
    DEADLINE = auto()


_CANCELLED_AS = {
    CancelReason.CLIENT: FinishReason.CANCELLED,
    CancelReason.STOP: FinishReason.STOP,
    CancelReason.DEADLINE: FinishReason.DEADLINE,
}


@dataclass(slots=True, eq=False)
class Member:
    """A worker of the cell: its state, where its plans go, when it last advanced."""

    state: WorkerState
    sink: PlanSink
    last_progress: float
    last_step: int = 0
    # It drains: rows that it holds may end, none is added.
    is_leaving: bool = False


class Cell:
    """All requests and workers of one scheduler process."""

    def __init__(
        self,
        settings: SchedulerSettings,
        metrics: SchedulerMetrics,
        clock: Callable[[], float],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = settings
        self.metrics = metrics
        self.clock = clock
        # Called after events that want a `pump` soon; bursts of them share one.
        self.on_change = on_change
        self.model: ModelSpec | None = None
        self.members: list[Member] = []
        self.queue = AdmissionQueue(settings.max_queue_tokens)
        self.requests: dict[tuple[int, int], Request] = {}
        self.outboxes: dict[int, Outbox] = {}
        self.is_draining = False
        self._serial = 0
        self._deadlines: list[tuple[float, int, Request]] = []
        self._no_worker_since = clock()

    # ---- numbers

    @property
    def num_running(self) -> int:
        return sum(member.state.rows.num_held for member in self.members)

    @property
    def num_waiting(self) -> int:
        return len(self.queue) + sum(member.state.num_returning for member in self.members)

    @property
    def num_blocks(self) -> int:
        return sum(member.state.pool.num_usable for member in self.members)

    @property
    def num_used_blocks(self) -> int:
        return sum(member.state.pool.num_used for member in self.members)

    @property
    def prefill_tokens_per_s(self) -> float:
        return sum(member.state.cost.prefill_tokens_per_s for member in self.members)

    @property
    def max_request_tokens(self) -> int:
        """Longest request that any worker can hold."""
        if self.model is None or not self.members:
            return 0
        blocks = max(member.state.pool.num_usable for member in self.members)
        return min(self.model.max_model_len, blocks * self.model.block_size)

    def backlog_tokens(self) -> int:
        states = [member.state for member in self.members]
        running = sum(state.backlog_tokens + state.num_tokens_to_generate() for state in states)
        return self.queue.num_tokens + running

    # ---- workers

    def attach(
        self,
        worker_id: str,
        model: ModelSpec,
        capacity: Capacity,
        sink: PlanSink,
        inventory: Iterable[tuple[list[int], list[bytes]]] = (),
    ) -> Member:
        """Lead a worker whose cache holds `inventory` (least recently used first)."""
        assert self.model in (None, model), "the link compares model specs before"
        self.model = model
        settings = self.settings
        itl_s = settings.itl_target_ms / 1000
        if not itl_s and settings.preset == "latency":
            itl_s = _LATENCY_PRESET_ITL_S
        limits = BatchLimits.of(
            _least(settings.max_num_seqs, capacity.max_num_seqs),
            _least(settings.max_num_batched_tokens, capacity.max_num_batched_tokens),
            settings.min_chunk_tokens,
            itl_s,
            settings.plans_queued,
            settings.lease_steps,
        )
        state = WorkerState(
            worker_id,
            capacity,
            model.block_size,
            limits,
            watermark=settings.admission_watermark,
            enable_prefix_caching=settings.enable_prefix_caching,
        )
        if settings.enable_prefix_caching:
            for blocks, hashes in inventory:
                state.pool.restore(blocks, hashes)
        member = Member(state, sink, self.clock())
        self.members.append(member)
        self.on_change()
        return member

    def detach(self, member: Member, loss: Loss) -> None:
        """The worker is lost or let go: its sequences go on elsewhere."""
        if member not in self.members:
            return
        self.members.remove(member)
        if not self.members:
            self._no_worker_since = self.clock()
        outcome = recovery.recover(member.state, loss, self.settings.max_moves)
        for sequence in outcome.failed:
            error = OctavoError(
                f"{sequence.num_suspicions} workers were lost while they began this request; "
                "it is not tried again"
            )
            self._end(sequence, FinishReason.ERROR, error)
        for sequence in outcome.moved:
            self.metrics.moves.inc()
            self._queue_again(sequence)
        self.on_change()

    # ---- sessions and requests

    def open_session(self, session_id: int, outbox: Outbox) -> None:
        self.outboxes[session_id] = outbox

    def close_session(self, session_id: int) -> None:
        """The router is gone: nobody reads its answers any more."""
        self.outboxes.pop(session_id, None)
        for key in [key for key in self.requests if key[0] == session_id]:
            self.cancel(*key, None, CancelReason.CLIENT)

    def submit(self, session_id: int, submission: Submission) -> None:
        """Queue a request, or refuse it as a whole; the session's outbox hears of it."""
        try:
            self._submit(session_id, submission)
        except OctavoError as error:
            self.reject(session_id, submission.handle, error, submission.num_sequences)

    def reject(
        self, session_id: int, handle: int, error: OctavoError, num_sequences: int = 1
    ) -> None:
        self.metrics.outcomes.labels("rejected").inc(num_sequences)
        if outbox := self.outboxes.get(session_id):
            outbox.rejected(RejectedNote(handle, error))

    def cancel(
        self, session_id: int, handle: int, sequence_index: int | None, reason: CancelReason
    ) -> None:
        """End a request's sequence, or all; unknown handles ended already."""
        request = self.requests.get((session_id, handle))
        if request is None:
            return
        for sequence in request.sequences:
            if sequence_index in (None, sequence.index) and sequence.state is not State.ENDED:
                self._stop(sequence, _CANCELLED_AS[reason])
        self.on_change()

    def next_deadline(self) -> float | None:
        """When `expire` has something to do."""
        while self._deadlines and not self._deadlines[0][2].num_live:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def expire(self) -> None:
        """End the requests whose deadline passed."""
        now = self.clock()
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            request = heapq.heappop(self._deadlines)[2]
            for sequence in request.sequences:
                if sequence.state is not State.ENDED:
                    self._stop(sequence, FinishReason.DEADLINE)
        self.on_change()

    def drain(self) -> None:
        """Take no new requests; those that were accepted go on."""
        self.is_draining = True

    def end_all(self, error: OctavoError) -> int:
        """End every request with an error; returns how many there were."""
        requests = list(self.requests.values())
        for request in requests:
            for sequence in request.sequences:
                if sequence.state is not State.ENDED:
                    self._stop(sequence, FinishReason.ERROR, error)
        self.on_change()
        return len(requests)

    # ---- results and planning

    def read(self, member: Member, outcomes: Iterable[StepOutcome]) -> None:
        """Account results, oldest first, then plan on. Raises WorkerProtocolError."""
        member.last_progress = self.clock()
        num_steps = 0
        for outcome in outcomes:
            started = perf_counter()
            reading = results.read_outcome(member.state, outcome)
            self._deliver(reading)
            self.metrics.result_time.observe(perf_counter() - started)
            num_steps += 1
            if self.settings.check_integrity:
                member.state.check_integrity()
        self.metrics.steps.labels(member.state.worker_id).inc(num_steps)
        self.pump()

    def pump(self) -> None:
        """Send every plan that is due."""
        for member in self.members:
            while composer.may_plan(member.state, len(self.queue)):
                started = perf_counter()
                plan = self._compose(member)
                if plan is None:
                    break
                if member.state.num_unread == 1:
                    member.last_progress = self.clock()  # it owed nothing until now
                member.sink.send(plan)
                self.metrics.plan_time.observe(perf_counter() - started)
                if self.settings.check_integrity:
                    member.state.check_integrity()

    def note_progress(
        self, member: Member, step: int, *, is_running: bool, is_leaving: bool
    ) -> None:
        """What the worker says of itself; other phases than running are no hang."""
        member.is_leaving |= is_leaving
        if step > member.last_step or not is_running:
            member.last_step = step
            member.last_progress = self.clock()

    def find_hung(self, loop_lag_s: float) -> Member | None:
        """The worker that owes steps and was silent longest beyond its limit; one at a time."""
        now = self.clock()
        hung: list[Member] = []
        for member in self.members:
            state = member.state
            if not state.owes_steps:
                continue
            tokens = sum(plan.num_prefill_tokens for plan in state.in_flight)
            predicted = (state.num_unread + 1) * (state.cost.decode_s or _UNMEASURED_STEP_S)
            predicted += tokens * (state.cost.prefill_token_s or _UNMEASURED_TOKEN_S)
            silence = now - member.last_progress
            if recovery.is_hung(silence, loop_lag_s, self.settings.hang_floor_s, predicted):
                hung.append(member)
        return min(hung, key=lambda member: member.last_progress, default=None)

    def give_up_waiting(self) -> None:
        """Without any worker for too long, waiting requests are told so."""
        if self.members or not self.requests:
            return
        if self.clock() - self._no_worker_since > _NO_WORKER_PATIENCE_S:
            self.end_all(UnavailableError("the cell has no worker left", retry_after_ms=1000))

    # ---- inside

    def _submit(self, session_id: int, submission: Submission) -> None:
        key = (session_id, submission.handle)
        if key in self.requests:
            raise OctavoError(f"handle {submission.handle} is in use")
        is_resubmit = bool(submission.resumes)
        if self.is_draining:
            raise UnavailableError("the scheduler is draining", retry_after_ms=1000)
        if self.model is None or (not self.members and not is_resubmit):
            raise UnavailableError("the cell has no worker", retry_after_ms=1000)
        num_prompt = len(submission.prompt_token_ids) // 4
        if self.members:
            admission.check_fits(num_prompt, submission.max_tokens, self.max_request_tokens)
        now = self.clock()
        timeout = submission.deadline_ms
        deadline = None if timeout is None else now + timeout / 1000
        self._serial += 1
        request = Request(submission, session_id, self._serial, now, deadline, num_prompt)
        request.sequences = make_sequences(request, self.model.block_size)
        tokens = sum(sequence.queue_tokens for sequence in request.sequences)
        if not is_resubmit:
            self.queue.check_room(tokens, self.prefill_tokens_per_s)
        self.requests[key] = request
        if deadline is not None:
            heapq.heappush(self._deadlines, (deadline, request.serial, request))
        for sequence in request.sequences:
            if is_resubmit:
                sequence.extend_hashes(self.model.block_size)
                self.queue.push_front(sequence)
                if (reason := already_ended(sequence)) is not None:
                    self._stop(sequence, reason)
            else:
                self.queue.push(sequence)
        self._forget_if_ended(request)
        self.on_change()

    def _compose(self, member: Member) -> Plan | None:
        """One plan for a worker that may take one; None if none is due."""
        worker = member.state
        num_waiting = 0 if member.is_leaving else len(self.queue)
        cover = composer.choose_cover(worker, num_waiting)
        is_due = composer.is_plan_due(worker, cover)
        if not (is_due or num_waiting or worker.prefilling):
            return None
        max_preemptions = self.settings.max_preemptions
        growth = composer.grow_decodes(worker, cover.until, max_preemptions)
        budget = composer.chunk_budget(worker)
        if num_waiting and not growth.is_tight and not worker.num_returning:
            self._admit(worker, budget)
        preempted = growth.preempted + composer.plan_chunks(worker, budget, max_preemptions)
        for _ in preempted:
            self.metrics.preemptions.inc()
        if not composer.is_plan_due(worker, cover):
            return None
        return composer.freeze_plan(worker, cover)

    def _admit(self, worker: WorkerState, budget: int) -> None:
        """Bind waiting sequences to the worker while it has rows, blocks and budget."""
        remaining = [len(s.token_ids) - s.num_planned for s in worker.prefilling]
        min_chunk = worker.limits.min_chunk_tokens
        room = admission_room(budget, remaining, min_chunk)
        patience = self.settings.admission_max_wait_s
        for sequence in self.queue.candidates(_SCAN_DEPTH):
            if not worker.rows.num_free or worker.unproven is not None:
                return
            after = self._try_admit(worker, sequence, room, min_chunk)
            if after is not None:
                room = after
            elif self.clock() - sequence.request.arrival > patience:
                # It waited too long: what becomes free from now on is its.
                return

    def _try_admit(
        self, worker: WorkerState, sequence: Sequence, room: Room, min_chunk: int
    ) -> Room | None:
        """Admit one sequence; the room that is left, or None if it can't start here now."""
        if not worker.fits(sequence):
            return None
        if sequence.is_suspect and (worker.prefilling or worker.draft.added):
            return None
        hits = worker.find_hits(sequence)
        num_tokens = len(sequence.token_ids) - len(hits) * worker.block_size
        if not room.accepts(num_tokens, min_chunk):
            return None
        if worker.waits_for_block(sequence, len(hits)):
            return None
        if not worker.has_blocks_for(sequence, hits) or not self._is_best(worker, sequence):
            return None
        self.queue.remove(sequence)
        worker.admit(sequence, hits)
        self._note_started(sequence)
        return room.after(num_tokens, min_chunk)

    def _is_best(self, worker: WorkerState, sequence: Sequence) -> bool:
        """Whether the binding policy wants the sequence on this worker, which has room."""
        states = [member.state for member in self.members if not member.is_leaving]
        if len(states) == 1:
            return True
        # A worker that was not measured yet is taken to be as fast as the fastest.
        rate = max(state.cost.prefill_tokens_per_s for state in states)
        candidates = [_candidate(state, sequence, state is worker, rate) for state in states]
        budget_s = self.settings.affinity_budget_ms / 1000
        choice = binding.choose_worker(candidates, len(sequence.token_ids), budget_s)
        return choice is not None and states[choice] is worker

    def _note_started(self, sequence: Sequence) -> None:
        now = self.clock()
        sequence.admitted_at = now
        if sequence.was_started:
            return
        sequence.was_started = True
        waited = now - sequence.request.arrival
        self.metrics.queue_time.observe(waited)
        self.metrics.prefix_queries.inc(len(sequence.token_ids))
        self.metrics.prefix_hits.inc(sequence.num_cached)
        if outbox := self.outboxes.get(sequence.request.session_id):
            handle = sequence.request.submission.handle
            note = StartedNote(handle, sequence.index, sequence.num_cached, int(waited * 1000))
            outbox.started(note)

    def _deliver(self, reading: Reading) -> None:
        """Hand tokens to their sessions, end what ended, queue what comes back."""
        tokens = reading.tokens
        if tokens.token_ids.size:
            first = int(tokens.session[0])
            if (tokens.session == first).all():
                if outbox := self.outboxes.get(first):
                    outbox.push(tokens)
            else:
                for session_id in np.unique(tokens.session):
                    if outbox := self.outboxes.get(int(session_id)):
                        outbox.push(results.select(tokens, tokens.session == session_id))
        now = self.clock() if reading.prefilled else 0.0
        for sequence in reading.prefilled:
            self.metrics.prefill_time.observe(now - sequence.admitted_at)
        for ended in reading.ended:
            error = OctavoError(ended.message) if ended.reason is FinishReason.ERROR else None
            self._end(ended.sequence, ended.reason, error)
        for sequence in reading.returning:
            self._queue_again(sequence)

    def _queue_again(self, sequence: Sequence) -> None:
        assert self.model is not None
        sequence.extend_hashes(self.model.block_size)
        sequence.queue_tokens = len(sequence.token_ids)
        sequence.state = State.WAITING
        self.queue.push_front(sequence)

    def _stop(
        self, sequence: Sequence, reason: FinishReason, error: OctavoError | None = None
    ) -> None:
        """End a live sequence from outside, wherever it is."""
        if sequence.state is State.WAITING:
            self.queue.remove(sequence)
        elif sequence.state is State.RUNNING:
            self._worker_of(sequence).release(sequence, is_dead=False)
        self._end(sequence, reason, error)

    def _worker_of(self, sequence: Sequence) -> WorkerState:
        for member in self.members:
            state = member.state
            if sequence.row < len(state.rows.holders) and (
                state.rows.holders[sequence.row] is sequence
            ):
                return state
        raise AssertionError("a running sequence has a worker")

    def _end(
        self, sequence: Sequence, reason: FinishReason, error: OctavoError | None = None
    ) -> None:
        """The one place where a sequence ends; it holds no row and isn't queued."""
        assert sequence.state is not State.ENDED
        sequence.state = State.ENDED
        self.metrics.outcomes.labels(reason.value).inc()
        request = sequence.request
        if outbox := self.outboxes.get(request.session_id):
            note = FinishedNote(
                request.submission.handle,
                sequence.index,
                reason,
                sequence.num_generated,
                sequence.num_preemptions,
                sequence.num_moves,
                error,
            )
            outbox.finished(note)
        self._forget_if_ended(request)

    def _forget_if_ended(self, request: Request) -> None:
        if not request.num_live:
            self.requests.pop((request.session_id, request.submission.handle), None)


def _least(setting: int, own: int) -> int:
    """A setting of 0 means the worker's own limit."""
    return min(setting, own) if setting else own


def _candidate(
    state: WorkerState, sequence: Sequence, has_room: bool, default_rate: float
) -> Candidate:
    """A worker as the binding policy sees it; `has_room` False: find out."""
    hits = state.find_hits(sequence)
    has_room = has_room or (bool(state.rows.num_free) and state.has_blocks_for(sequence, hits))
    return Candidate(
        hit_tokens=len(hits) * state.block_size,
        backlog_tokens=state.backlog_tokens,
        tokens_per_s=state.cost.prefill_tokens_per_s or default_rate,
        wait_s=0.0 if has_room else state.wait_for_row_s(),
        num_rows=state.rows.num_held,
        fits=state.fits(sequence),
    )
