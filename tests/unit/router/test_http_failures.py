"""What ends a good request badly: its status as long as none was sent, else one error event."""

import asyncio
from typing import Any, NoReturn

import pytest

from octavo.v1 import common_pb2
from octavo_router import http_generate
from tests.fakes.fake_scheduler import Plan
from tests.fakes.router_process import RunningRouter, byte_scheduler, running_router
from tests.unit.router.http_answers import TEXT
from tests.unit.router.http_errors import check_error, run


def test_a_refusal_of_the_scheduler_is_a_status_even_when_streaming() -> None:
    async def check(router: RunningRouter, fake: Any) -> None:
        for code, status, retry in [(8, 429, 2500), (3, 400, None), (14, 503, 10), (13, 500, None)]:
            fake.reject = common_pb2.Error(
                code=code, message="no room", param="", retry_after_ms=retry
            )
            for stream in (False, True):
                answer = await router.http.post(TEXT, json={"prompt": "x", "stream": stream})
                assert check_error(answer, status)["message"] == "no room"
                if retry:
                    assert answer.headers["retry-after"] == str(-(-retry // 1000))
        outcomes = router.outcomes()
        assert outcomes == {("completions", "rejected"): 6, ("completions", "error"): 2}

    run(check)


def test_a_refusal_is_a_status_as_long_as_the_stream_has_no_row() -> None:
    async def check(router: RunningRouter, fake: Any) -> None:
        fake.is_paused = True
        body = {"prompt": "x", "stream": True}
        posting = asyncio.create_task(router.http.post(TEXT, json=body))
        await asyncio.sleep(0.4)  # as a busy scheduler, or a second cell, takes
        fake.refuse_waiting(common_pb2.Error(code=8, message="no room", retry_after_ms=2500))
        answer = await posting
        assert check_error(answer, 429)["message"] == "no room"
        assert answer.headers["retry-after"] == "3"

    run(check)


def test_a_stream_that_waits_long_for_its_row_has_its_headers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_generate, "HEADERS_WAIT_S", 0.3)

    async def check(router: RunningRouter, fake: Any) -> None:
        fake.is_paused = True
        body = {"prompt": "x", "stream": True}
        async with router.http.stream("POST", TEXT, json=body) as answer:
            assert answer.status_code == 200
            fake.refuse_waiting(common_pb2.Error(code=8, message="no room", retry_after_ms=2500))
            text = (await answer.aread()).decode()
        assert '"message":"no room"' in text
        assert text.endswith("data: [DONE]\n\n")

    run(check)


def test_a_failing_sequence_is_one_error() -> None:
    failure = common_pb2.Error(code=13, message="the worker gave up")

    async def main() -> None:
        fake = byte_scheduler(
            script=lambda _, index: Plan(
                [97, 98], common_pb2.FINISH_REASON_ERROR if index else 2, failure if index else None
            )
        )
        async with running_router(fake) as router:
            body = {"prompt": "x", "n": 2}
            answer = await router.http.post(TEXT, json=body)
            assert check_error(answer, 500)["message"] == "the worker gave up"
            streamed = await router.stream(TEXT, body, 2)
            assert streamed.error is not None
            assert streamed.error["message"] == "the worker gave up"
            assert router.outcomes() == {("completions", "error"): 2}

    asyncio.run(main())


def test_deadline() -> None:
    async def main() -> None:
        fake = byte_scheduler(interval_s=0.01)
        async with running_router(fake, request_timeout_s=0.1) as router:
            body = {"prompt": "x", "max_tokens": 1000}
            answer = await router.http.post(TEXT, json=body)
            assert check_error(answer, 504)["code"] == "deadline_exceeded"
            streamed = await router.stream(TEXT, body)
            assert streamed.error is not None
            assert streamed.error["code"] == "deadline_exceeded"
            assert 0 < fake.submits[0].deadline_ms <= 100
            assert {cancel.reason for cancel in fake.cancels} == {3}
            assert router.outcomes() == {("completions", "deadline"): 2}

    asyncio.run(main())


def test_an_unexpected_failure_is_a_plain_500() -> None:
    async def check(router: RunningRouter, fake: Any) -> None:
        def broken(*args: Any, **kwargs: Any) -> NoReturn:
            raise ZeroDivisionError("secret detail")

        router.service.pipeline.tokenizer.encode = broken  # type: ignore[method-assign]
        answer = await router.http.post(TEXT, json={"prompt": "x"})
        error = check_error(answer, 500)
        assert "secret" not in error["message"]
        assert answer.headers["access-control-allow-origin"] == "*"
        assert router.outcomes() == {("completions", "error"): 1}

    run(check)
