"""Whatever is wrong with a request, its sender is told what, and nobody else feels it.

Every case of the table goes to a real stack while control streams run beside it.
"""

import asyncio
import json
import re
from typing import Any, NoReturn

import grpc.aio
import httpx
import pytest

from octavo.serving import open_channel
from tests.e2e.edge import control, full_logs
from tests.e2e.malformed_cases import (
    GRPC_CASES,
    HTTP_CASES,
    RAW_CASES,
    GrpcCase,
    HttpCase,
    RawCase,
)
from tests.e2e.stack import Stack, total
from tests.fakes.raw_http import dialling

AT_ONCE = 8
FINISHED = 'octavo_requests_total{endpoint="completions",outcome="length"}'
SERVICE = "/octavo.v1.Inference/"


def test_the_table_is_large_and_has_no_case_twice() -> None:
    cases = [*HTTP_CASES, *RAW_CASES, *GRPC_CASES]
    assert len(HTTP_CASES) >= 400
    assert len(GRPC_CASES) >= 50
    assert len({repr(case) for case in cases}) == len(cases)


def strict(text: str) -> Any:
    def refuse(name: str) -> NoReturn:
        raise AssertionError(f"{name} in an answer")

    return json.loads(text, parse_constant=refuse)


def check_refusal(status: int, headers: Any, text: str, case: HttpCase | RawCase) -> None:
    """The right status, an OpenAI error of bounded size, CORS, the field's name."""
    assert status == case.status, (case.name, text[:300])
    assert headers["content-type"] == "application/json", case.name
    assert headers["access-control-allow-origin"] == "*", case.name
    assert ("www-authenticate" in headers) == (status == 401), case.name
    body = strict(text)
    assert set(body) == {"error"}, case.name
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}, case.name
    assert error["type"] == "invalid_request_error", case.name
    assert 0 < len(error["message"]) < 500, case.name
    assert re.fullmatch(r"[\x20-\x7e]+", error["message"]), case.name
    assert "Traceback" not in error["message"]
    if isinstance(case, HttpCase):
        is_named = (error["param"] or "").startswith(case.param or "")
        assert is_named if case.param else error["param"] is None, (case.name, error)
        if case.code is not None:
            assert error["code"] == case.code, case.name


async def send_http(client: httpx.AsyncClient, case: HttpCase) -> None:
    answer = await client.request(
        case.method, case.path, content=case.body, headers=list(case.headers)
    )
    check_refusal(answer.status_code, answer.headers, answer.text, case)


async def send_raw(port: int, case: RawCase) -> None:
    async with dialling(port) as dial:
        connection = await (await dial()).say(case.data)
        status, headers, body = await connection.answer()
        check_refusal(status, headers, body.decode(), case)


async def send_grpc(channel: grpc.aio.Channel, case: GrpcCase) -> None:
    data = case.message if isinstance(case.message, bytes) else case.message.SerializeToString()
    call = channel.unary_stream(SERVICE + case.method)(
        data, metadata=list(case.metadata), timeout=30
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    error = caught.value
    assert error.code().name == case.code, (case.name, error.details())
    param = dict(error.trailing_metadata() or ()).get("octavo-param")
    assert str(param).startswith(case.param) if case.param else param is None, case.name
    assert 0 < len(error.details() or "") < 500, case.name


def counters(stack: Stack) -> dict[str, float]:
    """Sequences that the scheduler ended, prompt tokens that it was sent, the router's ends."""
    scheduler, router = stack.scheduler_metrics(), stack.router_metrics()
    return {
        "sequences": total(scheduler, "octavo_sequence_outcomes_total"),
        "prompt tokens": total(scheduler, "octavo_prefix_cache_queries_total"),
        "finished": router.get(FINISHED, 0),
        "errors": sum(value for name, value in router.items() if 'outcome="error"' in name),
    }


def test_every_bad_request_is_refused_and_nobody_else_feels_it(edge_stack: Stack) -> None:
    stack = edge_stack
    port = stack.routers[0].ports["port"]

    async def main() -> list[tuple[str, int]]:
        gate = asyncio.Semaphore(AT_ONCE)
        is_over = asyncio.Event()

        async def keep_streaming(client: httpx.AsyncClient) -> None:
            while not is_over.is_set():
                controls.append(await control(client))

        async def gated(send: Any, via: Any, case: Any) -> None:
            async with gate:
                try:
                    await send(via, case)
                except BaseException as error:
                    raise AssertionError(f"{case.name}: {error!r}") from error

        async with (
            httpx.AsyncClient(base_url=stack.url, timeout=60) as client,
            open_channel(stack.grpc_address) as channel,
        ):
            controls = [await control(client)]
            streaming = asyncio.create_task(keep_streaming(client))
            outcomes = await asyncio.gather(
                *(gated(send_http, client, case) for case in HTTP_CASES),
                *(gated(send_raw, port, case) for case in RAW_CASES),
                *(gated(send_grpc, channel, case) for case in GRPC_CASES),
                return_exceptions=True,
            )
            is_over.set()
            await streaming
        wrong = [str(outcome) for outcome in outcomes if outcome is not None]
        assert not wrong, "\n".join(wrong)
        return controls

    before = counters(stack)
    controls = asyncio.run(main())
    assert len(controls) >= 2
    assert len(set(controls)) == 1
    stack.wait_idle()
    after = counters(stack)
    assert {name: after[name] - before[name] for name in after} == {
        "sequences": len(controls),
        "prompt tokens": len(controls) * controls[0][1],
        "finished": len(controls),
        "errors": 0,
    }
    assert total(stack.router_metrics(), "octavo_requests_in_flight") == 0
    assert "Traceback" not in full_logs(stack)
