"""Which refusals of a full cell still hold, and for whom."""

import asyncio

import pytest

from octavo.errors import OverloadedError
from octavo.v1 import common_pb2
from octavo_router import fullness as fullness_module
from octavo_router import session as session_module
from octavo_router.fullness import MAX_AGE_S, Fullness
from tests.fakes.router_process import byte_scheduler, running_router, until

ERROR = OverloadedError("full", retry_after_ms=300)
BODY = {"prompt": "abc", "max_tokens": 5}


def full(priority: int = 0) -> Fullness:
    """Tenant "a" was refused at 0 s, while 100 tokens waited."""
    fullness = Fullness()
    fullness.refused("a", priority, 100, 0.0, ERROR)
    return fullness


def test_a_refusal_holds_for_its_tenant_at_its_priority_and_below() -> None:
    fullness = full(priority=1)
    assert fullness.find("a", 1, 0.1) is ERROR
    assert fullness.find("a", 0, 0.1) is ERROR
    assert fullness.find("a", 2, 0.1) is None
    assert fullness.find("b", 0, 0.1) is None


def test_it_holds_until_the_cell_has_less_to_do() -> None:
    fullness = full()
    fullness.hear(100)
    fullness.hear(101)
    assert fullness.find("a", 0, 0.1) is ERROR
    fullness.hear(99)
    assert fullness.find("a", 0, 0.1) is None


def test_it_does_not_hold_for_long() -> None:
    fullness = full()
    assert fullness.find("a", 0, MAX_AGE_S - 0.01) is ERROR
    assert fullness.find("a", 0, MAX_AGE_S) is None


def test_a_lower_priority_hides_no_higher_one() -> None:
    fullness = full(priority=1)
    fullness.refused("a", 0, 90, 0.1, ERROR)
    assert fullness.find("a", 1, 0.1) is ERROR
    # Once the higher one's time is over the lower one's counts.
    fullness.refused("a", 0, 90, MAX_AGE_S, ERROR)
    assert fullness.find("a", 1, MAX_AGE_S) is None
    assert fullness.find("a", 0, MAX_AGE_S) is ERROR


def test_a_full_cell_is_not_asked_again_until_it_tells_of_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fullness_module, "MAX_AGE_S", 1e9)
    monkeypatch.setattr(session_module, "PING_S", 0.02)

    async def main() -> None:
        fake = byte_scheduler()
        fake.load = common_pb2.Load(num_blocks=1024, prompt_backlog_tokens=100)
        fake.reject = common_pb2.Error(code=8, message="full", retry_after_ms=1500)
        fake.is_full = True
        async with running_router(fake) as router:
            answers = [await router.http.post("/v1/completions", json=BODY) for _ in range(3)]
            assert [answer.status_code for answer in answers] == [429] * 3
            assert [answer.headers["retry-after"] for answer in answers] == ["2"] * 3
            assert {answer.json()["error"]["message"] for answer in answers} == {"full"}
            assert len(fake.submits) == 1
            fake.reject = None
            fake.load = common_pb2.Load(num_blocks=1024, prompt_backlog_tokens=99)
            num_pings = fake.num_pings
            await until(lambda: fake.num_pings > num_pings + 1)
            answer = await router.http.post("/v1/completions", json=BODY)
            assert answer.status_code == 200
            assert len(fake.submits) == 2

    asyncio.run(main())


def test_a_cell_that_only_a_large_request_overfills_is_asked_again() -> None:
    async def main() -> None:
        fake = byte_scheduler()
        fake.reject = common_pb2.Error(code=8, message="full", retry_after_ms=1500)
        async with running_router(fake) as router:
            for _ in range(2):
                answer = await router.http.post("/v1/completions", json=BODY)
                assert answer.status_code == 429
            assert len(fake.submits) == 2

    asyncio.run(main())


def test_another_cell_that_may_have_room_is_asked() -> None:
    async def main() -> None:
        fakes = [byte_scheduler(scheduler_id=name) for name in ("one", "two")]
        fakes[0].reject = common_pb2.Error(code=8, message="full", retry_after_ms=1500)
        fakes[0].is_full = True
        async with running_router(*fakes) as router:
            for _ in range(6):
                answer = await router.http.post("/v1/completions", json=BODY)
                assert answer.status_code == 200

    asyncio.run(main())
