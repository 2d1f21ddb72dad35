"""The stream to one worker: describe, attach, lead; and again, for ever, when it breaks.

    dial -> Describe (until it runs) -> Attach (inventory) -> Steps -> lost -> back off -> dial

The link turns plans and results into messages; what to plan is the cell's. A stream that ends
takes all rows with it: the cell moves them, and the worker comes back with its cache only.

Must not know: requests, sessions, policies. Entry points: `WorkerLink.run`, `break_off`.
"""

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from octavo import WIRE_VERSION
from octavo.capacity import capacity_from_proto
from octavo.errors import FailedPreconditionError, OctavoError
from octavo.model_spec import spec_from_proto, spec_to_proto
from octavo.security import OPEN, Security
from octavo.serving import error_from_rpc, open_channel
from octavo.streams import END_OF_STREAM, ending, first_of
from octavo.v1 import worker_pb2, worker_pb2_grpc
from octavo.wire_version import check_wire_version
from octavo_scheduler import dispatch
from octavo_scheduler.core import Cell
from octavo_scheduler.members import Member, state_of
from octavo_scheduler.plan import Plan
from octavo_scheduler.recovery import Loss
from octavo_scheduler.results import WorkerProtocolError

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 5.0
# An inventory may be long.
_ATTACH_TIMEOUT_S = 60.0
_POLL_PHASE_S = 0.05
_PING_S = 1.0
_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 1.0

_StepsCall = grpc.aio.StreamStreamCall[Any, Any]


class WorkerLink:
    """Leads the worker at `address` whenever it can be led."""

    def __init__(
        self,
        address: str,
        cell: Cell,
        scheduler_id: str,
        on_attached: Callable[[], None] = lambda: None,
        security: Security = OPEN,
        on_taken: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.address = address
        self._security = security
        self.worker_id = ""
        self.boot_id = ""
        self.epoch = 0
        self.member: Member | None = None
        self._cell = cell
        self._scheduler_id = scheduler_id
        self._on_attached = on_attached
        self._on_taken = on_taken
        # The last attempt to reach it failed, or it hangs.
        self.is_away = False
        # Who leads it now, if the stream ended for that.
        self._taken_by = ""
        self._outbox: deque[Plan] = deque()
        self._has_mail = asyncio.Event()
        self._broken = asyncio.Event()
        self._broken_as = Loss.CRASH
        self._is_released = False

    def send(self, plan: Plan) -> None:
        """Queue a plan for the stream; never blocks."""
        self._outbox.append(plan)
        self._has_mail.set()

    def break_off(self, loss: Loss) -> None:
        """End the present stream; the worker may be led again later."""
        self._broken_as = loss
        self.is_away = loss is Loss.HANG
        self._broken.set()

    def release(self) -> None:
        """Let the worker go after the plans that are queued: anybody may attach it at once."""
        self._is_released = True
        self._has_mail.set()

    async def run(self) -> None:
        """Lead the worker until released; reconnect for ever."""
        backoff_s = _MIN_BACKOFF_S
        last_problem = ""
        while not self._is_released:
            try:
                async with open_channel(self.address, self._security) as channel:
                    await self._lead(worker_pb2_grpc.WorkerStub(channel))
                problem = "the stream ended"
            except grpc.aio.AioRpcError as error:
                problem = error_from_rpc(error).message
                self.is_away = error.code() is grpc.StatusCode.UNAVAILABLE
            except (OctavoError, WorkerProtocolError, TimeoutError, ValueError) as error:
                problem = str(error) or type(error).__name__
            except asyncio.CancelledError:
                # gRPC raises it too when the peer ends a call as cancelled.
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                problem = "the worker cancelled the call"
            except Exception:
                # Our own mistake costs this worker's rows a move, not the cell its worker.
                logger.exception("worker %s", self.address)
                problem = "an internal error"
            if self._is_released:
                return
            if self.member is not None:
                self.member = None
                backoff_s, last_problem = _MIN_BACKOFF_S, ""
            if problem != last_problem:
                # Services start in any order: a worker that isn't there yet is no trouble.
                is_early = not self.worker_id and not last_problem
                level = logging.INFO if is_early else logging.WARNING
                logger.log(level, "worker %s: %s; trying again", self.address, problem)
                last_problem = problem
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _lead(self, stub: worker_pb2_grpc.WorkerStub) -> None:
        described = await self._describe(stub)
        attached, inventory = await self._attach(stub, described)
        call: _StepsCall = stub.Steps()
        member: Member | None = None
        self.is_away = False
        self._taken_by = ""
        self._broken.clear()
        try:
            hello = worker_pb2.StepsHello(
                wire_version=WIRE_VERSION, boot_id=attached.boot_id, epoch=attached.epoch
            )
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                await call.write(worker_pb2.WorkerStepsRequest(hello=hello))
                welcome: Any = await call.read()
            if welcome is END_OF_STREAM or welcome.WhichOneof("message") != "welcome":
                raise FailedPreconditionError(f"no welcome, but {await call.details()}")
            check_wire_version(f"worker {self.address}", welcome.welcome.wire_version)
            self._outbox.clear()
            member = await self._join(attached, inventory)
            await first_of(self._read(call, member), self._keep_writing(call), self._wait_broken())
        finally:
            call.cancel()
            if member is not None:
                loss = self._loss_of(member)
                logger.info("worker %s left the cell (%s)", self.worker_id, loss.name.lower())
                self._cell.detach(member, loss)
                if loss is Loss.TAKEN:
                    self._on_taken(self._taken_by)
        code = await call.code()
        if code not in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED):
            raise FailedPreconditionError(await call.details() or code.name)

    async def _describe(
        self, stub: worker_pb2_grpc.WorkerStub
    ) -> worker_pb2.WorkerDescribeResponse:
        """Wait until the worker runs; what it says then."""
        while True:
            request = worker_pb2.WorkerDescribeRequest()
            described = await stub.Describe(request, timeout=_CALL_TIMEOUT_S)
            check_wire_version(f"worker {self.address}", described.wire_version)
            if described.phase == worker_pb2.WORKER_PHASE_RUNNING:
                return described
            await asyncio.sleep(_POLL_PHASE_S)

    async def _attach(
        self, stub: worker_pb2_grpc.WorkerStub, described: worker_pb2.WorkerDescribeResponse
    ) -> tuple[worker_pb2.WorkerAttached, list[tuple[list[int], list[bytes]]]]:
        """Become the leader; the new epoch and the worker's sealed blocks."""
        model = self._cell.model
        request = worker_pb2.WorkerAttachRequest(
            wire_version=WIRE_VERSION,
            scheduler_id=self._scheduler_id,
            expected_epoch=described.epoch,
        )
        if model is not None:
            request.required_model.CopyFrom(spec_to_proto(model))
        attached: worker_pb2.WorkerAttached | None = None
        inventory: list[tuple[list[int], list[bytes]]] = []
        with ending(stub.Attach(request, timeout=_ATTACH_TIMEOUT_S)) as call:
            async for response in call:
                if response.WhichOneof("event") == "attached":
                    attached = response.attached
                else:
                    inventory.append(dispatch.inventory_from_proto(response.inventory))
        if attached is None:
            raise FailedPreconditionError("the worker didn't say that it is attached")
        return attached, inventory

    async def _join(
        self,
        attached: worker_pb2.WorkerAttached,
        inventory: list[tuple[list[int], list[bytes]]],
    ) -> Member:
        self.worker_id, self.boot_id, self.epoch = (
            attached.worker_id,
            attached.boot_id,
            attached.epoch,
        )
        capacity = capacity_from_proto(attached.capacity)
        spec = spec_from_proto(attached.model)
        state = state_of(self.worker_id, spec, capacity, self._cell.settings)
        for blocks, hashes in inventory:
            state.restore(blocks, hashes)
            # A large cache must not hold up the steps of other workers.
            await asyncio.sleep(0)
        # Another worker may have joined, and set the model, meanwhile.
        if self._cell.model not in (None, spec):
            raise FailedPreconditionError(f"it serves {spec}, this cell {self._cell.model}")
        self.member = self._cell.attach(state, spec, self)
        num_sealed = sum(len(blocks) for blocks, _ in inventory)
        logger.info(
            "leading worker %s at %s in epoch %d: %d blocks, %d sealed",
            *(self.worker_id, self.address, self.epoch, capacity.num_blocks, num_sealed),
        )
        self._on_attached()
        return self.member

    async def _read(self, call: _StepsCall, member: Member) -> None:
        message: Any
        while (message := await call.read()) is not END_OF_STREAM:
            kind = message.WhichOneof("message")
            if kind == "results":
                self._cell.read(member, map(dispatch.outcome_from_proto, message.results.results))
            elif kind == "progress":
                progress = message.progress
                is_running = progress.phase == worker_pb2.WORKER_PHASE_RUNNING
                is_draining = progress.phase == worker_pb2.WORKER_PHASE_DRAINING
                self._cell.note_progress(
                    member, progress.step, is_running=is_running, is_leaving=is_draining
                )
            elif kind == "superseded":
                self._taken_by = message.superseded.leader_id
                return

    async def _keep_writing(self, call: _StepsCall) -> None:
        """Write until the stream is over; why it broke is the reader's to learn."""
        try:
            await self._write(call)
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            await asyncio.sleep(_CALL_TIMEOUT_S)

    async def _write(self, call: _StepsCall) -> None:
        ping = worker_pb2.WorkerStepsRequest(ping=worker_pb2.StepsPing())
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PING_S):
                    await self._has_mail.wait()
            self._has_mail.clear()
            if not self._outbox and not self._is_released:
                await call.write(ping)
            while self._outbox:
                plan = dispatch.plan_to_proto(self._outbox.popleft())
                await call.write(worker_pb2.WorkerStepsRequest(plan=plan))
            if self._is_released:
                release = worker_pb2.WorkerStepsRequest(release=worker_pb2.StepsRelease())
                await call.write(release)
                await call.done_writing()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_PING_S):
                        await call.code()
                return

    async def _wait_broken(self) -> None:
        await self._broken.wait()

    def _loss_of(self, member: Member) -> Loss:
        if self._taken_by:
            return Loss.TAKEN
        if self._broken.is_set():
            return self._broken_as
        return Loss.LEFT if member.is_leaving or self._is_released else Loss.CRASH
