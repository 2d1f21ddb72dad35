"""A scheduler and workers that are lost, come back, drain, or belong to another."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.blocks import chain
from octavo.bloom import BloomFilter
from octavo.cli.ports import free_ports
from octavo.registry import SchedulerRecord, WorkerRecord
from octavo.serving import open_channel
from octavo.settings import SchedulerSettings
from octavo.v1 import worker_pb2
from octavo_scheduler.recovery import Loss
from octavo_scheduler.service import SchedulerProcess
from tests.fakes.fake_device import FakeSize, expected_tokens, salt_of
from tests.fakes.fake_worker import FakeWorker
from tests.fakes.simulated_cell import prompt_of, sampling_of
from tests.unit.scheduler_svc.running_scheduler import (
    ROOT,
    fake_workers,
    is_quiet,
    run,
    scheduler,
    session,
    until,
)


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
