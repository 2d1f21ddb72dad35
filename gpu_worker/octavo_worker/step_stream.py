"""One leader's Steps stream: plans in; results and progress out.

Lives from the accepted hello until the leader releases the worker, breaks off, breaks a rule,
or is superseded. Must not know: who may lead (`leadership`), tensors. Entry point:
`StepStream.serve`.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc.aio

from octavo import WIRE_VERSION
from octavo.errors import FailedPreconditionError
from octavo.streams import END_OF_STREAM, first_of
from octavo.v1 import worker_pb2
from octavo_worker import wire
from octavo_worker.engine import Engine
from octavo_worker.leadership import Leadership
from octavo_worker.outbox import Outbox
from octavo_worker.plan import StepOutcome
from octavo_worker.progress import ProgressThread
from octavo_worker.spec import Phase

# For a superseded leader's last message to leave.
_FAREWELL_S = 0.5

_Item = StepOutcome | worker_pb2.StepsProgress | worker_pb2.StepsSuperseded


class StepStream:
    """Serves `epoch`'s leader on `context`. `phase` is asked for every progress message."""

    def __init__(
        self,
        context: "grpc.aio.ServicerContext[Any, Any]",
        epoch: int,
        leadership: Leadership,
        engine: Engine,
        phase: Callable[[], Phase],
        superseded: asyncio.Event,
    ) -> None:
        self._context = context
        self._epoch = epoch
        self._leadership = leadership
        self._engine = engine
        self._phase = phase
        self._superseded = superseded
        self._outbox: Outbox[_Item] = Outbox()
        self._progress = ProgressThread(self._put_progress)
        self._is_released = False

    def tell_progress(self) -> None:
        """Tell the leader the phase now, not at the next time."""
        self._progress.wake()

    async def serve(self) -> None:
        """Until the stream is over. FailedPreconditionError: the leader broke a rule."""
        welcome = worker_pb2.StepsWelcome(wire_version=WIRE_VERSION)
        self._engine.attach(self._outbox.put)
        try:
            await self._context.write(worker_pb2.WorkerStepsResponse(welcome=welcome))
            with self._progress:
                await first_of(self._read(), self._write(), self._watch())
            if self._superseded.is_set():
                raise FailedPreconditionError(
                    f"epoch {self._epoch} is over: another scheduler attached"
                )
        finally:
            if not self._superseded.is_set():
                self._engine.detach(drop_plans=not self._is_released)

    async def _read(self) -> None:
        while True:
            message = await self._context.read()
            if message is END_OF_STREAM or self._superseded.is_set():
                return
            self._leadership.hear(self._epoch, time.monotonic())
            kind = message.WhichOneof("message")
            if kind == "plan":
                self._engine.submit(wire.plan_from_proto(message.plan))
            elif kind == "release":
                self._is_released = True
                return
            elif kind != "ping":
                raise FailedPreconditionError(f"unexpected message {kind!r} in a Steps stream")

    async def _write(self) -> None:
        while True:
            outcomes: list[StepOutcome] = []
            for item in await self._outbox.take():
                if isinstance(item, StepOutcome):
                    outcomes.append(item)
                elif isinstance(item, worker_pb2.StepsProgress):
                    await self._context.write(worker_pb2.WorkerStepsResponse(progress=item))
                else:
                    await self._context.write(worker_pb2.WorkerStepsResponse(superseded=item))
                    return
            if outcomes:
                await self._context.write(wire.results_to_proto(outcomes))

    def _put_progress(self) -> None:
        progress = self._engine.progress()
        self._outbox.put(
            worker_pb2.StepsProgress(
                phase=int(self._phase()),  # type: ignore[arg-type]
                step=progress.step,
                num_queued_plans=progress.num_queued_plans,
            )
        )

    async def _watch(self) -> None:
        await self._superseded.wait()
        leadership = self._leadership
        self._outbox.put(
            worker_pb2.StepsSuperseded(leader_id=leadership.leader_id, epoch=leadership.epoch)
        )
        # The writer ends with it, unless the leader takes nothing any more.
        await asyncio.sleep(_FAREWELL_S)
