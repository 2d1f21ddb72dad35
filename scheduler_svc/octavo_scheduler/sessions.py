"""One router's session: its requests come in, frames go out.

Frames leave at most every `flush_s`, and at once when none left lately; while the stream can't
take one, output is gathered. A bad message rejects its handle and never ends the stream.

A session ends with its router, or with MOVED: then the router submits everything elsewhere.

Must not know: workers, blocks. Entry points: `Session.serve`, `Session.move`.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import grpc.aio

from octavo import WIRE_VERSION
from octavo.errors import FailedPreconditionError, OctavoError, UnavailableError
from octavo.model_spec import spec_to_proto
from octavo.streams import END_OF_STREAM, first_of
from octavo.telemetry import Tracer
from octavo.v1 import scheduler_pb2
from octavo.wire_version import check_wire_version
from octavo_scheduler import frames
from octavo_scheduler.core import Cell
from octavo_scheduler.frames import LoadNumbers
from octavo_scheduler.outbox import Outbox
from octavo_scheduler.takeover import Intake

logger = logging.getLogger(__name__)

_HELLO_TIMEOUT_S = 5.0
_session_ids = itertools.count(1)

Context = grpc.aio.ServicerContext[Any, Any]


class Session:
    """A live stream; every request of it ends with it."""

    def __init__(
        self,
        context: Context,
        cell: Cell,
        intake: Intake,
        scheduler_id: str,
        flush_s: float,
        load: Callable[[], LoadNumbers],
        tracer: Tracer | None = None,
    ) -> None:
        self._context = context
        self._cell = cell
        self._intake = intake
        self._scheduler_id = scheduler_id
        self._flush_s = flush_s
        self._load = load
        self._tracer = tracer
        self._id = next(_session_ids)
        self._dirty = asyncio.Event()
        self._outbox = Outbox(self._dirty.set)
        # Set once the session is to end.
        self._moved: scheduler_pb2.Moved | None = None

    def move(self, successor: str, suspicions: Mapping[tuple[int, int], int]) -> None:
        """Send what is owed and MOVED, then end. `successor`: an address; "" = choose."""
        self._moved = scheduler_pb2.Moved(successor=successor)
        for (session_id, handle), count in suspicions.items():
            if session_id == self._id:
                self._moved.suspects.add(handle=handle, num_suspicions=count)
        self._dirty.set()

    async def serve(self) -> None:
        """From the hello to the end of the stream. Raises OctavoError for a bad handshake."""
        model = self._cell.model
        if model is None:
            raise UnavailableError("no worker is attached yet", retry_after_ms=500)
        if self._cell.is_draining:
            raise UnavailableError("the scheduler is draining", retry_after_ms=500)
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            first = await self._context.read()
        if first is END_OF_STREAM or first.WhichOneof("message") != "hello":
            raise FailedPreconditionError("a session begins with its hello")
        check_wire_version(f"router {first.hello.router_id!r}", first.hello.wire_version)
        logger.info("session of router %s", first.hello.router_id)
        self._cell.open_session(self._id, self._outbox)
        try:
            welcome = scheduler_pb2.SessionWelcome(
                wire_version=WIRE_VERSION,
                scheduler_id=self._scheduler_id,
                model=spec_to_proto(model),
            )
            response = scheduler_pb2.SchedulerSessionResponse(welcome=welcome)
            response.load.CopyFrom(frames.load_to_proto(self._load()))
            await self._context.write(response)
            await first_of(self._read(), self._write())
        finally:
            self._intake.close_session(self._id)
            self._cell.close_session(self._id)
            logger.info("session of router %s is over", first.hello.router_id)

    async def _read(self) -> None:
        while (message := await self._context.read()) is not END_OF_STREAM:
            kind = message.WhichOneof("message")
            if kind == "submit":
                self._submit(message.submit)
            elif kind == "cancel":
                cancel = message.cancel
                index = cancel.sequence_index if cancel.HasField("sequence_index") else None
                reason = frames.cancel_reason_from_proto(cancel.reason)
                self._intake.cancel(self._id, cancel.handle, index, reason)
            elif kind == "ping":
                # The answer is a frame with the load, at least.
                self._dirty.set()
            else:
                logger.warning("ignored a message of kind %s", kind)

    def _submit(self, message: scheduler_pb2.Submit) -> None:
        model = self._cell.model
        assert model is not None
        try:
            submission = frames.submission_from_proto(message, model, self._tracer)
        except OctavoError as error:
            self._cell.reject(self._id, message.handle, error)
        else:
            self._intake.submit(self._id, submission)

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        flushed_at = 0.0
        while True:
            await self._dirty.wait()
            delay_s = flushed_at + self._flush_s - loop.time()
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            self._dirty.clear()
            frame = frames.frame_to_proto(self._outbox.take(), self._load())
            if self._moved is not None:
                frame.moved.CopyFrom(self._moved)
                await self._context.write(frame)
                return
            await self._context.write(frame)
            flushed_at = loop.time()
