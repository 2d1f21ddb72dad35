"""One router's session: its requests come in, frames go out.

Frames leave at most every `flush_s`, and at once when none left lately; while the stream can't
take one, output is gathered. A bad message rejects its handle and never ends the stream.

Must not know: workers, blocks. Entry point: `Session.serve`.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import grpc.aio

from octavo import WIRE_VERSION
from octavo.errors import FailedPreconditionError, OctavoError, UnavailableError
from octavo.v1 import scheduler_pb2
from octavo_scheduler import dispatch, frames
from octavo_scheduler.core import Cell
from octavo_scheduler.frames import LoadNumbers
from octavo_scheduler.outbox import Outbox

logger = logging.getLogger(__name__)

END_OF_STREAM: Any = grpc.aio.EOF  # type: ignore[attr-defined]
_HELLO_TIMEOUT_S = 5.0
_session_ids = itertools.count(1)

Context = grpc.aio.ServicerContext[Any, Any]


def check_wire_version(version: int) -> None:
    """Raise FailedPreconditionError unless the peer is at most one version away."""
    if abs(version - WIRE_VERSION) > 1:
        raise FailedPreconditionError(
            f"wire version {version} can't work with {WIRE_VERSION}; neighbours may differ by one"
        )


class Session:
    """A live stream; every request of it ends with it."""

    def __init__(
        self,
        context: Context,
        cell: Cell,
        scheduler_id: str,
        flush_s: float,
        load: Callable[[], LoadNumbers],
    ) -> None:
        self._context = context
        self._cell = cell
        self._scheduler_id = scheduler_id
        self._flush_s = flush_s
        self._load = load
        self._id = next(_session_ids)
        self._dirty = asyncio.Event()
        self._outbox = Outbox(self._dirty.set)

    async def serve(self) -> None:
        """From the hello to the end of the stream. Raises OctavoError for a bad handshake."""
        model = self._cell.model
        if model is None:
            raise UnavailableError("no worker is attached yet", retry_after_ms=500)
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            first = await self._context.read()
        if first is END_OF_STREAM or first.WhichOneof("message") != "hello":
            raise FailedPreconditionError("a session begins with its hello")
        check_wire_version(first.hello.wire_version)
        logger.info("session of router %s", first.hello.router_id)
        self._cell.open_session(self._id, self._outbox)
        try:
            welcome = scheduler_pb2.SessionWelcome(
                wire_version=WIRE_VERSION,
                scheduler_id=self._scheduler_id,
                model=dispatch.spec_to_proto(model),
            )
            response = scheduler_pb2.SchedulerSessionResponse(welcome=welcome)
            response.load.CopyFrom(frames.load_to_proto(self._load()))
            await self._context.write(response)
            await first_of(self._read(), self._write())
        finally:
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
                self._cell.cancel(self._id, cancel.handle, index, reason)
            elif kind == "ping":
                # The answer is a frame with the load, at least.
                self._dirty.set()
            else:
                logger.warning("ignored a message of kind %s", kind)

    def _submit(self, message: scheduler_pb2.Submit) -> None:
        model = self._cell.model
        assert model is not None
        try:
            submission = frames.submission_from_proto(message, model)
        except OctavoError as error:
            self._cell.reject(self._id, message.handle, error)
        else:
            self._cell.submit(self._id, submission)

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        flushed_at = 0.0
        while True:
            await self._dirty.wait()
            delay_s = flushed_at + self._flush_s - loop.time()
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            self._dirty.clear()
            await self._context.write(frames.frame_to_proto(self._outbox.take(), self._load()))
            flushed_at = loop.time()


async def first_of(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all until one returns or raises; the others are cancelled, its error is raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
