"""The scheduler's gRPC edge: Session, Describe, Drain, Watch.

Must not know: how anything is decided. Entry point: `SchedulerService`.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from octavo import WIRE_VERSION
from octavo.errors import InvalidRequestError, OctavoError, UnavailableError
from octavo.model_spec import spec_to_proto
from octavo.serving import abort
from octavo.telemetry import Tracer
from octavo.v1 import scheduler_pb2, scheduler_pb2_grpc
from octavo_scheduler import frames
from octavo_scheduler.core import Cell
from octavo_scheduler.frames import LoadNumbers
from octavo_scheduler.live_view import LiveView
from octavo_scheduler.picture import Seat
from octavo_scheduler.sessions import Context, Session
from octavo_scheduler.takeover import Intake
from octavo_scheduler.worker_link import WorkerLink

_MIN_WATCH_MS, _MAX_WATCH_MS = 100, 60_000
# For the last frames of sessions that move.
_MOVE_S = 1.0
_LOOK_S = 0.01


class SchedulerService(scheduler_pb2_grpc.SchedulerServicer):
    """One per process. `drain` ends the accepted requests within its seconds."""

    def __init__(
        self,
        cell: Cell,
        intake: Intake,
        scheduler_id: str,
        flush_s: float,
        links: Callable[[], Sequence[WorkerLink]],
        drain: Callable[[float], Awaitable[int]],
        tracer: Tracer | None = None,
    ) -> None:
        self._cell = cell
        self._intake = intake
        self._sessions: set[Session] = set()
        self._scheduler_id = scheduler_id
        self._flush_s = flush_s
        self._links = links
        self._drain = drain
        self._tracer = tracer
        self._live_view = LiveView(cell, scheduler_id, self._seats)

    def load(self) -> LoadNumbers:
        """The cell's load now."""
        cell = self._cell
        return LoadNumbers(
            backlog_tokens=cell.backlog_tokens(),
            num_waiting=cell.num_waiting,
            num_running=cell.members.num_running,
            num_used_blocks=cell.members.num_used_blocks,
            num_blocks=cell.members.num_blocks,
            prefill_tokens_per_s=int(cell.members.prefill_tokens_per_s),
            draining=cell.is_draining,
            prompt_backlog_tokens=cell.prompt_backlog_tokens(),
        )

    async def move_sessions(
        self, successor: str, suspicions: Mapping[tuple[int, int], int]
    ) -> None:
        """End every session with MOVED; returns when they ended, or soon.

        `suspicions`: as `Cell.suspicions`.
        """
        for session in self._sessions:
            session.move(successor, suspicions)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MOVE_S):
                while self._sessions:  # noqa: ASYNC110 - rare, and short
                    await asyncio.sleep(_LOOK_S)

    async def Session(self, request_iterator: object, context: Context) -> None:  # noqa: ARG002, N802
        session = Session(
            *(context, self._cell, self._intake, self._scheduler_id, self._flush_s, self.load),
            self._tracer,
        )
        self._sessions.add(session)
        try:
            await session.serve()
        except OctavoError as error:
            await abort(context, error)
        except TimeoutError:
            await abort(context, InvalidRequestError("no hello came"))
        finally:
            self._sessions.discard(session)

    async def Describe(  # noqa: N802
        self,
        request: scheduler_pb2.SchedulerDescribeRequest,  # noqa: ARG002
        context: Context,
    ) -> scheduler_pb2.SchedulerDescribeResponse:
        cell = self._cell
        if cell.model is None:
            await abort(context, UnavailableError("no worker is attached yet", retry_after_ms=500))
        response = scheduler_pb2.SchedulerDescribeResponse(
            wire_version=WIRE_VERSION,
            scheduler_id=self._scheduler_id,
            model=spec_to_proto(cell.model),
            load=frames.load_to_proto(self.load()),
            max_request_tokens=cell.max_request_tokens,
        )
        for link in self._links():
            if link.member is not None:
                _fill_worker(response.workers.add(), link)
        return response

    async def Drain(  # noqa: N802
        self,
        request: scheduler_pb2.SchedulerDrainRequest,
        context: Context,  # noqa: ARG002
    ) -> scheduler_pb2.SchedulerDrainResponse:
        num_unfinished = await self._drain(request.grace_ms / 1000)
        return scheduler_pb2.SchedulerDrainResponse(num_unfinished=num_unfinished)

    async def Watch(  # noqa: N802
        self, request: scheduler_pb2.SchedulerWatchRequest, context: Context
    ) -> AsyncIterator[scheduler_pb2.SchedulerWatchResponse]:
        interval_ms = request.interval_ms
        if not _MIN_WATCH_MS <= interval_ms <= _MAX_WATCH_MS:
            await abort(
                context,
                InvalidRequestError(
                    f"interval_ms is {interval_ms}, not in {_MIN_WATCH_MS} .. {_MAX_WATCH_MS}",
                    param="interval_ms",
                ),
            )
        with self._live_view.watching():
            while True:
                picture = await self._live_view.picture_json()
                yield scheduler_pb2.SchedulerWatchResponse(picture_json=picture)
                await asyncio.sleep(interval_ms / 1000)

    def _seats(self) -> list[Seat]:
        links = self._links()
        return [Seat(link.worker_id, link.address, link.epoch, link.member) for link in links]


def _fill_worker(message: scheduler_pb2.WorkerStatus, link: WorkerLink) -> None:
    assert link.member is not None
    state = link.member.state
    message.worker_id = link.worker_id
    message.boot_id = link.boot_id
    message.address = link.address
    message.epoch = link.epoch
    message.num_rows = state.rows.num_held
    message.max_num_seqs = state.limits.max_num_seqs
    message.num_blocks = state.pool.num_blocks
    message.num_used_blocks = state.pool.num_used
    message.num_cached_blocks = state.pool.num_cached
    message.step = state.last_step
