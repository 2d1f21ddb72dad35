# ruff: noqa: N802, ARG002
"""A worker without a model: the real gRPC service over a `FakeDevice`.

As a process: `python -m tests.fakes.fake_worker --port 0 --step-ms 2` logs
`ready: worker on host:port`; kill it, stop it (SIGSTOP freezes everything), or let it hang
(SIGUSR1 stops only its steps, SIGUSR2 lets them go on). Or in this process: `FakeWorker`.

Entry points: `FakeWorker.start`, `main`.
"""

import argparse
import asyncio
import contextlib
import logging
import secrets
import signal
import time
from collections import deque
from dataclasses import fields
from typing import Any

import grpc.aio

from octavo import WIRE_VERSION
from octavo.blocks import HASH_VERSION
from octavo.errors import FailedPreconditionError, OctavoError
from octavo.logs import setup_logging
from octavo.registry import WorkerRecord
from octavo.serving import GrpcServer, abort, announce_ready
from octavo.streams import first_of
from octavo.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from tests.fakes.fake_device import FakeDevice, FakeSize

logger = logging.getLogger("fake_worker")

Context = grpc.aio.ServicerContext[Any, Any]


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """One leader at a time, plans in order, repeats while leased."""

    def __init__(
        self, size: FakeSize | None = None, *, worker_id: str = "fake", step_s: float = 0.0
    ) -> None:
        self.device = FakeDevice(size or FakeSize())
        self.worker_id = worker_id
        self.step_s = step_s
        self.boot_id = secrets.token_hex(4)
        self.phase: worker_pb2.WorkerPhase = worker_pb2.WORKER_PHASE_RUNNING
        self.epoch = 0
        self.leader_id = self.last_leader_id = ""
        self.wire_version = WIRE_VERSION
        self.port = 0
        self.num_plans = 0
        self._may_step = asyncio.Event()
        self._may_step.set()
        self._plans: deque[tuple[worker_pb2.Plan, float]] = deque()
        self._has_plan = asyncio.Event()
        self._stream_epoch = 0
        self._writing = asyncio.Lock()
        self._superseded: asyncio.Future[worker_pb2.StepsSuperseded] | None = None
        self._server = GrpcServer()

    def record(self) -> WorkerRecord:
        """What a worker tells the registry of itself."""
        spec, size = self._spec(), self.device.size
        return WorkerRecord(
            self.worker_id,
            self.address,
            self.boot_id,
            *(spec.name, spec.revision, size.num_blocks, size.max_num_seqs),
            *(self.leader_id, self.epoch, self.last_leader_id),
        )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> None:
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server.server)
        self.port = await self._server.start("127.0.0.1", port, worker_pb2.DESCRIPTOR)
        await self._server.set_serving(True)

    async def stop(self) -> None:
        """Gone at once, as if killed."""
        await self._server.stop(0)

    def freeze(self) -> None:
        """Stop stepping; the stream and its progress live on."""
        self._may_step.clear()

    def thaw(self) -> None:
        self._may_step.set()

    # ---- RPCs

    async def Describe(
        self, request: worker_pb2.WorkerDescribeRequest, context: Context
    ) -> worker_pb2.WorkerDescribeResponse:
        return worker_pb2.WorkerDescribeResponse(
            wire_version=self.wire_version,
            worker_id=self.worker_id,
            boot_id=self.boot_id,
            phase=self.phase,
            model=self._spec(),
            capacity=self._capacity(),
            epoch=self.epoch,
            leader_id=self.leader_id,
        )

    async def Attach(self, request: worker_pb2.WorkerAttachRequest, context: Context) -> None:
        try:
            self._check_attach(request)
        except OctavoError as error:
            await abort(context, error)
        self.epoch += 1
        self.leader_id = self.last_leader_id = request.scheduler_id
        # The running step ends first; one that hangs never does.
        await self._may_step.wait()
        self._plans.clear()
        self.device.reset()
        attached = worker_pb2.WorkerAttached(
            boot_id=self.boot_id,
            epoch=self.epoch,
            model=self._spec(),
            capacity=self._capacity(),
            worker_id=self.worker_id,
        )
        await context.write(worker_pb2.WorkerAttachResponse(attached=attached))
        sealed = worker_pb2.SealedBlocks()
        for block, block_hash in self.device.sealed.items():
            sealed.block_ids += block.to_bytes(4, "little")
            sealed.block_hashes += block_hash
        if sealed.block_ids:
            await context.write(worker_pb2.WorkerAttachResponse(inventory=sealed))

    def _check_attach(self, request: worker_pb2.WorkerAttachRequest) -> None:
        if self._stream_epoch:
            raise FailedPreconditionError(f"led by {self.leader_id}")
        if request.expected_epoch != self.epoch:
            raise FailedPreconditionError(f"the epoch is {self.epoch}")
        if request.HasField("required_model") and request.required_model != self._spec():
            raise FailedPreconditionError("another model")

    async def Steps(self, request_iterator: object, context: Context) -> None:
        hello = (await context.read()).hello
        if (hello.boot_id, hello.epoch) != (self.boot_id, self.epoch) or self._stream_epoch:
            await abort(context, FailedPreconditionError(f"epoch {hello.epoch} leads no more"))
        self._stream_epoch = hello.epoch
        try:
            welcome = worker_pb2.StepsWelcome(wire_version=self.wire_version)
            await context.write(worker_pb2.WorkerStepsResponse(welcome=welcome))
            await first_of(
                self._read(context),
                self._run(context),
                self._tell(context),
                self._wait_superseded(context),
            )
        finally:
            self._stream_epoch = 0
            self._plans.clear()
            self.leader_id = ""

    # ---- the stream

    async def _read(self, context: Context) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            kind = message.WhichOneof("message")
            if kind == "plan":
                self.num_plans += 1
                self._plans.append((message.plan, time.perf_counter()))
                self._has_plan.set()
            elif kind == "release":
                while self._plans:
                    self.device.step(self._plans.popleft()[0])
                return

    async def _run(self, context: Context) -> None:
        while True:
            await self._may_step.wait()
            if not self._plans and not self.device.can_repeat:
                self._has_plan.clear()
                await self._has_plan.wait()
                continue
            plan, arrived_at = self._plans.popleft() if self._plans else (None, 0.0)
            started = time.perf_counter()
            result = self.device.step(plan)
            result.wait_us = int((started - arrived_at) * 1e6) if plan is not None else 0
            left_s = self.step_s - (time.perf_counter() - started)
            await asyncio.sleep(max(left_s, 0.0))
            result.step_us = int((time.perf_counter() - started) * 1e6)
            # What was computed while frozen doesn't get out either.
            await self._may_step.wait()
            results = worker_pb2.StepResults(results=[result])
            async with self._writing:
                await context.write(worker_pb2.WorkerStepsResponse(results=results))

    async def _tell(self, context: Context) -> None:
        while True:
            await asyncio.sleep(0.5)
            progress = worker_pb2.StepsProgress(
                phase=self.phase, step=self.device.last_step, num_queued_plans=len(self._plans)
            )
            async with self._writing:
                await context.write(worker_pb2.WorkerStepsResponse(progress=progress))

    async def supersede(self, message: worker_pb2.StepsSuperseded) -> None:
        """As if another scheduler attached, which then leads."""
        assert self._superseded is not None
        self._superseded.set_result(message)

    async def _wait_superseded(self, context: Context) -> None:
        self._superseded = asyncio.get_running_loop().create_future()
        message = await self._superseded
        async with self._writing:
            await context.write(worker_pb2.WorkerStepsResponse(superseded=message))
        await abort(context, FailedPreconditionError("another scheduler attached"))

    def _spec(self) -> common_pb2.ModelSpec:
        size = self.device.size
        return common_pb2.ModelSpec(
            name="fake",
            revision="r1",
            block_size=size.block_size,
            kv_scheme="fake",
            hash_version=HASH_VERSION,
            max_model_len=size.max_model_len,
            vocab_size=size.vocab_size,
            eos_token_ids=[2],
        )

    def _capacity(self) -> worker_pb2.WorkerCapacity:
        size = self.device.size
        return worker_pb2.WorkerCapacity(
            num_blocks=size.num_blocks,
            max_num_seqs=size.max_num_seqs,
            max_num_batched_tokens=size.max_num_batched_tokens,
            backend="fake",
            device="fake",
        )


async def _serve(arguments: argparse.Namespace) -> None:
    size = FakeSize(**{field.name: getattr(arguments, field.name) for field in fields(FakeSize)})
    worker = FakeWorker(size, worker_id=arguments.worker_id, step_s=arguments.step_ms / 1000)
    await worker.start(arguments.port)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGUSR1, worker.freeze)
    loop.add_signal_handler(signal.SIGUSR2, worker.thaw)
    logger.info("ready: worker on 127.0.0.1:%d", worker.port)
    announce_ready(port=worker.port)
    await stop.wait()
    await worker.stop()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A worker without a model.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--worker-id", default=f"fake-{secrets.token_hex(2)}")
    parser.add_argument("--step-ms", type=float, default=0.0, help="least time of a step")
    for field in fields(FakeSize):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    setup_logging("fake_worker", "info")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(parser.parse_args(argv)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
