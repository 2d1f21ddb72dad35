"""Taking over from a lost scheduler: its requests wait for its workers, which have their prefixes.

A router submits a lost scheduler's requests again to its successor, often before that one leads
the lost workers. What is submitted again is held until they are attached, `PATIENCE_S` at most;
then the cell gets it, in the order in which it came. Everything else goes to the cell at once.

Must not know: how requests are served, protos. Entry points: `Intake.submit`, `Intake.cancel`.
"""

import asyncio
import logging
from dataclasses import dataclass, field, replace

from octavo.cancel_reason import CancelReason
from octavo_scheduler.core import Cell
from octavo_scheduler.sequence import Submission
from octavo_scheduler.worker_links import WorkerLinks

logger = logging.getLogger(__name__)

PATIENCE_S = 2.0
_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class _Held:
    session_id: int
    submission: Submission
    since: float


@dataclass(slots=True)
class _TakeOver:
    """Of one lost scheduler."""

    until: float
    held: dict[tuple[int, int], _Held] = field(default_factory=dict[tuple[int, int], _Held])


class Intake:
    """What sessions hand in, on its way to the cell. All of one event loop."""

    def __init__(self, cell: Cell, links: WorkerLinks, scheduler_id: str) -> None:
        self._cell = cell
        self._links = links
        self._scheduler_id = scheduler_id
        self._take_overs: dict[str, _TakeOver] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, session_id: int, submission: Submission) -> None:
        """Pass a request to the cell, now or once its scheduler's workers are here."""
        lost_id = submission.lost_scheduler_id
        if not lost_id or lost_id == self._scheduler_id:
            self._cell.submit(session_id, submission)
            return
        take_over = self._take_overs.get(lost_id) or self._begin(lost_id)
        if take_over is None:
            self._cell.submit(session_id, submission)
            return
        held = _Held(session_id, submission, self._cell.clock())
        take_over.held[session_id, submission.handle] = held

    def cancel(
        self, session_id: int, handle: int, sequence_index: int | None, reason: CancelReason
    ) -> None:
        """End a request, or one sequence of it; one that is held gets to the cell for that."""
        for take_over in self._take_overs.values():
            held = take_over.held.pop((session_id, handle), None)
            if held is not None:
                self._pass_on(held)
        self._cell.cancel(session_id, handle, sequence_index, reason)

    def close_session(self, session_id: int) -> None:
        """The router is gone, and wants nothing of what it handed in."""
        for take_over in self._take_overs.values():
            for key in [key for key in take_over.held if key[0] == session_id]:
                del take_over.held[key]

    # ---- inside

    def _begin(self, lost_id: str) -> _TakeOver | None:
        """Start to wait for a lost scheduler's workers; None if there is none to wait for."""
        self._links.note_lost(lost_id)
        awaited = self._links.awaited_of(lost_id)
        if not awaited:
            return None
        logger.info("taking over from %s: %d workers to attach", lost_id, len(awaited))
        take_over = _TakeOver(self._cell.clock() + PATIENCE_S)
        self._take_overs[lost_id] = take_over
        task = asyncio.create_task(self._wait(lost_id, take_over), name=f"take over {lost_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return take_over

    async def _wait(self, lost_id: str, take_over: _TakeOver) -> None:
        while (awaited := self._links.awaited_of(lost_id)) and (  # noqa: ASYNC110 - short
            self._cell.clock() < take_over.until
        ):
            await asyncio.sleep(_LOOK_S)
        del self._take_overs[lost_id]
        logger.info(
            "took over from %s: %d requests go on, %d workers are missing",
            *(lost_id, len(take_over.held), len(awaited)),
        )
        for held in take_over.held.values():
            self._pass_on(held)

    def _pass_on(self, held: _Held) -> None:
        submission = held.submission
        if submission.deadline_ms is not None:
            waited_ms = int(1000 * (self._cell.clock() - held.since))
            submission = replace(submission, deadline_ms=max(submission.deadline_ms - waited_ms, 1))
        self._cell.submit(held.session_id, submission)
