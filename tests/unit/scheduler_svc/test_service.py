"""The real scheduler process over real gRPC: fake workers below, a raw session above."""

import asyncio
import itertools
import os
import signal
import struct
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo import WIRE_VERSION
from octavo.blocks import BlockHashRoot, chain
from octavo.bloom import BloomFilter
from octavo.cli.ports import free_ports
from octavo.registry import SchedulerRecord, WorkerRecord
from octavo.serving import open_channel
from octavo.settings import SchedulerSettings
from octavo.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc, worker_pb2
from octavo_scheduler.recovery import Loss
from octavo_scheduler.service import SchedulerProcess
from tests.fakes.fake_device import FakeSize, expected_tokens, salt_of
from tests.fakes.fake_worker import FakeWorker
from tests.fakes.simulated_cell import prompt_of, sampling_of

ROOT = BlockHashRoot("fake", "r1", 16, "fake").digest()
REPOSITORY = Path(__file__).parents[3]


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


def child_environment() -> dict[str, str]:
    """Of a process that runs these very sources."""
    path = f"{os.environ.get('PYTHONPATH', '')}:{REPOSITORY}"
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


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


def test_crowd_siblings_and_bad_frames_share_a_session() -> None:
    async def test() -> None:
        async with fake_workers(1) as workers, scheduler(workers[0].address) as (process, stub):
            async with session(stub) as router:
                assert router.welcome.model.name == "fake"
                prompts = [prompt_of(5 + 17 * i, seed=i) for i in range(20)]
                flights = [await router.submit(p, 30) for p in prompts]
                bad = await router.submit(prompt_of(20), 5, block_hashes=b"x")
                empty = await router.submit([], 5)
                foreign = await router.submit([99_999_999], 5)
                siblings = await router.submit(prompt_of(40), 20, num_sequences=3, seed=5)
                await asyncio.gather(*(f.over() for f in (*flights, siblings, bad, empty, foreign)))
                for prompt, flight in zip(prompts, flights, strict=True):
                    assert flight.tokens[0] == expected_tokens(prompt, 30)
                    assert flight.finished[0].reason == common_pb2.FINISH_REASON_LENGTH
                for index in range(3):
                    salt = salt_of(sampling_of(5), index)
                    assert siblings.tokens[index] == expected_tokens(prompt_of(40), 20, salt=salt)
                for flight, param in ((bad, "block_hashes"), (empty, "prompt")):
                    assert flight.rejected is not None
                    assert flight.rejected.error.param == param
                assert foreign.rejected is not None
                assert foreign.rejected.error.code == 3
                assert router.load.num_blocks == 1023
            await until(lambda: is_quiet(process))

    run(test)


def test_describe_watch_and_gauges_agree() -> None:
    async def test() -> None:
        async with fake_workers(2) as workers:
            addresses = [worker.address for worker in workers]
            async with scheduler(*addresses) as (process, stub), session(stub) as router:
                flight = await router.submit(prompt_of(40), 3000)
                await flight.until(lambda: bool(flight.tokens))
                described = await stub.Describe(scheduler_pb2.SchedulerDescribeRequest())
                assert {worker.worker_id for worker in described.workers} == {"w0", "w1"}
                assert sorted(worker.num_rows for worker in described.workers) == [0, 1]
                assert described.load.num_running == 1
                assert described.max_request_tokens == 8192
                watch = stub.Watch(scheduler_pb2.SchedulerWatchRequest(interval_ms=100))
                picture = (await watch.read()).picture_json
                assert b'"num_running":1,' in picture
                watch.cancel()
                value = process.metrics.registry.get_sample_value
                assert value("octavo_num_requests_running") == 1
                await router.cancel(flight)
                await flight.over()
                await until(lambda: is_quiet(process))
                assert value("octavo_num_requests_running") == 0

    run(test)


def test_only_a_worker_that_was_led_before_is_missed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "octavo_scheduler.worker_link")

    def levels() -> list[str]:
        return [r.levelname for r in caplog.records if r.message.endswith("; trying again")]

    async def test() -> None:
        port = free_ports(1)[0]
        settings = SchedulerSettings(port=0, workers=(f"127.0.0.1:{port}",))
        process = SchedulerProcess(settings)
        await process.start()
        worker = FakeWorker()
        try:
            await until(lambda: levels() == ["INFO"])
            await worker.start(port)
            await until(lambda: bool(process.cell.members))
            await worker.stop()
            await until(lambda: "WARNING" in levels())
            assert levels()[0] == "INFO"
            assert "INFO" not in levels()[1:]
        finally:
            await worker.stop()
            await process.stop()

    run(test)


@pytest.mark.parametrize("distance", [-1, 1])
def test_neighbours_one_version_away_are_served(distance: int) -> None:
    async def test() -> None:
        async with fake_workers(1) as workers:
            workers[0].wire_version += distance
            async with scheduler(workers[0].address) as (_, stub):
                router = TestSession(stub.Session())
                await router.begin(WIRE_VERSION + distance)
                flight = await router.submit(prompt_of(20), 30)
                await flight.over()
                assert flight.tokens[0] == expected_tokens(prompt_of(20), 30)
                await router.close()

    run(test)


def test_who_is_two_versions_away_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with fake_workers(2) as workers, scheduler(workers[0].address) as (process, stub):
            call = stub.Session()
            hello = scheduler_pb2.SessionHello(wire_version=WIRE_VERSION + 2, router_id="r9")
            await call.write(scheduler_pb2.SchedulerSessionRequest(hello=hello))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert f"router 'r9' speaks wire version {WIRE_VERSION + 2}" in str(caught.value)
            workers[1].wire_version += 2
            process.workers.lead(workers[1].address)
            said = f"worker {workers[1].address} speaks wire version {WIRE_VERSION + 2}"
            await until(lambda: said in caplog.text)
            assert len(process.cell.members) == 1
            assert workers[1].epoch == 0

    caplog.set_level("INFO", "octavo_scheduler")
    run(test)


def test_ready_is_who_has_a_worker() -> None:
    async def test() -> None:
        port = free_ports(1)[0]
        worker = FakeWorker()
        await worker.start(port)
        async with (
            scheduler(worker.address) as (process, _),
            open_channel(f"127.0.0.1:{process.port}") as channel,
        ):
            health = health_pb2_grpc.HealthStub(channel)

            async def until_status(expected: int) -> None:
                request = health_pb2.HealthCheckRequest()
                while (await health.Check(request)).status != expected:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

            await until_status(health_pb2.HealthCheckResponse.SERVING)
            await worker.stop()
            await until_status(health_pb2.HealthCheckResponse.NOT_SERVING)
            again = FakeWorker()
            await again.start(port)
            await until_status(health_pb2.HealthCheckResponse.SERVING)
            await process.drain(0.0)
            await until_status(health_pb2.HealthCheckResponse.NOT_SERVING)
            await again.stop()

    run(test)


def test_lost_session_frees_everything() -> None:
    async def test() -> None:
        async with (
            fake_workers(1, step_s=0.002) as workers,
            scheduler(workers[0].address) as (process, stub),
        ):
            async with session(stub) as router:
                flights = [await router.submit(prompt_of(30, seed=i), 900) for i in range(8)]
                await flights[7].until(lambda: len(flights[7].tokens.get(0, [])) > 5)
            await until(lambda: is_quiet(process))
            await until(lambda: workers[0].device.num_live_rows == 0)
            value = process.metrics.registry.get_sample_value
            assert value("octavo_sequence_outcomes_total", {"outcome": "cancelled"}) == 8

    run(test)


@pytest.mark.parametrize("how", ["killed", "hung"])
def test_lost_worker_loses_no_token(how: str) -> None:
    async def test() -> None:
        async with fake_workers(2, step_s=0.003) as workers:
            addresses = [worker.address for worker in workers]
            async with scheduler(*addresses, hang_floor_s=0.5) as (process, stub):
                async with session(stub) as router:
                    prompts = [prompt_of(20 + 5 * i, seed=i) for i in range(20)]
                    flights = [await router.submit(p, 120, seed=i) for i, p in enumerate(prompts)]
                    for flight in flights:
                        await flight.until(lambda flight=flight: len(flight.tokens.get(0, [])) > 9)
                    assert all(worker.device.num_live_rows for worker in workers)
                    if how == "killed":
                        await workers[0].stop()
                    else:
                        workers[0].freeze()
                    await asyncio.gather(*(flight.over() for flight in flights))
                    for i, (prompt, flight) in enumerate(zip(prompts, flights, strict=True)):
                        salt = salt_of(sampling_of(i), 0)
                        assert flight.tokens[0] == expected_tokens(prompt, 120, salt=salt)
                        assert flight.finished[0].num_tokens == 120
                    assert sum(flight.finished[0].num_moves for flight in flights) > 0
                await until(lambda: is_quiet(process))

    run(test)


def test_worker_that_comes_back_brings_its_cache() -> None:
    async def test() -> None:
        async with (
            fake_workers(1) as workers,
            scheduler(workers[0].address) as (process, stub),
            session(stub) as router,
        ):
            prompt = prompt_of(100)
            await (await router.submit(prompt, 5)).over()
            await until(lambda: len(workers[0].device.sealed) >= 6)
            lost = process.cell.members[0]
            next(iter(process.links.values())).break_off(Loss.CRASH)
            await until(lambda: bool(process.cell.members) and lost not in process.cell.members)
            assert workers[0].epoch == 2
            again = await router.submit(prompt, 5)
            await again.over()
            assert again.tokens[0] == expected_tokens(prompt, 5)
            value = process.metrics.registry.get_sample_value
            assert value("octavo_prefix_cache_hits_total") == 96

    run(test)


def test_deadline_passes_while_running() -> None:
    async def test() -> None:
        async with (
            fake_workers(1, step_s=0.01) as workers,
            scheduler(workers[0].address) as (process, stub),
            session(stub) as router,
        ):
            flight = await router.submit(prompt_of(30), 5000, deadline_ms=300)
            await flight.over()
            assert flight.finished[0].reason == common_pb2.FINISH_REASON_DEADLINE
            assert 0 < len(flight.tokens[0]) < 60
            await until(lambda: is_quiet(process))

    run(test)


def test_drain_finishes_what_it_can_and_ends_the_rest() -> None:
    async def test() -> None:
        async with (
            fake_workers(1, step_s=0.005) as workers,
            scheduler(workers[0].address) as (process, stub),
            session(stub) as router,
        ):
            short = await router.submit(prompt_of(30), 30)
            long = await router.submit(prompt_of(30, seed=2), 4000)
            await long.until(lambda: bool(long.tokens))
            draining = asyncio.create_task(process.drain(1.0))
            await until(lambda: process.cell.is_draining)
            late = await router.submit(prompt_of(20), 5)
            await late.over()
            assert late.rejected is not None
            assert late.rejected.error.code == 14
            assert await draining == 1
            await asyncio.gather(short.over(), long.over())
            assert short.tokens[0] == expected_tokens(prompt_of(30), 30)
            assert long.finished[0].reason == common_pb2.FINISH_REASON_ERROR
            assert long.finished[0].error.code == 14

    run(test)


def test_released_worker_can_be_led_by_another_at_once() -> None:
    async def test() -> None:
        async with fake_workers(1) as workers:
            async with scheduler(workers[0].address):
                assert workers[0].leader_id
            assert workers[0].leader_id == ""
            async with scheduler(workers[0].address) as (_, stub), session(stub) as router:
                flight = await router.submit(prompt_of(20), 5)
                await flight.over()
                assert flight.tokens[0] == expected_tokens(prompt_of(20), 5)

    run(test)


def test_another_model_is_not_led() -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            small, large = FakeWorker(worker_id="a"), FakeWorker(FakeSize(block_size=32))
            for worker in (small, large):
                await worker.start()
                stack.push_async_callback(worker.stop)
            async with scheduler(small.address) as (process, _):
                process.workers.lead(large.address)
                await asyncio.sleep(0.5)
                assert [member.state.worker_id for member in process.cell.members] == ["a"]
                assert large.leader_id == ""

    run(test)


def test_idle_cell_sends_no_plan() -> None:
    async def test() -> None:
        async with (
            fake_workers(1) as workers,
            scheduler(workers[0].address) as (process, stub),
            session(stub) as router,
        ):
            await (await router.submit(prompt_of(40), 20)).over()
            await until(lambda: is_quiet(process))
            await asyncio.sleep(0.1)
            before = (workers[0].num_plans, workers[0].device.last_step, router.num_frames)
            await asyncio.sleep(0.5)
            after = (workers[0].num_plans, workers[0].device.last_step, router.num_frames)
            assert after == before

    run(test)


@pytest.mark.parametrize(
    ("changes", "model_name"),
    [
        ({}, "fake"),
        ({"served_model_name": ("public", "other")}, "public"),
        ({"vllm_metrics": False}, None),
    ],
)
def test_vllm_names_are_a_setting(changes: dict[str, Any], model_name: str | None) -> None:
    async def test() -> None:
        async with (
            fake_workers(1) as workers,
            scheduler(workers[0].address, **changes) as (cell, _),
        ):
            families = cell.metrics.registry.collect()
            found = {f.name: f.samples[0].labels for f in families if f.name.startswith("vllm:")}
            assert {labels["model_name"] for labels in found.values()} == {model_name} - {None}
            assert ("vllm:num_requests_waiting" in found) is (model_name is not None)

    run(test)


def test_process_is_ready_and_ends_at_sigterm(tmp_path: Path) -> None:
    environment = child_environment()
    processes: list[subprocess.Popen[str]] = []

    def start(*command: str, ready: str) -> str:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=REPOSITORY,
        )
        processes.append(process)
        assert process.stderr is not None
        for line in process.stderr:
            if ready in line:
                return line.strip().rsplit(" ", 1)[1]
        raise AssertionError("the process ended before it was ready")

    try:
        worker = start("tests.fakes.fake_worker", ready="ready: worker on")
        arguments = ("--port", "0", "--workers", worker)
        start("octavo_scheduler", *arguments, ready="ready: scheduler on")
        processes[1].send_signal(signal.SIGTERM)
        assert processes[1].wait(timeout=20) == 0
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_draining_worker_keeps_its_rows_and_gets_no_new_ones() -> None:
    async def test() -> None:
        async with fake_workers(2, step_s=0.003) as workers:
            addresses = [worker.address for worker in workers]
            async with scheduler(*addresses) as (process, stub), session(stub) as router:
                old = [await router.submit(prompt_of(30, seed=i), 300) for i in range(6)]
                for flight in old:
                    await flight.until(lambda flight=flight: bool(flight.tokens))
                rows = workers[0].device.num_live_rows
                assert rows
                workers[0].phase = worker_pb2.WORKER_PHASE_DRAINING
                await until(lambda: any(m.is_leaving for m in process.cell.members))
                new = [await router.submit(prompt_of(30, seed=50 + i), 10) for i in range(6)]
                await asyncio.gather(*(flight.over() for flight in new))
                assert workers[0].device.num_live_rows == rows
                await asyncio.gather(*(flight.over() for flight in old))
                assert sum(flight.finished[0].num_moves for flight in old) == 0

    run(test)


def test_workers_are_found_in_the_registry_unless_another_leads_them() -> None:
    async def test() -> None:
        async with fake_workers(2) as workers, scheduler() as (process, stub):
            records = [
                WorkerRecord(w.worker_id, w.address, w.boot_id, "fake", "r1", 1024, 256, leader, 0)
                for w, leader in zip(workers, ("", "another"), strict=True)
            ]
            for record in records:
                process.registry.announce_worker(record)
            another = SchedulerRecord("another", "127.0.0.1:1", "fake", 1, 0, 0, draining=False)
            process.registry.announce_scheduler(another)
            await until(lambda: len(process.cell.members) == 1)
            assert process.cell.members[0].state.worker_id == "w0"
            assert list(process.links) == [workers[0].address]
            async with session(stub) as router:
                flight = await router.submit(prompt_of(40), 4000)
                await flight.until(lambda: bool(flight.tokens))
                led = replace(records[0], leader_id=process.scheduler_id, epoch=1)
                process.registry.announce_worker(led)
                await until(lambda: any(usage.num_rows for usage in process.registry.usages()))
                usage = process.registry.usages()[0]
                assert (usage.worker_id, usage.boot_id) == ("w0", workers[0].boot_id)
                assert usage.num_used + usage.num_cached + usage.num_free == usage.num_blocks
                used = int.from_bytes(usage.used_bitmap, "little").bit_count()
                assert used == usage.num_used
                told = {r.scheduler_id: r.num_workers for r in process.registry.schedulers()}
                assert told == {process.scheduler_id: 1, "another": 1}
                hashes = chain(ROOT, np.array(prompt_of(40), np.uint32), 16)

                def is_published() -> bool:
                    data = process.registry.filters().get(process.scheduler_id)
                    return (
                        data is not None and BloomFilter.from_bytes(data).leading_run(hashes) == 2
                    )

                await until(is_published)

    run(test)


def test_kill_minus_nine_of_one_of_two_workers() -> None:
    environment = child_environment()
    command = [sys.executable, "-m", "tests.fakes.fake_worker", "--step-ms", "3"]
    processes = [
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]

    def address_of(process: subprocess.Popen[str]) -> str:
        assert process.stderr is not None
        lines = (line for line in process.stderr if "ready: worker on" in line)
        return next(lines).strip().rsplit(" ", 1)[1]

    async def test() -> None:
        addresses = [address_of(process) for process in processes]
        async with scheduler(*addresses) as (process, stub), session(stub) as router:
            prompts = [prompt_of(20 + 5 * i, seed=i) for i in range(20)]
            flights = [await router.submit(p, 150) for p in prompts]
            for flight in flights:
                await flight.until(lambda flight=flight: len(flight.tokens.get(0, [])) > 9)
            assert all(member.state.rows.num_held for member in process.cell.members)
            processes[0].kill()
            await asyncio.gather(*(flight.over() for flight in flights))
            for prompt, flight in zip(prompts, flights, strict=True):
                assert flight.tokens[0] == expected_tokens(prompt, 150)
            assert sum(flight.finished[0].num_moves for flight in flights) > 0
            assert len(process.cell.members) == 1
            await until(lambda: is_quiet(process))

    try:
        run(test)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
