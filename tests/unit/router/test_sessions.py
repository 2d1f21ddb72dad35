"""Sessions that break: the same stream goes on, with no id lost or doubled."""

import asyncio
import logging
from typing import Any

import pytest

from octavo.v1 import common_pb2
from tests.fakes.fake_scheduler import Plan, ids_of
from tests.fakes.router_process import byte_scheduler, running_router, until
from tests.unit.router.sessions_cases import (
    BODY,
    check_same,
    fake_cell,
    num_sent,
    streaming,
    undisturbed,
)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 59])
def test_a_dropped_session_is_resumed_with_what_was_delivered(count: int) -> None:
    async def main() -> None:
        texts = await undisturbed()
        fake = fake_cell("one")
        fake.hold_at = count
        async with running_router(fake) as router:
            task = await streaming(router)
            await until(lambda: bool(fake.submits))
            await num_sent(fake, count)
            fake.num_cached_tokens = 16 if count == 0 else 32
            fake.drop_sessions()
            fake.hold_at = None
            check_same(await task, texts)
            first, second = fake.submits
            assert second.sampling == first.sampling
            assert second.block_hashes == first.block_hashes
            delivered = {r.sequence_index: ids_of(r.delivered_token_ids) for r in second.resumes}
            assert all(len(ids) >= count for ids in delivered.values())
            for index, ids in delivered.items():
                assert texts[index].startswith(bytes(ids).decode())
            assert router.value("octavo_router_moves_total") == 1
            assert fake.num_sessions == 2

    asyncio.run(main())


def test_a_session_that_its_peer_cancels_is_a_lost_one() -> None:
    async def main() -> None:
        texts = await undisturbed()
        fake = fake_cell("one")
        async with running_router(fake) as router:
            task = await streaming(router)
            await until(lambda: bool(fake.submits))
            await num_sent(fake, 5)
            fake.cancel_sessions()
            check_same(await task, texts)
            assert fake.num_sessions == 2

    asyncio.run(main())


def test_only_a_scheduler_that_stays_away_is_worth_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo_router.sessions._PATIENCE", 5)

    def levels() -> list[int]:
        return [r.levelno for r in caplog.records if "not connected" in r.getMessage()]

    async def main() -> None:
        fake = fake_cell("late")
        address = await fake.start()
        await fake.stop()
        async with running_router(wait_ready=False, schedulers=(address,)) as router:
            await until(lambda: logging.WARNING in levels())
            seen = levels()
            assert seen[0] == logging.INFO
            assert seen.count(logging.WARNING) == 1
            await fake.start(int(address.rpartition(":")[2]))
            await until(lambda: router.value("octavo_router_sessions") == 1)
            await fake.stop()

    caplog.set_level(logging.DEBUG)
    asyncio.run(main())


def test_a_whole_answer_survives_too() -> None:
    async def main() -> None:
        texts = await undisturbed()
        fake = fake_cell("one")
        async with running_router(fake) as router:
            task = asyncio.create_task(router.http.post("/v1/completions", json=BODY))
            await until(lambda: bool(fake.submits))
            await num_sent(fake, 5)
            fake.drop_sessions()
            choices = (await task).json()["choices"]
            assert [choice["text"] for choice in choices] == texts

    asyncio.run(main())


def test_a_finished_sibling_is_not_generated_again() -> None:
    def script(submit: Any, index: int) -> Any:
        return Plan([97 + index] * (3 if index == 0 else 60))

    async def main() -> None:
        fake = byte_scheduler(script=script, interval_s=0.003)
        async with running_router(fake) as router:
            task = await streaming(router)
            await until(lambda: bool(fake.submits))
            await num_sent(fake, 10)
            fake.drop_sessions()
            stream = await task
            assert [stream.text(0), stream.text(1)] == ["aaa", "b" * 60]
            resumes = {r.sequence_index: r for r in fake.submits[1].resumes}
            assert resumes[0].finished
            assert not resumes[1].finished

    asyncio.run(main())


def test_a_killed_scheduler_is_replaced_by_another() -> None:
    async def main() -> None:
        texts = await undisturbed()
        cells = [fake_cell("one"), fake_cell("two")]
        async with running_router(*cells) as router:
            task = await streaming(router)
            await until(lambda: any(cell.submits for cell in cells))
            used, other = cells if cells[0].submits else reversed(cells)
            await num_sent(used, 10)
            await used.stop()
            check_same(await task, texts)
            assert len(other.submits) == 1
            assert other.submits[0].resumes

    asyncio.run(main())


def test_a_scheduler_that_comes_back_later() -> None:
    async def main() -> None:
        texts = await undisturbed()
        fake = fake_cell("one")
        async with running_router(fake, redial_ms=5) as router:
            task = await streaming(router)
            await until(lambda: bool(fake.submits))
            await num_sent(fake, 10)
            port = int(fake.address.rpartition(":")[2])
            await fake.stop()
            await until(lambda: router.value("octavo_router_sessions") == 0)
            answer = await router.http.post("/v1/completions", json={"prompt": "x"})
            assert answer.status_code == 503
            await fake.start(port)
            check_same(await task, texts)

    asyncio.run(main())


def test_a_lost_scheduler_leaves_its_suspicions() -> None:
    async def main() -> None:
        texts = await undisturbed()
        fake = fake_cell("one")
        fake.hold_at = 10
        async with running_router(fake) as router:
            task = await streaming(router)
            await until(lambda: bool(fake.submits))
            fake.tell_suspects(2)
            await num_sent(fake, 10)
            fake.drop_sessions()
            fake.hold_at = None
            check_same(await task, texts)
            assert [submit.num_suspicions for submit in fake.submits] == [0, 2]

    asyncio.run(main())


@pytest.mark.parametrize("is_named", [True, False])
def test_moved(is_named: bool) -> None:
    async def main() -> None:
        texts = await undisturbed()
        cells = [fake_cell("one"), fake_cell("two")]
        # A hand-over is no loss: it doesn't count against max_moves.
        async with running_router(*cells, max_moves=0) as router:
            task = await streaming(router)
            await until(lambda: any(cell.submits for cell in cells))
            used, other = cells if cells[0].submits else reversed(cells)
            await num_sent(used, 10)
            used.num_suspicions = 2
            used.move_sessions(other.address if is_named else "")
            check_same(await task, texts)
            (submit,) = other.submits
            assert (submit.lost_scheduler_id, submit.num_suspicions) == (used.scheduler_id, 2)

    asyncio.run(main())


def test_moved_to_a_stranger() -> None:
    async def main() -> None:
        texts = await undisturbed()
        one, two = fake_cell("one"), fake_cell("two")
        async with two, running_router(one) as router:
            task = await streaming(router)
            await until(lambda: bool(one.submits))
            await num_sent(one, 10)
            one.move_sessions(two.address)
            check_same(await task, texts)
            assert len(two.submits) == 1

    asyncio.run(main())


def test_a_request_that_breaks_schedulers_is_an_error() -> None:
    async def main() -> None:
        fake = fake_cell("one")
        async with running_router(fake, max_moves=2) as router:
            fake.is_paused = True
            task = asyncio.create_task(router.http.post("/v1/completions", json=BODY))
            for number in range(1, 4):
                await until(lambda n=number: len(fake.submits) == n and fake.num_live == 2)
                fake.drop_sessions()
            answer = await task
            assert answer.status_code == 500
            assert "limit 2" in answer.json()["error"]["message"]
            await until(lambda: router.outcomes() == {("completions", "error"): 1})

    asyncio.run(main())


def test_a_stream_that_runs_is_not_to_blame() -> None:
    async def main() -> None:
        texts = await undisturbed()
        fake = fake_cell("one")
        async with running_router(fake, max_moves=0) as router:
            task = await streaming(router)
            for number in range(1, 6):
                await until(lambda n=number: len(fake.submits) == n)
                await num_sent(fake, 8 * number)
                fake.drop_sessions()
            check_same(await task, texts)

    asyncio.run(main())


def test_a_lost_request_that_is_refused_waits_for_who_takes_it() -> None:
    async def main() -> None:
        texts = await undisturbed()
        cells = [fake_cell("one"), fake_cell("two")]
        async with running_router(*cells) as router:
            task = await streaming(router)
            await until(lambda: any(cell.submits for cell in cells))
            used, other = cells if cells[0].submits else reversed(cells)
            await num_sent(used, 10)
            other.reject = common_pb2.Error(code=14, message="the scheduler is draining")
            await used.stop()
            await until(lambda: len(other.submits) >= 2)
            assert all(s.lost_scheduler_id == used.scheduler_id for s in other.submits)
            other.reject = None
            check_same(await task, texts)

    asyncio.run(main())
