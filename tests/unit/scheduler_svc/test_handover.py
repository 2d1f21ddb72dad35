"""Several schedulers over real gRPC: taking over, handing over, and who leads what meanwhile."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import pytest

from octavo.registry import MemoryRegistry, MemoryStore
from octavo.serving import open_channel
from octavo.settings import SchedulerSettings
from octavo.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc, worker_pb2
from octavo_scheduler import handover, takeover
from octavo_scheduler.service import SchedulerProcess
from tests.fakes.fake_device import expected_tokens
from tests.fakes.fake_worker import FakeWorker
from tests.fakes.leader_client import LeaderClient, Steps, leader_client
from tests.fakes.simulated_cell import prompt_of
from tests.unit.scheduler_svc.running_scheduler import (
    Flight,
    TestSession,
    fake_workers,
    is_quiet,
    run,
    session,
    until,
)


class Cells:
    """Schedulers of one fleet in this process, whose workers tell who leads them."""

    def __init__(self, stack: AsyncExitStack, workers: Sequence[FakeWorker]) -> None:
        self.workers = workers
        self._store = MemoryStore()
        self._registry = MemoryRegistry(self._store)
        self._stack = stack

    async def tell(self) -> None:
        """The workers' own part of the registry."""
        while True:
            for worker in self.workers:
                self._registry.announce_worker(worker.record())
            await asyncio.sleep(0.02)

    async def start(self, name: str) -> SchedulerProcess:
        settings = SchedulerSettings(port=0, scheduler_id=name, check_integrity=True)
        process = SchedulerProcess(settings, MemoryRegistry(self._store))
        await process.start()
        self._stack.push_async_callback(process.stop)
        return process

    async def session(self, process: SchedulerProcess) -> TestSession:
        channel = await self._stack.enter_async_context(open_channel(f"127.0.0.1:{process.port}"))
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        return await self._stack.enter_async_context(session(stub))


@asynccontextmanager
async def cells(num_workers: int, **changes: Any) -> AsyncGenerator[Cells]:
    async with fake_workers(num_workers, **changes) as workers, AsyncExitStack() as stack:
        fleet = Cells(stack, workers)
        telling = asyncio.create_task(fleet.tell())
        try:
            yield fleet
        finally:
            await stack.aclose()
            telling.cancel()


async def kill(process: SchedulerProcess) -> None:
    """Gone at once: its streams break, nobody is told anything."""
    await process.workers.close()
    await process._server.stop(0)
    await process.registry.close()


def resume_of(flight: Flight) -> scheduler_pb2.ResumeSequence:
    ids = np.array(flight.tokens.get(0, []), "<u4").tobytes()
    return scheduler_pb2.ResumeSequence(sequence_index=0, delivered_token_ids=ids)


async def go_on(
    router: TestSession, prompt: list[int], num_tokens: int, flight: Flight, lost: str
) -> Flight:
    resumes = [resume_of(flight)]
    return await router.submit(prompt, num_tokens, resumes=resumes, lost_scheduler_id=lost)


def test_workers_are_shared_and_a_newcomer_gets_some() -> None:
    async def test() -> None:
        async with cells(4) as fleet:
            one = await fleet.start("one")
            await until(lambda: len(one.cell.members) == 4)
            two = await fleet.start("two")
            await until(lambda: [len(p.cell.members) for p in (one, two)] == [2, 2])
            led = {m.state.worker_id for p in (one, two) for m in p.cell.members}
            assert led == {worker.worker_id for worker in fleet.workers}

    run(test)


@pytest.mark.parametrize("how", ["killed", "told to go"])
def test_another_scheduler_goes_on_with_the_caches(how: str) -> None:
    async def test() -> None:
        # So slow that nothing ends before the other scheduler is there, however busy the machine.
        async with cells(2, step_s=0.04) as fleet:
            one = await fleet.start("one")
            await until(lambda: len(one.cell.members) == 2)
            prompts = [prompt_of(150 + 5 * i, seed=i) for i in range(6)]
            router = await fleet.session(one)
            flights = [await router.submit(prompt, 300) for prompt in prompts]
            for flight in flights:
                await flight.until(lambda flight=flight: len(flight.tokens.get(0, [])) > 40)
            two = await fleet.start("two")
            await until(lambda: two.is_serving)
            if how == "killed":
                await kill(one)
            else:
                await one.leave(5.0)
                await until(lambda: router.moved_to is not None)
                assert router.moved_to == f"127.0.0.1:{two.port}"
                assert not one.cell.requests
                value = one.metrics.registry.get_sample_value
                assert value("octavo_sequence_outcomes_total", {"outcome": "moved"}) == 6
            assert not any(flight.finished for flight in flights)
            for worker in fleet.workers:
                worker.step_s = 0.0
            # The successor may not know its first worker yet when routers come.
            await until(lambda: two.cell.model is not None)
            heir = await fleet.session(two)
            rest = [
                await go_on(heir, prompt, 300, flight, "one")
                for prompt, flight in zip(prompts, flights, strict=True)
            ]
            await asyncio.gather(*(flight.over() for flight in rest))
            assert len(two.cell.members) == 2
            for prompt, before, after in zip(prompts, flights, rest, strict=True):
                whole = before.tokens[0] + after.tokens[0]
                assert whole == expected_tokens(prompt, 300)
                assert after.finished[0].num_tokens == 300
            value = two.metrics.registry.get_sample_value
            again = value("octavo_recomputed_tokens_total", {"reason": "resume"})
            # At most what was not sealed: a hand-over seals every full block first.
            assert again is not None
            assert again <= 6 * (16 if how == "told to go" else 48)
            await until(lambda: is_quiet(two))

    run(test)


async def start_beside(lost: LeaderClient, fleet: Cells) -> tuple[SchedulerProcess, Steps]:
    """A scheduler with one of two workers; the other is led by one that a router lost, and that
    lives: by `lost`, on these steps."""
    steps = await lost.lead()
    one = await fleet.start("one")
    await until(lambda: fleet.workers[0].record() in one.registry.workers())
    await until(lambda: len(one.cell.members) == 1)
    return one, steps


@pytest.mark.parametrize("ends", ["the worker comes", "patience ends"])
def test_what_was_lost_waits_for_the_lost_workers(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takeover, "PATIENCE_S", 30.0 if ends == "the worker comes" else 0.5)

    async def test() -> None:
        async with cells(2) as fleet, leader_client(fleet.workers[0].address, "lost") as lost:
            one, steps = await start_beside(lost, fleet)
            router = await fleet.session(one)
            prompt = prompt_of(40)
            kept = await router.submit(prompt, 20, lost_scheduler_id="lost")
            # Its own, that came back, waits for nothing.
            own = await router.submit(prompt, 20, lost_scheduler_id="one")
            await own.over()
            if ends == "the worker comes":
                cancelled = await router.submit(prompt, 20, lost_scheduler_id="lost")
                await router.cancel(cancelled)
                await cancelled.over()
                assert cancelled.finished[0].reason == common_pb2.FINISH_REASON_CANCELLED
                assert not kept.tokens
                steps.call.cancel()
            await kept.over()
            assert kept.tokens[0] == own.tokens[0] == expected_tokens(prompt, 20)
            assert len(one.cell.members) == (2 if ends == "the worker comes" else 1)
            steps.call.cancel()

    run(test)


def test_who_left_while_its_request_was_held_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "PATIENCE_S", 0.5)

    async def test() -> None:
        async with cells(2) as fleet, leader_client(fleet.workers[0].address, "lost") as lost:
            one, steps = await start_beside(lost, fleet)
            stays, leaves = await fleet.session(one), await fleet.session(one)
            await leaves.submit(prompt_of(40), 5000, lost_scheduler_id="lost")
            # What it submits is read in order: the other one was, too.
            await (await leaves.submit(prompt_of(40), 5)).over()
            kept = await stays.submit(prompt_of(40), 5, lost_scheduler_id="lost")
            await leaves.close()
            await until(lambda: len(one.cell.book.outboxes) == 1)
            await kept.over()
            assert not one.cell.requests
            steps.call.cancel()

    run(test)


def test_requests_leave_a_cell_whose_last_worker_died(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whoever refuses connections is not waited for.
    monkeypatch.setattr(handover, "_EMPTY_S", 1e9)

    async def test() -> None:
        async with cells(2, step_s=0.003) as fleet:
            one, two = await fleet.start("one"), await fleet.start("two")
            await until(lambda: [len(p.cell.members) for p in (one, two)] == [1, 1])
            router = await fleet.session(one)
            flight = await router.submit(prompt_of(40), 2000)
            suspect = await router.submit(prompt_of(40), 2000, num_suspicions=1)
            for one_of_them in (flight, suspect):
                await one_of_them.until(lambda f=one_of_them: bool(f.tokens))
            victim = one.cell.members[0].state.worker_id
            await next(w for w in fleet.workers if w.worker_id == victim).stop()
            await until(lambda: router.moved_to is not None)
            assert router.moved_to == f"127.0.0.1:{two.port}"
            assert not flight.finished
            # Workers may die of a request in one cell after the other: it keeps its record.
            assert router.suspects == {2: 1}

    run(test)


def test_a_scheduler_alone_finishes_what_it_can() -> None:
    async def test() -> None:
        async with cells(1, step_s=0.002) as fleet:
            one = await fleet.start("one")
            await until(lambda: len(one.cell.members) == 1)
            router = await fleet.session(one)
            flight = await router.submit(prompt_of(40), 50)
            await flight.until(lambda: bool(flight.tokens))
            await one.leave(10.0)
            await flight.over()
            assert flight.tokens[0] == expected_tokens(prompt_of(40), 50)
            assert router.moved_to is None

    run(test)


def test_of_two_that_leave_at_once_none_leaves_its_work_to_the_other() -> None:
    async def test() -> None:
        async with cells(2, step_s=0.002) as fleet:
            both = [await fleet.start("one"), await fleet.start("two")]
            await until(lambda: all(p.is_serving and p.cell.members for p in both))
            routers = [await fleet.session(process) for process in both]
            flights = [await router.submit(prompt_of(40), 60) for router in routers]
            for flight in flights:
                await flight.until(lambda flight=flight: bool(flight.tokens))
            await asyncio.gather(*(process.leave(20.0) for process in both))
            await asyncio.gather(*(flight.over() for flight in flights))
            assert all(f.tokens[0] == expected_tokens(prompt_of(40), 60) for f in flights)

    run(test)


def test_a_taken_worker_takes_the_requests_with_it() -> None:
    async def test() -> None:
        async with cells(1, step_s=0.003) as fleet:
            one = await fleet.start("one")
            await until(lambda: len(one.cell.members) == 1)
            router = await fleet.session(one)
            flight = await router.submit(prompt_of(40), 2000)
            await flight.until(lambda: bool(flight.tokens))
            taken = worker_pb2.StepsSuperseded(leader_id="two", epoch=2)
            await fleet.workers[0].supersede(taken)
            await until(lambda: router.moved_to is not None)
            assert not flight.finished
            value = one.metrics.registry.get_sample_value
            assert value("octavo_moves_total", {"reason": "taken"}) == 1

    run(test)
