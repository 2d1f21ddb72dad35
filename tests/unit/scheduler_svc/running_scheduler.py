"""A scheduler process inside the test, its workers, and a session to it."""

import asyncio
import itertools
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import numpy as np

from octavo import WIRE_VERSION
from octavo.blocks import BlockHashRoot, chain
from octavo.serving import open_channel
from octavo.settings import SchedulerSettings
from octavo.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from octavo_scheduler.service import SchedulerProcess
from tests.fakes.fake_worker import FakeWorker
from tests.fakes.simulated_cell import sampling_of

ROOT = BlockHashRoot("fake", "r1", 16, "fake").digest()


@dataclass
class Flight:
    """A request on a session, and what came back by sequence index."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, scheduler_pb2.Finished] = field(default_factory=dict)
    rejected: scheduler_pb2.Rejected | None = None
    num_sequences: int = 1
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_over(self) -> bool:
        return self.rejected is not None or len(self.finished) == self.num_sequences

    async def over(self) -> None:
        await self.until(lambda: self.is_over)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()


class TestSession:
    """A router's side of one session."""

    __test__ = False

    def __init__(self, call: Any) -> None:
        self.call = call
        self.flights: dict[int, Flight] = {}
        self.load = common_pb2.Load()
        self.num_frames = 0
        # What the last frame said; None = it ended without a word, or lives.
        self.moved_to: str | None = None
        self.suspects: dict[int, int] = {}
        self.welcome = scheduler_pb2.SessionWelcome()
        self._handles = itertools.count(1)
        self._reader: asyncio.Task[None] | None = None

    async def begin(self, wire_version: int = WIRE_VERSION) -> None:
        hello = scheduler_pb2.SessionHello(wire_version=wire_version, router_id="test")
        await self.call.write(scheduler_pb2.SchedulerSessionRequest(hello=hello))
        self.welcome = (await self.call.read()).welcome
        self._reader = asyncio.create_task(self._read())

    async def close(self) -> None:
        self.call.cancel()
        assert self._reader is not None
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        num_sequences: int = 1,
        seed: int | None = None,
        **changes: Any,
    ) -> Flight:
        handle = next(self._handles)
        flight = self.flights[handle] = Flight(num_sequences=num_sequences)
        ids = np.array(prompt, np.uint32)
        sampling = sampling_of(seed)
        sampling.max_tokens = max_tokens
        fields: dict[str, Any] = {
            "handle": handle,
            "prompt_token_ids": ids.tobytes(),
            "root_hash": ROOT,
            "block_hashes": b"".join(chain(ROOT, ids, 16)),
            "sampling": sampling,
            "num_sequences": num_sequences,
        }
        submit = scheduler_pb2.Submit(**{**fields, **changes})
        await self.call.write(scheduler_pb2.SchedulerSessionRequest(submit=submit))
        return flight

    async def cancel(self, flight: Flight) -> None:
        handle = next(handle for handle, other in self.flights.items() if other is flight)
        cancel = scheduler_pb2.Cancel(handle=handle, reason=scheduler_pb2.CANCEL_REASON_CLIENT)
        await self.call.write(scheduler_pb2.SchedulerSessionRequest(cancel=cancel))

    async def _read(self) -> None:
        while (frame := await self.call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
            self.num_frames += 1
            self.load = frame.load
            if frame.HasField("moved"):
                self.moved_to = frame.moved.successor
                self.suspects = {s.handle: s.num_suspicions for s in frame.moved.suspects}
            batch = frame.tokens
            num = len(batch.handles) // 8
            handles = struct.unpack(f"<{num}Q", batch.handles)
            indexes = struct.unpack(f"<{num}I", batch.sequence_indexes)
            counts = struct.unpack(f"<{num}I", batch.counts)
            ids = list(np.frombuffer(batch.token_ids, "<u4"))
            assert len(set(zip(handles, indexes, strict=True))) == num, "one entry a sequence"
            for handle, index, count in zip(handles, indexes, counts, strict=True):
                flight = self.flights[handle]
                flight.tokens.setdefault(index, []).extend(map(int, ids[:count]))
                del ids[:count]
                flight.changed.set()
            for finished in frame.finished:
                flight = self.flights[finished.handle]
                assert finished.sequence_index not in flight.finished
                flight.finished[finished.sequence_index] = finished
                flight.changed.set()
            for rejected in frame.rejected:
                self.flights[rejected.handle].rejected = rejected
                self.flights[rejected.handle].changed.set()


@asynccontextmanager
async def scheduler(
    *workers: str, **changes: Any
) -> AsyncGenerator[tuple[SchedulerProcess, scheduler_pb2_grpc.SchedulerStub]]:
    settings = SchedulerSettings(
        **{"port": 0, "workers": tuple(workers), "check_integrity": True, **changes}
    )
    process = SchedulerProcess(settings)
    await process.start()
    try:
        async with open_channel(f"127.0.0.1:{process.port}") as channel:
            stub = scheduler_pb2_grpc.SchedulerStub(channel)
            await until(lambda: len(process.cell.members) == len(workers))
            yield process, stub
    finally:
        await process.stop()


@asynccontextmanager
async def session(stub: scheduler_pb2_grpc.SchedulerStub) -> AsyncGenerator[TestSession]:
    test_session = TestSession(stub.Session())
    await test_session.begin()
    try:
        yield test_session
    finally:
        await test_session.close()


@asynccontextmanager
async def fake_workers(num: int, **changes: Any) -> AsyncGenerator[list[FakeWorker]]:
    workers = [FakeWorker(worker_id=f"w{i}", **changes) for i in range(num)]
    for worker in workers:
        await worker.start()
    try:
        yield workers
    finally:
        for worker in workers:
            await worker.stop()
            assert not worker.device.violations


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - state of other tasks, without events
            await asyncio.sleep(0.01)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(limited())


def is_quiet(process: SchedulerProcess) -> bool:
    cell = process.cell
    owes = any(m.state.owes_steps or m.state.leaving for m in cell.members)
    return not (cell.requests or cell.members.num_running or cell.members.num_used_blocks or owes)
