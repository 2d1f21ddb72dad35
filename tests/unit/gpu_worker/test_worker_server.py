"""The worker's gRPC edge over a real server and engine: attach, steps, epochs, inventory."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

import grpc
import grpc.aio
import pytest
import torch
from prometheus_client import CollectorRegistry

from octavo.capacity import Capacity
from octavo.metrics import WorkerMetrics
from octavo.model_spec import ModelSpec
from octavo.serving import GrpcServer
from octavo.v1 import worker_pb2, worker_pb2_grpc
from octavo_worker.backends.cpu import CpuBackend
from octavo_worker.engine import Engine
from octavo_worker.leadership import Leadership
from octavo_worker.loading import Loaded
from octavo_worker.row_book import RowLimits
from octavo_worker.runner import Runner
from octavo_worker.server import WorkerService
from tests.fakes.leader_client import LeaderClient, chunk, from_u32, leader_client, row_add, u32
from tests.fakes.tiny_paged_model import MAX_MODEL_LEN, VOCAB_SIZE, TinyPagedModel, make_kv_caches

torch.set_num_threads(1)
NUM_BLOCKS, BLOCK_SIZE = 64, 16
PROMPT = [5, 17, 3, 88, 21, 40, 9, 9, 60, 2, 31, 77, 14, 50, 6, 1, 23, 42, 11]
SPEC = ModelSpec("tiny", "r1", BLOCK_SIZE, "fp32", 1, MAX_MODEL_LEN, VOCAB_SIZE, (2,))


class Worker:
    """A served tiny model."""

    def __init__(self, silence_s: float) -> None:
        self.model = TinyPagedModel()
        limits = RowLimits(4, NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN, VOCAB_SIZE)
        caches = make_kv_caches(NUM_BLOCKS, BLOCK_SIZE)
        self.fatal: list[str] = []
        self.engine = Engine(
            Runner(self.model, CpuBackend(), caches, limits, torch.device("cpu")),
            max_in_flight=1,
            max_num_batched_tokens=32,
            num_blocks=NUM_BLOCKS,
            metrics=WorkerMetrics(CollectorRegistry()),
            on_fatal=self.fatal.append,
        )
        self.leadership = Leadership("boot", silence_s)
        self.service = WorkerService("w1", self.leadership)
        self.server = GrpcServer()
        self.address = ""

    def run(self) -> None:
        capacity = Capacity(NUM_BLOCKS, 4, 32, "cpu", "CPU", 256)
        self.engine.start()
        self.service.run(Loaded(SPEC, capacity, self.engine))


@contextlib.asynccontextmanager
async def serving(silence_s: float = 60.0, *, is_loaded: bool = True) -> AsyncGenerator[Worker]:
    worker = Worker(silence_s)
    worker_pb2_grpc.add_WorkerServicer_to_server(worker.service, worker.server.server)
    port = await worker.server.start("127.0.0.1", 0, worker_pb2.DESCRIPTOR)
    worker.address = f"127.0.0.1:{port}"
    if is_loaded:
        worker.run()
    try:
        yield worker
    finally:
        await worker.server.stop(0)
        if is_loaded:
            worker.engine.close()
    assert worker.fatal == []


async def fails(call: Awaitable[object], code: grpc.StatusCode) -> str:
    """The details of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is code
    return caught.value.details() or ""


def with_worker(
    test: Callable[[Worker, LeaderClient], Awaitable[None]],
    silence_s: float = 60.0,
    *,
    is_loaded: bool = True,
) -> None:
    async def run() -> None:
        async with (
            asyncio.timeout(30),
            serving(silence_s, is_loaded=is_loaded) as worker,
            leader_client(worker.address) as client,
        ):
            await test(worker, client)

    asyncio.run(run())


def first_plan(num_tokens: int, decode_until: int = 1000, row: int = 0) -> worker_pb2.Plan:
    add = row_add(row, range(1, 5), len(PROMPT) + num_tokens)
    return worker_pb2.Plan(
        plan_id=1, added_rows=[add], chunks=[chunk(row, PROMPT)], decode_until=decode_until
    )


def test_a_worker_describes_itself_in_every_phase() -> None:
    async def test(worker: Worker, client: LeaderClient) -> None:
        described = await client.describe()
        assert described.phase == worker_pb2.WORKER_PHASE_LOADING
        assert (described.worker_id, described.boot_id) == ("w1", "boot")
        assert not described.HasField("model")
        details = await fails(client.attach(0), grpc.StatusCode.UNAVAILABLE)
        assert details == "worker 'w1' is loading"
        assert worker.leadership.epoch == 0

    with_worker(test, is_loaded=False)


def test_a_leader_gets_its_tokens() -> None:
    async def test(worker: Worker, client: LeaderClient) -> None:
        described = await client.describe()
        assert described.phase == worker_pb2.WORKER_PHASE_RUNNING
        assert described.model.name == "tiny"
        attached, inventory = await client.attach(0, required_model=described.model)
        assert (attached.epoch, attached.worker_id, inventory) == (1, "w1", [])
        assert attached.capacity.num_blocks == NUM_BLOCKS
        steps = await client.open_steps(attached.boot_id, attached.epoch)
        assert await steps.read() == "welcome"
        await steps.send(plan=first_plan(20))
        await steps.read_steps(20)
        assert steps.tokens(0) == worker.model.greedy(PROMPT, 20)
        assert [result.step for result in steps.results] == list(range(1, 21))
        assert [result.repeat for result in steps.results] == list(range(20))
        assert steps.results[-1].events == bytes([worker_pb2.ROW_EVENT_LENGTH])
        assert (await client.describe()).leader_id == "s1"

    with_worker(test)


def test_progress_comes_without_plans() -> None:
    async def test(worker: Worker, client: LeaderClient) -> None:
        steps = await client.lead()
        while len(steps.progress) < 2:
            assert await steps.read() == "progress"
        assert steps.progress[0].phase == worker_pb2.WORKER_PHASE_RUNNING
        worker.service.drain()
        while steps.progress[-1].phase != worker_pb2.WORKER_PHASE_DRAINING:
            assert await steps.read() == "progress"
        await steps.send(plan=first_plan(3))
        await steps.read_steps(3)
        while steps.progress[-1].step != 3:
            assert await steps.read() == "progress"
        assert worker.service.is_drained

    with_worker(test)


def test_a_second_leader_is_refused() -> None:
    async def test(worker: Worker, client: LeaderClient) -> None:
        steps = await client.lead()
        async with leader_client(worker.address, "s2") as other:
            details = await fails(other.attach(1), grpc.StatusCode.FAILED_PRECONDITION)
            assert details.startswith("led by 's1' in epoch 1")
            stream = await other.open_steps("boot", 1)
            details = await fails(stream.read(), grpc.StatusCode.FAILED_PRECONDITION)
            assert details == "epoch 1 has a live stream already"
        await steps.send(plan=first_plan(5))
        await steps.read_steps(5)

    with_worker(test)


def test_after_a_broken_stream_the_rows_are_cleared_and_sealed_blocks_listed() -> None:
    async def test(worker: Worker, client: LeaderClient) -> None:
        steps = await client.lead()
        hashes = {block: bytes([block]) * 16 for block in (1, 2, 3)}
        await steps.send(plan=first_plan(30))
        await steps.read_steps(30)
        sealed = worker_pb2.SealedBlocks(
            block_ids=u32([1, 2, 3]), block_hashes=b"".join(hashes.values())
        )
        await steps.send(plan=worker_pb2.Plan(plan_id=2, sealed=sealed))
        await steps.send(plan=worker_pb2.Plan(plan_id=3, removed_rows=u32([0])))
        await steps.read_steps(32)
        steps.call.cancel()
        async with leader_client(worker.address, "s2") as other:
            await other.until_not_led()
            # The tail of the row's prefix is worth the least.
            attached, inventory = await other.attach(1)
            assert attached.epoch == 2
            assert inventory == [(3, hashes[3]), (2, hashes[2]), (1, hashes[1])]
            assert worker.engine.is_idle
            stale = await client.open_steps("boot", 1)
            details = await fails(stale.read(), grpc.StatusCode.FAILED_PRECONDITION)
            assert details.startswith("epoch 1 is not led any more")
            stream = await other.open_steps("boot", 2)
            assert await stream.read() == "welcome"
            # Steps and plans count from 1 again, and the prefix is there.
            add = row_add(2, [1, 9], len(PROMPT) + 4, num_computed_tokens=16)
            plan = worker_pb2.Plan(
                plan_id=1,
                added_rows=[add],
                chunks=[chunk(2, PROMPT[16:], start=16)],
                decode_until=1000,
            )
            await stream.send(plan=plan)
            await stream.read_steps(4)
            assert stream.tokens(2) == worker.model.greedy(PROMPT, 4)

    with_worker(test)


def test_a_silent_leader_is_superseded_and_told() -> None:
    async def test(worker: Worker, client: LeaderClient) -> None:
        steps = await client.lead()
        await steps.send(plan=first_plan(200, decode_until=10))
        await steps.read_steps(10)
        async with leader_client(worker.address, "s2") as other:
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await other.attach(1)
                    break
                await asyncio.sleep(0.02)
            stream = await other.open_steps("boot", 2)
            assert await stream.read() == "welcome"

            async def read_all() -> None:
                while await steps.read() != "end":
                    pass

            details = await fails(read_all(), grpc.StatusCode.FAILED_PRECONDITION)
            assert details == "epoch 1 is over: another scheduler attached"
            assert steps.superseded == worker_pb2.StepsSuperseded(leader_id="s2", epoch=2)
            assert steps.results[-1].step == 10
            await stream.send(plan=first_plan(3, row=1))
            await stream.read_steps(3)
            assert stream.tokens(1) == worker.model.greedy(PROMPT, 3)
            assert stream.tokens(0) == []
            assert worker.leadership.leader_id == "s2"

    with_worker(test, silence_s=0.2)


def test_pings_keep_a_leader() -> None:
    async def test(worker: Worker, client: LeaderClient) -> None:
        steps = await client.lead()
        async with leader_client(worker.address, "s2") as other:
            for _ in range(10):
                await steps.send(ping=worker_pb2.StepsPing())
                await asyncio.sleep(0.1)
                await fails(other.attach(1), grpc.StatusCode.FAILED_PRECONDITION)
        assert worker.leadership.epoch == 1

    with_worker(test, silence_s=0.6)


def test_a_released_worker_runs_its_plans_and_is_free_at_once() -> None:
    async def test(worker: Worker, client: LeaderClient) -> None:
        steps = await client.lead()
        await steps.send(plan=first_plan(200))
        sealed = worker_pb2.SealedBlocks(block_ids=u32([1]), block_hashes=b"h" * 16)
        await steps.send(plan=worker_pb2.Plan(plan_id=2, sealed=sealed))
        await steps.send(release=worker_pb2.StepsRelease())
        while await steps.read() != "end":
            pass
        assert await steps.call.code() is grpc.StatusCode.OK
        async with leader_client(worker.address, "s2") as other:
            attached, inventory = await other.attach(1)
        assert (attached.epoch, inventory) == (2, [(1, b"h" * 16)])

    with_worker(test)


BAD_STREAMS = {
    "plan id": (worker_pb2.Plan(plan_id=2), "plan_id is 2, expected 1"),
    "no triples": (
        worker_pb2.Plan(plan_id=1, block_updates=u32([1, 2])),
        "block_updates: 2 numbers are no triples",
    ),
    "no u32": (
        worker_pb2.Plan(plan_id=1, removed_rows=b"abc"),
        "removed_rows: 3 bytes are no packed u32",
    ),
    "hashes": (
        worker_pb2.Plan(
            plan_id=1, sealed=worker_pb2.SealedBlocks(block_ids=u32([1]), block_hashes=b"x" * 15)
        ),
        "sealed: 1 blocks but 15 bytes of 16-byte hashes",
    ),
    "null block sealed": (
        worker_pb2.Plan(
            plan_id=1, sealed=worker_pb2.SealedBlocks(block_ids=u32([0]), block_hashes=b"x" * 16)
        ),
        "plan 1 seals block 0; blocks are 1 .. 63",
    ),
    "too many tokens": (
        worker_pb2.Plan(plan_id=1, chunks=[chunk(0, [1] * 33)]),
        "plan 1 has 33 chunk tokens; max_num_batched_tokens is 32",
    ),
}


@pytest.mark.parametrize("name", BAD_STREAMS)
def test_a_plan_that_cannot_be_one_ends_the_stream(name: str) -> None:
    plan, message = BAD_STREAMS[name]

    async def test(worker: Worker, client: LeaderClient) -> None:
        steps = await client.lead()
        await steps.send(plan=plan)

        async def read_all() -> None:
            while await steps.read() != "end":
                pass

        details = await fails(read_all(), grpc.StatusCode.FAILED_PRECONDITION)
        assert details == message
        again = await client.lead()
        await again.send(plan=first_plan(2))
        await again.read_steps(2)
        assert worker.leadership.epoch == 2

    with_worker(test)


@pytest.mark.parametrize("distance", [-1, 1])
def test_a_scheduler_one_version_away_may_lead(distance: int) -> None:
    async def test(worker: Worker, client: LeaderClient) -> None:
        client.wire_version += distance
        steps = await client.lead()
        await steps.send(plan=first_plan(3))
        await steps.read_steps(3)
        assert steps.tokens(0) == worker.model.greedy(PROMPT, 3)

    with_worker(test)


def test_bad_rows_are_errors_in_the_results() -> None:
    async def test(worker: Worker, client: LeaderClient) -> None:
        steps = await client.lead()
        adds = [row_add(0, [0], 30, generation=5), row_add(1, [7, 8], len(PROMPT) + 1)]
        plan = worker_pb2.Plan(plan_id=1, added_rows=adds, chunks=[chunk(1, PROMPT)])
        await steps.send(plan=plan)
        await steps.read_steps(1)
        (result,) = steps.results
        assert from_u32(result.rows) == [1, 0]
        assert list(result.events) == [worker_pb2.ROW_EVENT_LENGTH, worker_pb2.ROW_EVENT_ERROR]
        (error,) = result.errors
        assert (error.row, error.generation) == (0, 5)
        assert error.message == "a block id is outside 1 .. 63"

    with_worker(test)


@pytest.mark.parametrize(("field", "value"), [("block_size", 32), ("revision", "r2")])
def test_a_cell_of_another_kind_is_refused(field: str, value: object) -> None:
    async def test(worker: Worker, client: LeaderClient) -> None:
        required = (await client.describe()).model
        setattr(required, field, value)
        details = await fails(
            client.attach(0, required_model=required), grpc.StatusCode.FAILED_PRECONDITION
        )
        assert details.startswith(f"this worker's {field} is {getattr(SPEC, field)!r}")
        client.wire_version += 2
        details = await fails(client.attach(0), grpc.StatusCode.FAILED_PRECONDITION)
        assert "scheduler 's1' speaks wire version" in details
        assert worker.leadership.epoch == 0

    with_worker(test)


def test_a_stream_begins_with_a_hello() -> None:
    async def test(worker: Worker, client: LeaderClient) -> None:
        await client.attach(0)
        call = client.stub.Steps()
        await call.write(worker_pb2.WorkerStepsRequest(ping=worker_pb2.StepsPing()))
        details = await fails(call.read(), grpc.StatusCode.FAILED_PRECONDITION)
        assert details == "a Steps stream begins with a hello"

    with_worker(test)
