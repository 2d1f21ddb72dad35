"""The HTTP door against a real stack: keys, ids, framing, odd clients, many clients."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from octavo.settings import RouterSettings
from tests.e2e.edge import (
    CHAT,
    CONTROL,
    KEY,
    TEXT,
    control,
    full_logs,
    http_client,
    raw_request,
)
from tests.e2e.stack import Stack, total
from tests.fakes.raw_http import Connection, Dial, dialling
from tests.fakes.router_process import until
from tests.sse_parser import parse

OPEN = {"/livez", "/readyz", "/health", "/metrics"}
STREAM = {**CONTROL, "stream": True}
Check = Callable[[httpx.AsyncClient, Dial], Awaitable[None]]


def run(stack: Stack, check: Check) -> None:
    """Between two control streams whose texts must be equal; then everything is idle."""

    async def main() -> None:
        async with http_client(stack) as client, dialling(stack.routers[0].ports["port"]) as dial:
            reference = await control(client)
            await check(client, dial)
            assert await control(client) == reference

    asyncio.run(main())
    stack.wait_idle()
    assert total(stack.router_metrics(), "octavo_requests_in_flight") == 0


def paths_of(document: dict[str, Any]) -> set[str]:
    return {path.replace("{model}", "any") for path in document["paths"]}


def test_every_route_but_the_probes_needs_the_key(edge_stack: Stack) -> None:
    async def check(client: httpx.AsyncClient, dial: Dial) -> None:
        paths = paths_of((await client.get("/openapi.json")).json())
        assert {CHAT, TEXT, "/v1/models", *OPEN} <= paths
        async with httpx.AsyncClient(base_url=edge_stack.url) as stranger:
            for path in sorted(paths | {"/docs", "/openapi.json", "/", "/none"}):
                for method in ("GET", "POST", "HEAD", "PUT", "DELETE"):
                    answer = await stranger.request(method, path)
                    if path in OPEN:
                        assert answer.status_code in (200, 405), (method, path)
                        continue
                    assert answer.status_code == 401, (method, path)
                    assert answer.headers["www-authenticate"] == "Bearer"
                    assert answer.headers["access-control-allow-origin"] == "*"
                answer = await stranger.options(
                    path,
                    headers={
                        "origin": "https://app.example",
                        "access-control-request-method": "POST",
                        "access-control-request-headers": "authorization",
                    },
                )
                assert answer.status_code == 204, path
                assert answer.headers["access-control-allow-headers"] == "authorization"
                assert not answer.content

    run(edge_stack, check)


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER  ", "Bearer\t"])
def test_schemes(edge_stack: Stack, scheme: str) -> None:
    answer = httpx.get(f"{edge_stack.url}/v1/models", headers={"authorization": scheme + KEY})
    assert answer.status_code == (401 if "\t" in scheme else 200)


def test_equal_request_ids_are_strangers(edge_stack: Stack) -> None:
    async def check(client: httpx.AsyncClient, dial: Dial) -> None:
        headers = {"X-Request-Id": "the same"}

        async def ask() -> tuple[str, str]:
            answer = await client.post(TEXT, json=CONTROL, headers=headers)
            return answer.json()["choices"][0]["text"], answer.headers["x-request-id"]

        # One of five leaves in the middle.
        leaver = await dial()
        await leaver.say(
            raw_request({**STREAM, "max_tokens": 1500}, headers="X-Request-Id: the same")
        )
        await leaver.reader.readuntil(b"data: ")
        running = [asyncio.create_task(ask()) for _ in range(4)]
        leaver.transport.abort()
        answers = {*await asyncio.gather(*running), await ask()}
        assert len(answers) == 1
        assert {request_id for _, request_id in answers} == {"thesame"}
        samples = edge_stack.router_metrics() | edge_stack.scheduler_metrics()
        assert not [name for name, value in samples.items() if value < 0]

    run(edge_stack, check)


def test_an_idempotency_key_draws_the_same_again(edge_stack: Stack) -> None:
    async def check(client: httpx.AsyncClient, dial: Dial) -> None:
        body = {"prompt": "the cat", "max_tokens": 30, "temperature": 1.0, "ignore_eos": True}
        texts = []
        for key in ("a", "a", "b"):
            answer = await client.post(TEXT, json=body, headers={"Idempotency-Key": key})
            texts.append(answer.json()["choices"][0]["text"])
        assert texts[0] == texts[1] != texts[2]

    run(edge_stack, check)


IDS = [b"", b"x" * 60_000, b"a\tb", b"\xff\xfe", b"<script>", b'"};DROP TABLE', b"\xe2\x80\xa8"]


def test_odd_request_ids(edge_stack: Stack) -> None:
    async def check(client: httpx.AsyncClient, dial: Dial) -> None:
        for given in IDS:
            answer = await client.post(
                TEXT, json=CONTROL, headers=[(b"X-Request-Id", given), *client.headers.raw]
            )
            assert answer.status_code == 200
            echoed = answer.headers["x-request-id"]
            assert 0 < len(echoed) <= 128
            assert echoed.isascii()
            assert echoed.isprintable()
        assert "x" * 200 not in full_logs(edge_stack)

    run(edge_stack, check)


NASTY = "a\u2028b\u0085c\r\nd\u2029\x0b\x0c\x1c\x00\x7f\U0001f600"


def test_framing_survives_any_text(edge_stack: Stack) -> None:
    """What stands in a prompt or a stop string must not reach the frames raw."""

    async def check(client: httpx.AsyncClient, dial: Dial) -> None:
        body = {**STREAM, "prompt": NASTY, "stop": [NASTY], "logprobs": 5, "user": NASTY}
        answer = await client.post(TEXT, json=body)
        assert answer.status_code == 200
        assert len(parse(answer.content).text_logprobs()["tokens"]) == CONTROL["max_tokens"]
        chat = {"messages": [{"role": "user", "content": NASTY}], "stream": True, "max_tokens": 9}
        answer = await client.post(CHAT, json=chat, headers={"accept": "application/json"})
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        assert "content-encoding" not in answer.headers
        parse(answer.content)

    run(edge_stack, check)


def test_clients_that_read_or_write_a_byte_at_a_time(edge_stack: Stack) -> None:
    async def check(client: httpx.AsyncClient, dial: Dial) -> None:
        reference, _ = await control(client)

        async def trickle() -> None:
            connection = await dial()
            for byte in raw_request(STREAM):
                await connection.say(bytes([byte]))
                await asyncio.sleep(0.0005)
            _, _, body = await connection.answer()
            assert parse(body).text() == reference

        async def sip() -> None:
            connection = await (await dial()).say(raw_request(STREAM, version="1.0"))
            data = bytearray()
            while byte := await connection.reader.read(1):
                data += byte
            head, _, body = bytes(data).partition(b"\r\n\r\n")
            assert b"chunked" not in head
            assert parse(body).text() == reference

        await asyncio.gather(trickle(), sip())

    run(edge_stack, check)


def test_bodies_in_chunks_cut_anywhere(edge_stack: Stack) -> None:
    async def check(client: httpx.AsyncClient, dial: Dial) -> None:
        data = json.dumps({**CONTROL, "user": "é🙂"}, ensure_ascii=False).encode()

        async def pieces(size: int) -> Any:
            for start in range(0, len(data), size):
                yield data[start : start + size]

        texts = set()
        for size in (1, 7, len(data)):
            answer = await client.post(
                TEXT, content=pieces(size), headers={"content-type": "application/json"}
            )
            assert answer.status_code == 200, answer.text
            texts.add(answer.json()["choices"][0]["text"])
        assert len(texts) == 1
        # The last chunk never comes.
        connection = await dial()
        head = raw_request(CONTROL).partition(b"Content-Length")[0]
        await connection.say(head + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"pro\r\n')
        await connection.refusal(408, "request_timeout")

    run(edge_stack, check)


def test_pipelining_and_keep_alive(edge_stack: Stack) -> None:
    async def check(client: httpx.AsyncClient, dial: Dial) -> None:
        connection = await dial()
        lengths = [30, 3, 60, 1, 10]
        bodies = [{**CONTROL, "max_tokens": length} for length in lengths]
        bodies += [{**body, "stream": True} for body in bodies]
        await connection.say(b"".join(map(raw_request, bodies)))
        texts = []
        for body in bodies:
            status, _, data = await connection.answer()
            assert status == 200
            is_stream = body.get("stream")
            texts.append(
                parse(data).text() if is_stream else json.loads(data)["choices"][0]["text"]
            )
        assert texts[:5] == texts[5:]

    run(edge_stack, check)


def test_many_idle_connections(edge_stack: Stack) -> None:
    """A thousand that ask nothing are no hindrance, and are closed in time."""

    async def check(client: httpx.AsyncClient, dial: Dial) -> None:
        idle = [await dial() for _ in range(1000)]
        await control(client)
        assert await asyncio.gather(*(connection.ended() for connection in idle)) == [b""] * 1000

    run(edge_stack, check)


def test_a_client_that_stops_reading_is_ended_and_its_rows_are_free(edge_stack: Stack) -> None:
    before = edge_stack.scheduler_metrics()

    async def check(client: httpx.AsyncClient, dial: Dial) -> None:
        port = edge_stack.routers[0].ports["port"]
        async with dialling(port, receive_buffer=4096) as dial_small:
            stalled: list[Connection] = []
            for _ in range(2):
                connection = await dial_small()
                # More than the kernel and the server buffer between them.
                body = {**STREAM, "n": 4, "max_tokens": 1900, "logprobs": 20}
                await connection.say(raw_request(body))
                await connection.reader.readuntil(b"\r\n")
                connection.transport.pause_reading()  # type: ignore[attr-defined]
                stalled.append(connection)
            await until(
                lambda: total(edge_stack.router_metrics(), "octavo_requests_in_flight") == 0
            )

    run(edge_stack, check)
    name = 'octavo_sequence_outcomes_total{outcome="cancelled"}'
    num_cancelled = edge_stack.scheduler_metrics()[name] - before.get(name, 0)
    assert num_cancelled == 8


def test_limits_are_settings() -> None:
    """They have names, so that an operator finds them in --help."""
    names = set(RouterSettings.__dataclass_fields__)
    assert {"max_body_bytes", "max_header_bytes", "read_timeout_s", "write_stall_s"} <= names
