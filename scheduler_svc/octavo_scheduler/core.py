"""The cell: every request, every worker, and the order in which things happen. Read first.

Events come in (submit, cancel, results, a worker attached or lost, time); each changes state
and is followed by `pump`, which plans for every worker that may take another plan:

    admission -> placement / binding -> composer / batcher -> plan -> sink.send
                            results.read_outcome <- StepOutcome <- link

Everything here is synchronous and in memory: no I/O, no clock but the one given, no protos, no
tasks. The service calls in from its event loop; tests and simulators call in directly.

Must not know: grpc, protos, Redis. Entry point: `Cell`.
"""

from collections.abc import Callable, Iterable
from time import perf_counter

from octavo.cancel_reason import CancelReason
from octavo.errors import OctavoError, UnavailableError
from octavo.metrics import SchedulerMetrics
from octavo.model_spec import ModelSpec
from octavo.settings import SchedulerSettings
from octavo_scheduler import admission, composer, recovery, results
from octavo_scheduler.accounts import Accounts
from octavo_scheduler.admission import AdmissionQueue, QueueLimits
from octavo_scheduler.chronicle import Chronicle
from octavo_scheduler.fairness import Shares, parse_weights
from octavo_scheduler.growth import OutputLengths
from octavo_scheduler.members import Member, Members, PlanSink
from octavo_scheduler.outbox import Outbox
from octavo_scheduler.placement import Placement
from octavo_scheduler.plan import Plan, StepOutcome
from octavo_scheduler.recovery import Loss
from octavo_scheduler.request_book import RequestBook
from octavo_scheduler.results import Reading
from octavo_scheduler.sequence import (
    CANCELLED_AS,
    FinishReason,
    Request,
    Sequence,
    State,
    Submission,
    already_ended,
)
from octavo_scheduler.worker_state import WorkerState

# How long requests wait for a worker when the cell has none left that can hold them.
_NO_WORKER_PATIENCE_S = 30.0
_RETRY_MS = 1000


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
        self.members = Members()
        self.accounts = Accounts(metrics, clock)
        self.book = RequestBook(self.accounts)
        self.lengths = OutputLengths()
        self._shares = Shares(parse_weights(settings.tenant_weights))
        limits = QueueLimits(
            settings.max_queue_tokens, settings.max_queue_wait_s, settings.priority_ageing_s
        )
        self.queue = AdmissionQueue(limits, self._shares, clock)
        self.is_draining = False
        # While the cell is handed over: results are read, nothing is planned.
        self.is_paused = False
        self._placement = Placement(self.queue, settings, clock, self._on_placed)
        # When the largest worker that there was left the cell.
        self._shrunk_at = clock()

    @property
    def requests(self) -> dict[tuple[int, int], Request]:
        """Accepted requests that live, by (session id, handle)."""
        return self.book.requests

    @property
    def num_waiting(self) -> int:
        return len(self.queue) + self.members.num_returning

    @property
    def max_request_tokens(self) -> int:
        """Longest request that any worker can hold."""
        if self.model is None:
            return 0
        return min(self.model.max_model_len, self.members.max_pool_tokens)

    def prompt_backlog_tokens(self) -> int:
        """Prompt tokens that wait or are being computed."""
        return self.queue.num_tokens + self.members.prompt_backlog_tokens()

    def backlog_tokens(self) -> int:
        return self.queue.num_tokens + self.members.backlog_tokens()

    # ---- workers

    def attach(self, state: WorkerState, model: ModelSpec, sink: PlanSink) -> Member:
        """Lead a worker; `state` is fresh and knows what the worker's cache holds."""
        assert self.model in (None, model), "the link compares model specs before"
        self.model = model
        state.lengths = self.lengths
        member = Member(state, sink, self.clock())
        self.members.append(member)
        self.on_change()
        return member

    def detach(self, member: Member, loss: Loss) -> None:
        """The worker is lost or let go: its sequences go on elsewhere."""
        largest = self.members.max_pool_tokens
        self.members.remove(member)
        if self.members.max_pool_tokens < largest:
            self._shrunk_at = self.clock()
        if self.book.chronicle is not None:
            self.book.chronicle.lost(member.state.worker_id, loss, self.clock())
        outcome = recovery.recover(member.state, loss, self.settings.max_moves)
        for sequence in outcome.failed:
            error = OctavoError(
                f"{sequence.num_suspicions} workers were lost while they began this request; "
                "it is not tried again"
            )
            self._end(sequence, FinishReason.ERROR, error)
        for sequence in outcome.moved:
            self.metrics.moves.labels(loss.value).inc()
            if sequence.trace is not None:
                sequence.trace.moved(member.state.worker_id, loss.value)
            if sequence.num_suspicions:
                self.book.suspect(sequence)
            self._queue_again(sequence)
        self.on_change()

    def note_progress(
        self, member: Member, step: int, *, is_running: bool, is_leaving: bool
    ) -> None:
        """What the worker says of itself; one that neither runs nor drains can't hang."""
        member.is_leaving |= is_leaving
        if step > member.last_step or not (is_running or is_leaving):
            member.last_step = step
            member.last_progress = self.clock()

    def find_hung(self, loop_lag_s: float) -> Member | None:
        """A worker that owes steps and stopped; `loop_lag_s` of silence was our own."""
        return self.members.find_hung(self.clock(), loop_lag_s, self.settings.hang_floor_s)

    # ---- sessions and requests

    def open_session(self, session_id: int, outbox: Outbox) -> None:
        self.book.outboxes[session_id] = outbox

    def close_session(self, session_id: int) -> None:
        """The router is gone: nobody reads its answers any more."""
        self.book.outboxes.pop(session_id, None)
        for key in [key for key in self.requests if key[0] == session_id]:
            self.cancel(*key, None, CancelReason.CLIENT)

    def submit(self, session_id: int, submission: Submission) -> None:
        """Queue a request, or refuse it as a whole; the session's outbox hears of it."""
        try:
            self._submit(session_id, submission)
        except OctavoError as error:
            if submission.trace is not None:
                submission.trace.rejected(error)
            self.reject(session_id, submission.handle, error, submission.num_sequences)

    def reject(
        self, session_id: int, handle: int, error: OctavoError, num_sequences: int = 1
    ) -> None:
        """Refuse what never became a request."""
        self.book.reject(session_id, handle, error, num_sequences)

    def cancel(
        self, session_id: int, handle: int, sequence_index: int | None, reason: CancelReason
    ) -> None:
        """End a request's sequence, or all; unknown handles ended already."""
        request = self.requests.get((session_id, handle))
        if request is None:
            return
        for sequence in request.sequences:
            if sequence_index in (None, sequence.index):
                self._stop(sequence, CANCELLED_AS[reason])
        self.on_change()

    def next_deadline(self) -> float | None:
        """When `expire` has something to do."""
        return self.book.next_deadline()

    def expire(self) -> None:
        """End the requests whose deadline passed."""
        now = self.clock()
        while (request := self.book.next_due(now)) is not None:
            self._stop_all(request, FinishReason.DEADLINE)
        self.on_change()

    def give_up_waiting(self) -> None:
        """Requests that no worker could hold for too long are told so."""
        largest, patience_from = self.members.max_pool_tokens, self.clock() - _NO_WORKER_PATIENCE_S
        is_all_held = self.model is not None and largest >= self.model.max_model_len
        if is_all_held or self._shrunk_at >= patience_from:
            return
        for request in list(self.requests.values()):
            if request.max_total_tokens > largest and request.arrival < patience_from:
                which = f" that can hold {request.max_total_tokens} tokens" if largest else ""
                error = UnavailableError(
                    f"the cell has no worker left{which}", retry_after_ms=_RETRY_MS
                )
                self._stop_all(request, FinishReason.ERROR, error)
                self.on_change()

    def drain(self) -> None:
        """Take no new requests; those that were accepted go on."""
        self.is_draining = True

    def end_all(self, error: OctavoError) -> int:
        """End every request with an error; returns how many there were."""
        return self._end_all(FinishReason.ERROR, error)

    def suspicions(self) -> dict[tuple[int, int], int]:
        """Requests that workers died on, by (session id, handle): how many."""
        counts = {
            key: max(sequence.num_suspicions for sequence in request.sequences)
            for key, request in self.requests.items()
        }
        return {key: count for key, count in counts.items() if count}

    def let_go_all(self) -> int:
        """Drop every request without a word: another scheduler goes on with them. How many."""
        return self._end_all(FinishReason.MOVED)

    def _end_all(self, reason: FinishReason, error: OctavoError | None = None) -> int:
        requests = list(self.requests.values())
        for request in requests:
            self._stop_all(request, reason, error)
        self.on_change()
        return len(requests)

    def begin_chronicle(self) -> None:
        """Remember what live views show, from what runs now on."""
        self.book.chronicle = Chronicle(self.clock())
        for member in self.members:
            for sequence in member.state.sequences():
                self._chronicle_placed(self.book.chronicle, sequence, sequence.admitted_at)

    # ---- results and plans

    def read(self, member: Member, outcomes: Iterable[StepOutcome]) -> None:
        """Account results, oldest first, then plan on. Raises WorkerProtocolError."""
        member.last_progress = self.clock()
        num_steps = 0
        for outcome in outcomes:
            started = perf_counter()
            reading = results.read_outcome(member.state, outcome)
            self._take_in(reading)
            if (chronicle := self.book.chronicle) is not None:
                num_tokens = reading.tokens.token_ids.size
                chronicle.count(member.state.worker_id, reading.num_prefill_tokens, num_tokens)
            self.metrics.result_time.observe(perf_counter() - started)
            num_steps += 1
            if self.settings.check_integrity:
                member.state.check_integrity()
        self.metrics.steps.labels(member.state.worker_id).inc(num_steps)
        self.pump()

    def pump(self) -> None:
        """Send every plan that is due."""
        if self.is_paused:
            return
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

    # ---- inside

    def _compose(self, member: Member) -> Plan | None:
        """One plan for a worker that may take one; None if none is due."""
        worker = member.state
        num_waiting = len(self.queue) if member.takes_rows else 0
        cover = composer.choose_cover(worker, num_waiting)
        is_due = composer.is_plan_due(worker, cover)
        if not (is_due or num_waiting or worker.prefilling):
            return None
        max_preemptions = self.settings.max_preemptions
        growth = composer.grow_decodes(worker, cover.until, max_preemptions)
        budget = composer.chunk_budget(worker)
        if num_waiting and not growth.is_tight and not worker.num_returning:
            self._placement.admit(worker, self.members.open_states(), budget)
        preempted = growth.preempted + composer.plan_chunks(worker, budget, max_preemptions)
        self.metrics.preemptions.inc(len(preempted))
        for sequence in preempted:
            if sequence.trace is not None:
                sequence.trace.preempted()
        if not composer.is_plan_due(worker, cover):
            return None
        return composer.freeze_plan(worker, cover)

    def _submit(self, session_id: int, submission: Submission) -> None:
        is_resubmit = bool(submission.resumes or submission.lost_scheduler_id)
        if (session_id, submission.handle) in self.requests:
            raise OctavoError(f"handle {submission.handle} is in use")
        if self.is_draining:
            raise UnavailableError("the scheduler is draining", retry_after_ms=_RETRY_MS)
        if self.model is None or (not self.members and not is_resubmit):
            raise UnavailableError("the cell has no worker", retry_after_ms=_RETRY_MS)
        request = self.book.make(session_id, submission, self.clock(), self.model.block_size)
        if self.members:
            num_prompt, limit = request.num_prompt_tokens, self.max_request_tokens
            admission.check_fits(num_prompt, submission.max_tokens, limit)
        if not is_resubmit:
            num_tokens = sum(sequence.queue_tokens for sequence in request.sequences)
            request.expected_ttft_s = self.queue.check_room(
                num_tokens,
                self.members.outlook(),
                priority=submission.priority,
                tenant=submission.tenant,
            )
        self.book.accept(request)
        for sequence in request.sequences:
            if not is_resubmit:
                self.queue.push(sequence)
            elif (reason := already_ended(sequence)) is not None:
                self._end(sequence, reason)
            else:
                self._queue_again(sequence)
        self.on_change()

    def _on_placed(self, sequence: Sequence) -> None:
        now = self.clock()
        worker = self.members.holder_of(sequence)
        others = (member.state for member in self.members if member.state is not worker)
        self.accounts.placed(sequence, worker, others)
        self.book.start(sequence, now)
        if sequence.trace is not None:
            sequence.trace.placed(worker.worker_id, sequence.num_cached, len(sequence.token_ids))
        if (chronicle := self.book.chronicle) is not None:
            self._chronicle_placed(chronicle, sequence, now)

    def _chronicle_placed(self, chronicle: Chronicle, sequence: Sequence, at: float) -> None:
        worker = self.members.holder_of(sequence)
        chronicle.placed(sequence, worker.worker_id, len(self.members.open_states()), at)

    def _take_in(self, reading: Reading) -> None:
        """Hand tokens to their sessions, end what ended, queue what comes back."""
        for report in reading.prompts:
            self.book.report_prompt(report)
        self.book.deliver(reading.tokens)
        for sequence in reading.prefilled:
            if not sequence.first_token_at:
                self.queue.note_answered(sequence)
            self.accounts.prefilled(sequence)
            if sequence.trace is not None:
                sequence.trace.prefilled()
            if self.book.chronicle is not None:
                self.book.chronicle.first_token(sequence, self.clock())
        for ended in reading.ended:
            error = OctavoError(ended.message) if ended.reason is FinishReason.ERROR else None
            self._end(ended.sequence, ended.reason, error)
        for sequence in reading.returning:
            self._queue_again(sequence)

    def _queue_again(self, sequence: Sequence) -> None:
        """Before the fresh ones, with all its known tokens as the prompt."""
        assert self.model is not None
        sequence.extend_hashes(self.model.block_size)
        sequence.queue_tokens = len(sequence.token_ids)
        sequence.state = State.WAITING
        self.queue.push_front(sequence)

    def _end(
        self, sequence: Sequence, reason: FinishReason, error: OctavoError | None = None
    ) -> None:
        """The sequence holds no row and isn't queued: account what it was, tell its session."""
        submission, num_generated = sequence.request.submission, sequence.num_generated
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.lengths.observe(num_generated, submission.max_tokens)
        if sequence.charged_output:
            self._shares.correct(submission.tenant, num_generated - sequence.charged_output)
        self.book.end(sequence, reason, error)

    def _stop_all(
        self, request: Request, reason: FinishReason, error: OctavoError | None = None
    ) -> None:
        for sequence in request.sequences:
            self._stop(sequence, reason, error)

    def _stop(
        self, sequence: Sequence, reason: FinishReason, error: OctavoError | None = None
    ) -> None:
        """End a sequence from outside, wherever it is, unless it ended already."""
        if sequence.state is State.ENDED:
            return
        if sequence.state is State.WAITING:
            self.queue.remove(sequence)
        elif sequence.state is State.RUNNING:
            self.members.holder_of(sequence).release(sequence, is_dead=False)
        self._end(sequence, reason, error)
