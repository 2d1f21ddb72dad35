"""Bugs of ours: the client gets a plain error over either door, and no log repeats a prompt."""

import asyncio
import logging
from typing import Any, NoReturn

import grpc
import pytest

from octavo.v1 import inference_pb2
from octavo_router.edge import FAILURE, trace_of
from tests.fakes.router_process import RunningRouter, byte_scheduler, running_router

SECRET = "zqxjkv the prompt"


def broken(text: str, **_: Any) -> NoReturn:
    raise ValueError(f"can't encode {text!r}")


async def over_http(router: RunningRouter) -> None:
    for body in ({"prompt": SECRET}, {"prompt": SECRET, "stream": True}):
        answer = await router.http.post("/v1/completions", json=body)
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == FAILURE
    answer = await router.http.post("/tokenize", json={"prompt": SECRET})
    assert answer.json()["error"]["message"] == FAILURE


async def over_grpc(router: RunningRouter) -> None:
    generate = router.inference.Generate(inference_pb2.InferenceGenerateRequest(text=SECRET))
    tokenize = router.inference.Tokenize(inference_pb2.InferenceTokenizeRequest(text=SECRET))
    for call in (generate, tokenize):
        assert await call.code() == grpc.StatusCode.INTERNAL
        assert await call.details() == FAILURE


@pytest.mark.parametrize("door", [over_http, over_grpc])
def test_failures_say_where_and_not_what(door: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with running_router(byte_scheduler()) as router:
            router.service.pipeline.tokenizer.encode = broken  # type: ignore[method-assign]
            await door(router)
            assert {outcome for _, outcome in router.outcomes()} == {"error"}
            assert router.value("octavo_requests_in_flight") == 0

    with caplog.at_level(logging.DEBUG):
        asyncio.run(main())
    assert SECRET not in caplog.text
    assert "ValueError at" in caplog.text
    assert "test_failures.py" in caplog.text


def test_a_trace_has_no_message() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        raise ZeroDivisionError(SECRET)
    trace = trace_of(caught.value)
    assert trace.startswith("ZeroDivisionError at\n")
    assert "test_a_trace_has_no_message" in trace
    assert SECRET not in trace
