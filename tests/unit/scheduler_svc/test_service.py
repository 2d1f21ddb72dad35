"""The real scheduler process over real gRPC: fake workers below, a raw session above."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from octavo import WIRE_VERSION
from octavo.registry import MemoryRegistry, SchedulerRecord
from octavo.settings import SchedulerSettings
from octavo.v1 import common_pb2, scheduler_pb2
from octavo_scheduler import service
from tests.fakes.fake_device import expected_tokens, salt_of
from tests.fakes.simulated_cell import prompt_of, sampling_of
from tests.unit.scheduler_svc.running_scheduler import (
    TestSession,
    fake_workers,
    is_quiet,
    run,
    scheduler,
    session,
    until,
)


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


class StumblingRegistry(MemoryRegistry):
    """Fails once when the scheduler tells that it is here, after it said so `num_good` times."""

    def __init__(self, num_good: int) -> None:
        super().__init__()
        self.num_told = 0
        self._num_good = num_good

    def announce_scheduler(self, record: SchedulerRecord) -> None:
        self.num_told += 1
        if self.num_told == self._num_good + 1:
            raise RuntimeError("can't start new thread")
        super().announce_scheduler(record)


def test_one_failed_round_does_not_end_the_watch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service, "_TICK_S", 0.01)

    async def test() -> None:
        registry = StumblingRegistry(num_good=2)
        process = service.SchedulerProcess(SchedulerSettings(port=0, workers=("x:1",)), registry)
        await process.start()
        try:
            await until(lambda: registry.num_told > 5)
        finally:
            await process.stop()

    run(test)
    assert "looking after the cell" in caplog.text


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
