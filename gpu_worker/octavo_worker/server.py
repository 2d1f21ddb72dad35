"""The worker's gRPC edge: Describe, Attach and Steps.

Reads and writes messages on the event loop; everything slow is the engine thread's. Must not
know: tensors. Entry point: `WorkerService`.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from octavo import WIRE_VERSION
from octavo.capacity import capacity_to_proto
from octavo.errors import FailedPreconditionError, OctavoError, UnavailableError
from octavo.model_spec import spec_from_proto, spec_to_proto
from octavo.serving import abort
from octavo.streams import END_OF_STREAM
from octavo.v1 import worker_pb2, worker_pb2_grpc
from octavo.wire_version import check_wire_version
from octavo_worker import wire
from octavo_worker.engine import Engine
from octavo_worker.leadership import Leadership, Seat
from octavo_worker.loading import Loaded
from octavo_worker.spec import Phase, require_same
from octavo_worker.step_stream import StepStream

_logger = logging.getLogger(__name__)
_HELLO_TIMEOUT_S = 5.0

_Context = grpc.aio.ServicerContext[Any, Any]


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """One per process, on one event loop. `on_leader_change` is called after each change."""

    def __init__(
        self,
        worker_id: str,
        leadership: Leadership,
        on_leader_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.worker_id = worker_id
        self.phase = Phase.LOADING
        self._leadership = leadership
        self._on_leader_change = on_leader_change
        self._served: Loaded | None = None
        # Set when the epoch is over; each epoch has its own.
        self._superseded = asyncio.Event()
        self._stream: StepStream | None = None

    def compile(self) -> None:
        """The weights are loaded, kernels compile. May be called from any thread."""
        self.phase = Phase.COMPILING

    def run(self, served: Loaded) -> None:
        """The model is loaded: leaders may attach."""
        self._served = served
        self.phase = Phase.RUNNING

    def drain(self) -> None:
        """No one may attach any more; the leader is told at once."""
        self.phase = Phase.DRAINING
        if self._stream is not None:
            self._stream.tell_progress()

    @property
    def is_drained(self) -> bool:
        """Nobody leads, or the leader has nothing left here."""
        is_led = self._leadership.seat is Seat.LIVE
        return self._served is None or not is_led or self._served.engine.is_idle

    async def Describe(  # noqa: N802
        self,
        request: worker_pb2.WorkerDescribeRequest,  # noqa: ARG002
        context: _Context,  # noqa: ARG002
    ) -> worker_pb2.WorkerDescribeResponse:
        leadership, served = self._leadership, self._served
        return worker_pb2.WorkerDescribeResponse(
            wire_version=WIRE_VERSION,
            worker_id=self.worker_id,
            boot_id=leadership.boot_id,
            phase=int(self.phase),  # type: ignore[arg-type]
            model=spec_to_proto(served.spec) if served else None,
            capacity=capacity_to_proto(served.capacity) if served else None,
            epoch=leadership.epoch,
            leader_id=leadership.leader_id,
        )

    async def Attach(  # noqa: N802
        self, request: worker_pb2.WorkerAttachRequest, context: _Context
    ) -> AsyncIterator[worker_pb2.WorkerAttachResponse]:
        try:
            served = self._check_attach(request)
            epoch = self._take_seat(request, served.engine)
        except OctavoError as error:
            await abort(context, error)
        inventory = await asyncio.wrap_future(served.engine.reset())
        self._leadership.hear(epoch, time.monotonic())
        attached = worker_pb2.WorkerAttached(
            boot_id=self._leadership.boot_id,
            epoch=epoch,
            model=spec_to_proto(served.spec),
            capacity=capacity_to_proto(served.capacity),
            worker_id=self.worker_id,
        )
        yield worker_pb2.WorkerAttachResponse(attached=attached)
        for message in wire.inventory_to_proto(inventory):
            yield message

    def _check_attach(self, request: worker_pb2.WorkerAttachRequest) -> Loaded:
        check_wire_version(f"scheduler {request.scheduler_id!r}", request.wire_version)
        if self._served is None or self.phase is not Phase.RUNNING:
            raise UnavailableError(f"worker {self.worker_id!r} is {self.phase.name.lower()}")
        if request.HasField("required_model"):
            require_same(self._served.spec, spec_from_proto(request.required_model))
        return self._served

    def _take_seat(self, request: worker_pb2.WorkerAttachRequest, engine: Engine) -> int:
        is_silent = self._leadership.seat is Seat.LIVE
        epoch = self._leadership.attach(
            request.scheduler_id, request.expected_epoch, time.monotonic()
        )
        if is_silent:
            engine.detach(drop_plans=True)
        self._superseded.set()
        self._superseded = asyncio.Event()
        _logger.info("led by %s in epoch %d", request.scheduler_id, epoch)
        self._on_leader_change()
        return epoch

    async def Steps(  # noqa: N802
        self,
        request_iterator: AsyncIterator[worker_pb2.WorkerStepsRequest],  # noqa: ARG002
        context: _Context,
    ) -> None:
        try:
            hello = await _read_hello(context)
            await self._serve_leader(hello, context)
        except OctavoError as error:
            await abort(context, error)

    async def _serve_leader(self, hello: worker_pb2.StepsHello, context: _Context) -> None:
        check_wire_version("the scheduler", hello.wire_version)
        self._leadership.open_stream(hello.boot_id, hello.epoch, time.monotonic())
        assert self._served is not None  # an epoch began, so a model is served
        stream = StepStream(
            context,
            hello.epoch,
            self._leadership,
            self._served.engine,
            lambda: self.phase,
            self._superseded,
        )
        self._stream = stream
        self._on_leader_change()
        try:
            await stream.serve()
        finally:
            if self._stream is stream:
                self._stream = None
            self._leadership.close_stream(hello.epoch)
            _logger.info("the leader's stream of epoch %d is over", hello.epoch)
            self._on_leader_change()


async def _read_hello(context: _Context) -> worker_pb2.StepsHello:
    try:
        message = await asyncio.wait_for(context.read(), _HELLO_TIMEOUT_S)
    except TimeoutError:
        raise FailedPreconditionError(f"no hello within {_HELLO_TIMEOUT_S:g} s") from None
    if message is END_OF_STREAM or message.WhichOneof("message") != "hello":
        raise FailedPreconditionError("a Steps stream begins with a hello")
    return message.hello
