"""Several cells: who takes what is lost, new or too much for one; how they are found."""

import asyncio

import pytest

from octavo.bloom import build_filter
from octavo.registry import MemoryRegistry, SchedulerRecord
from octavo.v1 import common_pb2
from octavo_router import session as session_module
from tests.fakes.fake_scheduler import FakeScheduler
from tests.fakes.router_process import running_router, until
from tests.unit.router.sessions_cases import check_same, fake_cell, num_sent, streaming, undisturbed


def test_a_cell_without_workers_gets_what_was_lost_and_nothing_new() -> None:
    async def main() -> None:
        texts = await undisturbed()
        used, spare = fake_cell("used"), fake_cell("spare")
        spare.load.num_blocks = 0
        async with running_router(used, spare) as router:
            for number in range(8):
                answer = await router.http.post(
                    "/v1/completions", json={"prompt": f"{number}" * 70}
                )
                assert answer.status_code == 200
            assert not spare.submits
            task = await streaming(router)
            await num_sent(used, 10)
            await used.stop()
            check_same(await task, texts)
            assert len(spare.submits) == 1

    asyncio.run(main())


@pytest.mark.parametrize("is_known", [True, False])
def test_a_cell_that_hands_over_passes_new_requests_to_its_heir(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heir has no workers yet; whether or not the router knew when the request came."""
    if not is_known:
        monkeypatch.setattr(session_module, "PING_S", 60.0)

    async def main() -> None:
        texts = await undisturbed()
        leaving, heir = fake_cell("leaving"), fake_cell("heir")
        heir.load.num_blocks = 0
        async with running_router(leaving, heir) as router:
            # The first answer to a ping tells that it stays.
            await until(lambda: leaving.num_pings > 0)
            leaving.load.draining = True
            leaving.reject = common_pb2.Error(code=14, message="the scheduler is draining")
            if is_known:
                await until(lambda: not router.service.is_ready)
            check_same(await (await streaming(router)), texts)
            assert len(leaving.submits) == (0 if is_known else 1)
            assert [submit.lost_scheduler_id for submit in heir.submits] == ["leaving"]
            # Without an heir the client is told at once.
            await heir.stop()
            await until(lambda: len(router.service.sessions.connected()) == 1)
            answer = await router.http.post("/v1/completions", json={"prompt": "x" * 70})
            assert answer.status_code == 503

    asyncio.run(main())


def test_a_busy_cell_passes_the_request_on_once() -> None:
    async def main() -> None:
        cells = [fake_cell(name) for name in ("one", "two", "three")]
        async with running_router(*cells) as router:
            for cell in cells[:2]:
                cell.reject = common_pb2.Error(code=8, message="full", retry_after_ms=1500)
            statuses: list[int] = []
            for number in range(12):
                prompt = f"{number}" * 70
                answer = await router.http.post(
                    "/v1/completions", json={"prompt": prompt, "max_tokens": 1}
                )
                statuses.append(answer.status_code)
                num_tries = sum(len(cell.submits) for cell in cells)
                assert num_tries <= 2 * (number + 1)
            assert set(statuses) <= {200, 429}
            assert 200 in statuses
            # What is wrong with the request is wrong everywhere.
            for cell in cells:
                cell.reject = common_pb2.Error(code=3, message="too long")
            before = sum(len(cell.submits) for cell in cells)
            answer = await router.http.post("/v1/completions", json={"prompt": "x" * 70})
            assert answer.status_code == 400
            assert sum(len(cell.submits) for cell in cells) == before + 1

    asyncio.run(main())


def test_a_published_filter_draws_its_prompts() -> None:
    async def main() -> None:
        cells = [fake_cell(name) for name in ("one", "two")]
        registry = MemoryRegistry()
        async with running_router(*cells, registry=registry) as router:
            bodies = [{"prompt": f"{i}" * 70, "max_tokens": 1} for i in range(8)]
            for body in bodies:
                await router.http.post("/v1/completions", json=body)
            held = {name: cell.submits[:] for name, cell in zip("12", cells, strict=True)}
            assert all(held.values())
            # Each now says that it holds what the other computed: the prompts change sides.
            for cell, other in (cells, cells[::-1]):
                hashes = [
                    s.block_hashes[i : i + 16] for s in other.submits for i in range(0, 64, 16)
                ]
                registry.announce_scheduler(record_of(cell))
                registry.publish_filter(cell.scheduler_id, build_filter(hashes))
            await until(lambda: len(router.service.sessions._filters) == 2)
            for cell in cells:
                cell.submits.clear()
            for body in bodies:
                await router.http.post("/v1/completions", json=body)
            swapped = {name: cell.submits for name, cell in zip("21", cells, strict=True)}
            for name, submits in held.items():
                was = {submit.block_hashes for submit in submits}
                assert {submit.block_hashes for submit in swapped[name]} == was
            # Rubbish is as good as nothing.
            registry.publish_filter("one", b"rubbish")
            await until(lambda: len(router.service.sessions._filters) == 1)

    asyncio.run(main())


def test_schedulers_are_discovered() -> None:
    async def main() -> None:
        one = fake_cell("one")
        registry = MemoryRegistry()
        async with one, running_router(registry=registry) as router:
            registry.announce_scheduler(record_of(one))
            await until(lambda: router.service.sessions.is_ready)
            answer = await router.http.post("/v1/completions", json={"prompt": "x"})
            assert answer.status_code == 200
            # A record that vanishes ends no session.
            await registry.close()
            await asyncio.sleep(1.2)
            assert router.service.sessions.is_ready

    asyncio.run(main())


def record_of(fake: FakeScheduler) -> SchedulerRecord:
    return SchedulerRecord(fake.scheduler_id, fake.address, "fake/model", 1, 0, 0, draining=False)
