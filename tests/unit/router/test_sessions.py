"""Sessions that break: the same stream goes on, with no id lost or doubled."""

import asyncio
import logging
from typing import Any

import pytest

from octavo.bloom import build_filter
from octavo.registry import MemoryRegistry, SchedulerRecord
from octavo.v1 import common_pb2
from octavo_router import session as session_module
from tests.fakes.fake_scheduler import FakeScheduler, Plan, ids_of
from tests.fakes.router_process import RunningRouter, byte_scheduler, running_router, until
from tests.sse_parser import Stream

BODY = {"prompt": "abc", "max_tokens": 60, "n": 2, "seed": 5}


def fake_cell(name: str, **options: Any) -> FakeScheduler:
    return byte_scheduler(scheduler_id=name, interval_s=0.003, num_cached_tokens=16, **options)


async def undisturbed() -> list[str]:
    fake = fake_cell("calm")
    async with running_router(fake) as router:
        stream = await router.stream("/v1/completions", BODY, 2)
        return [stream.text(0), stream.text(1)]


def check_same(stream: Stream, texts: list[str]) -> None:
    assert [stream.text(0), stream.text(1)] == texts
    assert stream.finish(0) == stream.finish(1) == "length"
    assert stream.usage is not None
    assert stream.usage["completion_tokens"] == 120
    # The first start's hits: a move adds none.
    assert stream.usage["prompt_tokens_details"]["cached_tokens"] == 16


async def streaming(router: RunningRouter) -> Any:
    body = {**BODY, "stream_options": {"include_usage": True}}
    return asyncio.create_task(router.stream("/v1/completions", body, 2))


async def num_sent(fake: FakeScheduler, count: int) -> None:
    """Until the fake sent `count` ids of every sequence."""
    await until(
        lambda: any(
            sequence.num_sent >= count
            for session in fake._sessions
            for sequence in session.sequences.values()
        )
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
    caplog: pytest.LogCaptureFixture,
) -> None:
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
