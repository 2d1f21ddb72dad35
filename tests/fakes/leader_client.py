"""A bare leader of one worker: attaches, sends what a test says, collects what comes back."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

import grpc.aio
import numpy as np

from octavo import WIRE_VERSION
from octavo.serving import open_channel
from octavo.v1 import common_pb2, worker_pb2, worker_pb2_grpc

Request = worker_pb2.WorkerStepsRequest
GREEDY = common_pb2.SamplingParams(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0)


def u32(values: Sequence[int]) -> bytes:
    return np.array(values, "<u4").tobytes()


def from_u32(data: bytes) -> list[int]:
    return np.frombuffer(data, "<u4").tolist()


def row_add(
    row: int,
    block_ids: Sequence[int],
    max_total_tokens: int,
    *,
    generation: int = 1,
    num_computed_tokens: int = 0,
    sampling: common_pb2.SamplingParams = GREEDY,
) -> worker_pb2.RowAdd:
    return worker_pb2.RowAdd(
        row=row,
        generation=generation,
        sampling=sampling,
        block_ids=u32(block_ids),
        num_computed_tokens=num_computed_tokens,
        max_total_tokens=max_total_tokens,
    )


def chunk(row: int, token_ids: Sequence[int], start: int = 0) -> worker_pb2.Chunk:
    return worker_pb2.Chunk(row=row, start=start, token_ids=u32(token_ids), is_last=True)


class Steps:
    """An open Steps stream."""

    def __init__(self, call: "grpc.aio.StreamStreamCall[Request, worker_pb2.WorkerStepsResponse]"):
        self.call = call
        self.progress: list[worker_pb2.StepsProgress] = []
        self.results: list[worker_pb2.StepResult] = []
        self.superseded: worker_pb2.StepsSuperseded | None = None

    async def send(self, **message: object) -> None:
        """One of hello, plan, ping, release."""
        await self.call.write(Request(**message))  # type: ignore[arg-type]

    async def read(self) -> str:
        """The next message's kind, what it carries collected; "end" after the last."""
        message = await self.call.read()
        if not isinstance(message, worker_pb2.WorkerStepsResponse):
            return "end"
        kind = message.WhichOneof("message")
        assert kind is not None
        if kind == "results":
            self.results.extend(message.results.results)
        elif kind == "progress":
            self.progress.append(message.progress)
        elif kind == "superseded":
            self.superseded = message.superseded
        return kind

    async def read_steps(self, step: int) -> None:
        """Until the result of `step` has come."""
        while not self.results or self.results[-1].step < step:
            assert await self.read() != "end"

    def tokens(self, row: int) -> list[int]:
        return [
            token
            for result in self.results
            for entry, token in zip(from_u32(result.rows), from_u32(result.token_ids), strict=True)
            if entry == row
        ]


class LeaderClient:
    """Channel and calls to one worker."""

    def __init__(self, address: str, scheduler_id: str = "s1") -> None:
        self.scheduler_id = scheduler_id
        self.wire_version = WIRE_VERSION
        self.channel = open_channel(address)
        self.stub = worker_pb2_grpc.WorkerStub(self.channel)

    async def describe(self) -> worker_pb2.WorkerDescribeResponse:
        return await self.stub.Describe(worker_pb2.WorkerDescribeRequest(), wait_for_ready=True)

    async def until_not_led(self) -> None:
        """Wait for the worker to notice that its leader is gone."""
        for _ in range(2000):
            if not (await self.describe()).leader_id:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("still led")

    async def attach(
        self,
        expected_epoch: int,
        required_model: common_pb2.ModelSpec | None = None,
    ) -> tuple[worker_pb2.WorkerAttached, list[tuple[int, bytes]]]:
        """The answer and the inventory of sealed blocks."""
        request = worker_pb2.WorkerAttachRequest(
            wire_version=self.wire_version,
            scheduler_id=self.scheduler_id,
            expected_epoch=expected_epoch,
            required_model=required_model,
        )
        attached: worker_pb2.WorkerAttached | None = None
        inventory: list[tuple[int, bytes]] = []
        async for message in self.stub.Attach(request):
            if message.HasField("attached"):
                assert attached is None
                attached = message.attached
                continue
            hashes = message.inventory.block_hashes
            for index, block_id in enumerate(from_u32(message.inventory.block_ids)):
                inventory.append((block_id, hashes[16 * index : 16 * index + 16]))
        assert attached is not None
        return attached, inventory

    async def open_steps(self, boot_id: str, epoch: int) -> Steps:
        """A stream whose hello was sent."""
        steps = Steps(self.stub.Steps())
        hello = worker_pb2.StepsHello(wire_version=self.wire_version, boot_id=boot_id, epoch=epoch)
        await steps.send(hello=hello)
        return steps

    async def lead(self) -> Steps:
        """Attach as the worker describes itself; the welcomed stream."""
        described = await self.describe()
        attached, _ = await self.attach(described.epoch)
        steps = await self.open_steps(attached.boot_id, attached.epoch)
        assert await steps.read() == "welcome"
        return steps


@contextlib.asynccontextmanager
async def leader_client(address: str, scheduler_id: str = "s1") -> AsyncGenerator[LeaderClient]:
    """A client whose channel is closed at the end."""
    client = LeaderClient(address, scheduler_id)
    try:
        yield client
    finally:
        await client.channel.close()
