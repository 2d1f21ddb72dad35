"""The book of accepted requests: whose they are, when they are due, and how each one ended.

Every accepted sequence is ended here exactly once: told to its session and counted.

Must not know: workers, the queue, plans. Entry points: `accept`, `end`, `next_due`.
"""

import heapq

import numpy as np

from octavo.errors import OctavoError
from octavo_scheduler.accounts import Accounts
from octavo_scheduler.chronicle import Chronicle
from octavo_scheduler.outbox import (
    FinishedNote,
    Outbox,
    PromptLogprobsNote,
    RejectedNote,
    StartedNote,
    SuspectNote,
)
from octavo_scheduler.results import PromptReport, TokenColumns, select
from octavo_scheduler.sequence import (
    FinishReason,
    Request,
    Sequence,
    State,
    Submission,
    make_sequences,
)

# Deadlines of requests that ended are kept for a while: so many, and one for each that lives.
_NUM_PAST = 64


class RequestBook:
    """Requests by (session id, handle), and the sessions' outboxes."""

    def __init__(self, accounts: Accounts) -> None:
        self.outboxes: dict[int, Outbox] = {}
        self.requests: dict[tuple[int, int], Request] = {}
        # Kept only while somebody watches.
        self.chronicle: Chronicle | None = None
        self._accounts = accounts
        self._serial = 0
        self._due: list[tuple[float, int, Request]] = []

    def make(self, session_id: int, submission: Submission, now: float, block_size: int) -> Request:
        """A request with its sequences, not yet accepted."""
        self._serial += 1
        timeout_ms = submission.deadline_ms
        deadline = None if timeout_ms is None else now + timeout_ms / 1000
        num_prompt_tokens = len(submission.prompt_token_ids) // 4
        request = Request(submission, session_id, self._serial, now, deadline, num_prompt_tokens)
        if submission.trace is not None:
            request.exemplar = submission.trace.exemplar
        request.sequences = make_sequences(request, block_size)
        return request

    def accept(self, request: Request) -> None:
        """From now on each of its sequences has to end."""
        if request.sequences:
            self.requests[(request.session_id, request.submission.handle)] = request
        if request.deadline is not None:
            heapq.heappush(self._due, (request.deadline, request.serial, request))
            if len(self._due) > 2 * len(self.requests) + _NUM_PAST:
                self._forget_past()

    def reject(self, session_id: int, handle: int, error: OctavoError, num_sequences: int) -> None:
        """Refuse a request as a whole."""
        self._accounts.rejected(num_sequences)
        if outbox := self.outboxes.get(session_id):
            outbox.rejected(RejectedNote(handle, error))

    def start(self, sequence: Sequence, now: float) -> None:
        """The sequence got a row; the session hears of the first time."""
        sequence.admitted_at = now
        if sequence.was_started:
            return
        sequence.was_started = True
        request = sequence.request
        waited_s = now - request.arrival
        if outbox := self.outboxes.get(request.session_id):
            handle, waited_ms = request.submission.handle, int(1000 * waited_s)
            outbox.started(StartedNote(handle, sequence.index, sequence.num_cached, waited_ms))

    def suspect(self, sequence: Sequence) -> None:
        """The session hears how many workers died on the sequence's request."""
        request = sequence.request
        if outbox := self.outboxes.get(request.session_id):
            count = max(other.num_suspicions for other in request.sequences)
            outbox.suspect(SuspectNote(request.submission.handle, count))

    def report_prompt(self, report: PromptReport) -> None:
        """Hand log-probabilities of a prompt to its session."""
        request = report.sequence.request
        if outbox := self.outboxes.get(request.session_id):
            handle = request.submission.handle
            outbox.prompt_logprobs(PromptLogprobsNote(handle, report.start, report.entries))

    def deliver(self, tokens: TokenColumns) -> None:
        """Hand a step's tokens to their sessions."""
        if not tokens.token_ids.size:
            return
        first = int(tokens.session[0])
        if (tokens.session == first).all():
            if outbox := self.outboxes.get(first):
                outbox.push(tokens)
            return
        for session_id in np.unique(tokens.session):
            if outbox := self.outboxes.get(int(session_id)):
                outbox.push(select(tokens, tokens.session == session_id))

    def end(
        self, sequence: Sequence, reason: FinishReason, error: OctavoError | None = None
    ) -> None:
        """The one place where a sequence ends; it holds no row and isn't queued."""
        assert sequence.state is not State.ENDED
        sequence.state = State.ENDED
        self._accounts.ended(sequence, reason)
        if self.chronicle is not None:
            self.chronicle.ended(sequence, reason)
        if sequence.trace is not None:
            counts = (sequence.num_generated, sequence.num_preemptions, sequence.num_moves)
            sequence.trace.finished(reason.value, *counts, _problem_of(reason, error))
        request = sequence.request
        handle = request.submission.handle
        outbox = self.outboxes.get(request.session_id)
        if outbox is not None and reason is not FinishReason.MOVED:
            outbox.finished(
                FinishedNote(
                    handle,
                    sequence.index,
                    reason,
                    sequence.num_generated,
                    sequence.num_preemptions,
                    sequence.num_moves,
                    error,
                )
            )
        if not request.num_live:
            del self.requests[(request.session_id, handle)]

    def next_deadline(self) -> float | None:
        """The earliest deadline of a request that lives."""
        while self._due and not self._due[0][2].num_live:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def next_due(self, now: float) -> Request | None:
        """A request whose deadline passed; each is given once."""
        deadline = self.next_deadline()
        if deadline is None or deadline > now:
            return None
        return heapq.heappop(self._due)[2]

    def _forget_past(self) -> None:
        """An early deadline of a long request must not keep all that ended after it."""
        self._due = [item for item in self._due if item[2].num_live]
        heapq.heapify(self._due)


def _problem_of(reason: FinishReason, error: OctavoError | None) -> str | None:
    """What a trace says of a sequence that didn't end well."""
    if reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.MOVED):
        return None
    return reason.value if error is None else error.message
