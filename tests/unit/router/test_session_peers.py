"""What two ends of a session ask of each other: versions, hashes, pings, sizes."""

import asyncio

import pytest

from octavo_router import session as session_module
from tests.fakes.router_process import running_router, until
from tests.unit.router.sessions_cases import (
    BODY,
    check_same,
    fake_cell,
    num_sent,
    streaming,
    undisturbed,
)


def test_an_idle_session_is_pinged() -> None:
    async def main() -> None:
        fake = fake_cell("one")
        async with running_router(fake):
            await until(lambda: fake.num_pings >= 2)

    asyncio.run(main())


@pytest.mark.parametrize("field", ["wire_version", "hash_version"])
def test_versions_that_do_not_fit_are_not_spoken_to(field: str) -> None:
    async def main() -> None:
        fake = fake_cell("future")
        if field == "wire_version":
            fake.wire_version += 2
        else:
            fake.model.hash_version += 1
        async with running_router(fake, wait_ready=False, redial_ms=50) as router:
            answer = await router.http.post("/v1/completions", json={"prompt": "x"})
            assert answer.status_code == 503
            assert not fake.submits

    asyncio.run(main())


@pytest.mark.parametrize("distance", [-1, 1])
def test_a_scheduler_one_version_away_serves(distance: int) -> None:
    async def main() -> None:
        texts = await undisturbed()
        fake = fake_cell("neighbour")
        fake.wire_version += distance
        async with running_router(fake) as router:
            check_same(await (await streaming(router)), texts)

    asyncio.run(main())


def test_cells_of_another_block_size_get_their_own_hashes() -> None:
    async def main() -> None:
        one, two = fake_cell("one", block_size=16), fake_cell("two", block_size=32)
        async with running_router(one, two, redial_ms=5) as router:
            body = {**BODY, "prompt": "p" * 70}
            task = asyncio.create_task(router.http.post("/v1/completions", json=body))
            await until(lambda: bool(one.submits or two.submits))
            used, other = (one, two) if one.submits else (two, one)
            await num_sent(used, 3)
            await used.stop()
            assert (await task).status_code == 200
            sizes = {one: 4, two: 2}
            assert len(used.submits[0].block_hashes) == 16 * sizes[used]
            assert len(other.submits[0].block_hashes) == 16 * sizes[other]
            assert used.submits[0].root_hash != other.submits[0].root_hash

    asyncio.run(main())


def test_a_silent_scheduler_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "PING_S", 0.05)

    async def main() -> None:
        texts = await undisturbed()
        cells = [fake_cell("one"), fake_cell("two")]
        async with running_router(*cells) as router:
            # Pings are answered: nothing is given up.
            await until(lambda: min(cell.num_pings for cell in cells) > 12)
            assert [cell.num_sessions for cell in cells] == [1, 1]
            task = await streaming(router)
            await until(lambda: any(cell.submits for cell in cells))
            used = next(cell for cell in cells if cell.submits)
            await num_sent(used, 10)
            used.is_paused = used.is_silent = True
            check_same(await task, texts)
            assert sum(len(cell.submits) for cell in cells) == 2

    asyncio.run(main())


def test_the_largest_request_is_kept_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "PING_S", 0.02)

    async def main() -> None:
        fake = fake_cell("one", max_request_tokens=100)
        async with running_router(fake) as router:
            model = router.service.sessions.model
            assert model is not None
            assert model.max_request_tokens == 100
            fake.max_request_tokens = 50
            await until(lambda: router.service.sessions.model.max_request_tokens == 50)

    asyncio.run(main())
