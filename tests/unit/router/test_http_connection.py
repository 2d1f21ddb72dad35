"""Bounds of one HTTP connection, over raw sockets: what is refused, dropped, waited for."""

import asyncio
import json
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from octavo_router import wiring
from octavo_router.http_connection import HttpConnection
from tests.fakes.raw_http import Connection, Dial, dialling
from tests.fakes.router_process import RunningRouter, byte_scheduler, running_router, until
from tests.sse_parser import parse

TEXT = "/v1/completions"
BODY = {"prompt": "x", "max_tokens": 3}


def request(
    body: Any = BODY, *, version: str = "1.1", headers: str = "", path: str = TEXT
) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/{version}\r\nHost: x\r\n{headers}Content-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def run(check: Any, fake: Any = None, **settings: Any) -> None:
    async def main() -> None:
        scheduler = fake or byte_scheduler()
        async with running_router(scheduler, **settings) as router:
            async with dialling(router.http_port) as dial:
                await check(router, scheduler, dial)
            answer = await router.http.post(TEXT, json=BODY)
            assert answer.status_code == 200

    asyncio.run(main())


HEAD = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"
LONG = b"a" * 5000
TOO_LARGE = [
    (HEAD + b"X-Long: " + LONG + b"\r\n\r\n", 431, "headers_too_large"),
    (HEAD + b"X-Endless: " + LONG, 431, "headers_too_large"),
    (HEAD + LONG, 431, "headers_too_large"),
    (HEAD + b"X-Many: a\r\n" * 500, 431, "headers_too_large"),
    (HEAD + b"".join(b"X-%d:\r\n" % i for i in range(999)) + b"\r\n", 431, "headers_too_large"),
    (b"GET /" + LONG + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414, "url_too_long"),
    (b"GET /" + LONG, 414, "url_too_long"),
    (b"GET /?a=" + LONG + b" HTTP/1.1\r\n\r\n", 414, "url_too_long"),
]


def test_large_heads() -> None:
    async def check(router: RunningRouter, fake: Any, dial: Dial) -> None:
        for data, status, code in TOO_LARGE:
            connection = await (await dial()).say(data)
            assert "4096" in await connection.refusal(status, code)
            # A few bytes at a time: the limit is on what has come, not on what is complete.
            connection = await dial()
            for start in range(0, len(data), 900):
                await connection.say(data[start : start + 900])
                await asyncio.sleep(0)
            await connection.refusal(status, code)

    run(check, max_header_bytes=4096)


def test_heads_below_the_limit_pass_and_bodies_do_not_count() -> None:
    async def check(router: RunningRouter, fake: Any, dial: Dial) -> None:
        connection = await dial()
        for _ in range(3):
            headers = f"X-Long: {'a' * 3900}\r\n"
            await connection.say(request({**BODY, "user": "u" * 1000}, headers=headers))
            assert (await connection.answer())[0] == 200

    run(check, max_header_bytes=4096)


GARBAGE = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS hello
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"hello\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"G\xffT / HTTP/1.1\r\n\r\n",
    b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
    b"GET / HTTP/1.1\r\nX: a\x00b\r\n\r\n",
    b"GET / HTTP/1.1\r\n X: folded\r\n\r\n",
    b"GET http:// HTTP/1.1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1e3\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: " + b"9" * 40 + b"\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    # Two readers could see two different bodies here: request smuggling.
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked, x\r\n\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n{}\r\n0\r\n\r\n",
]


def test_what_is_no_request() -> None:
    async def check(router: RunningRouter, fake: Any, dial: Dial) -> None:
        for data in GARBAGE:
            connection = await (await dial()).say(data)
            await connection.refusal(400, None)
        assert not fake.submits

    run(check)


def test_connect_is_refused() -> None:
    async def check(router: RunningRouter, fake: Any, dial: Dial) -> None:
        data = b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n"
        connection = await (await dial()).say(data)
        await connection.refusal(405, "method_not_allowed")

    run(check)


UNFINISHED = [
    b"GET /v1/models HT",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Slow: ",
    request()[:-1],
    b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
]


def test_a_request_that_does_not_end() -> None:
    async def check(router: RunningRouter, fake: Any, dial: Dial) -> None:
        async def start(data: bytes) -> None:
            await (await (await dial()).say(data)).refusal(408, "request_timeout")

        await asyncio.gather(*map(start, UNFINISHED))
        await until(lambda: router.value("octavo_requests_in_flight") == 0)
        assert not fake.submits

    run(check, read_timeout_s=0.2)


def test_trickling_buys_no_time() -> None:
    async def trickle(connection: Connection, data: bytes) -> None:
        for byte in data:
            if connection.reader.at_eof():
                return
            await connection.say(bytes([byte]))
            await asyncio.sleep(0.02)

    async def check(router: RunningRouter, fake: Any, dial: Dial) -> None:
        for start in (b"", request({**BODY, "user": "u" * 500})[:100]):
            connection = await (await dial()).say(start)
            rest = request({**BODY, "user": "u" * 500}, headers=f"X: {'a' * 500}\r\n")[len(start) :]
            sender = asyncio.create_task(trickle(connection, rest))
            await connection.refusal(408, "request_timeout")
            sender.cancel()
        assert not fake.submits

    run(check, read_timeout_s=0.3)


def test_a_large_body_has_longer() -> None:
    async def check(router: RunningRouter, fake: Any, dial: Dial) -> None:
        data = request({**BODY, "metadata": "m" * 100_000})
        connection = await (await dial()).say(data[:-10])
        await asyncio.sleep(0.8)
        await connection.say(data[-10:])
        assert (await connection.answer())[0] == 200

    run(check, read_timeout_s=0.2)


def test_a_connection_that_asks_nothing_is_closed() -> None:
    async def check(router: RunningRouter, fake: Any, dial: Dial) -> None:
        for data in (b"", b"\r\n", b"\r\n" * 100):
            connection = await (await dial()).say(data)
            assert await connection.ended() == b""
        connection = await (await dial()).say(request())
        assert (await connection.answer())[0] == 200
        await connection.say(b"\r\n\r\n")
        assert await connection.ended() == b""

    run(check, read_timeout_s=0.2)


def test_a_stream_may_last_longer_than_a_request() -> None:
    async def check(router: RunningRouter, fake: Any, dial: Dial) -> None:
        connection = await dial()
        await connection.say(request({**BODY, "max_tokens": 60, "stream": True}))
        # The next request has begun; it isn't late while it waits for its turn.
        await connection.say(request()[:20])
        _, _, body = await connection.answer()
        assert len(parse(body).text()) == 60
        await connection.say(request()[20:])
        assert (await connection.answer())[0] == 200

    run(check, byte_scheduler(interval_s=0.01), read_timeout_s=0.2)


def test_pipelined_requests_are_answered_in_order() -> None:
    async def check(router: RunningRouter, fake: Any, dial: Dial) -> None:
        connection = await dial()
        bodies = [{"prompt": "p" * i, "max_tokens": 40 - i} for i in range(1, 31)]
        await connection.say(b"".join(request(body) for body in bodies))
        for body in bodies:
            status, _, data = await connection.answer()
            usage = json.loads(data)["usage"]
            assert status == 200
            assert usage["prompt_tokens"] == len(body["prompt"])
            assert usage["completion_tokens"] == body["max_tokens"]

    run(check)


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("how", ["close", "abort"])
def test_leaving_with_requests_ahead_cancels_what_runs(is_stream: bool, how: str) -> None:
    async def check(router: RunningRouter, fake: Any, dial: Dial) -> None:
        connection = await dial()
        body = {**BODY, "max_tokens": 2000, "stream": is_stream}
        await connection.say(request(body) + request(body) * 3)
        await until(lambda: fake.num_live == 1)
        getattr(connection.writer.transport, how)()
        await until(lambda: fake.num_live == 0)
        assert router.outcomes() == {("completions", "cancelled"): 1}
        assert len(fake.submits) == 1

    run(check, byte_scheduler(interval_s=0.01))


def test_bytes_after_a_stream_began_do_not_spoil_it() -> None:
    async def check(router: RunningRouter, fake: Any, dial: Dial) -> None:
        connection = await dial()
        await connection.say(request({**BODY, "max_tokens": 2000, "stream": True}))
        await connection.reader.readuntil(b"data: ")
        await connection.say(b"\x00\x00\x00")
        rest = await connection.ended()
        assert b"HTTP/1.1" not in rest
        await until(lambda: fake.num_live == 0)
        assert router.outcomes() == {("completions", "cancelled"): 1}

    run(check, byte_scheduler(interval_s=0.01))


@pytest.mark.parametrize("upgrade", ["h2c", "websocket", "TLS/1.0, h2c"])
def test_offers_to_upgrade_are_ignored(upgrade: str) -> None:
    """Java's client makes one with each first request."""

    async def check(router: RunningRouter, fake: Any, dial: Dial) -> None:
        connection = await dial()
        headers = (
            f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {upgrade}\r\nHTTP2-Settings: AA\r\n"
        )
        data = request(headers=headers)
        # In one piece, byte by byte, and cut between head and body; one after the other.
        for pieces in ([data], [bytes([b]) for b in data], [data[:-10], data[-10:]]):
            for piece in pieces:
                await connection.say(piece)
                await asyncio.sleep(0)
            status, _, body = await connection.answer()
            assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 3)

    run(check)


@pytest.mark.parametrize("is_stream", [True, False])
def test_http_1_0(is_stream: bool) -> None:
    """No chunks: the end of the connection is the end of the body."""

    async def check(router: RunningRouter, fake: Any, dial: Dial) -> None:
        connection = await dial()
        headers = "Connection: keep-alive\r\n"
        await connection.say(request({**BODY, "stream": is_stream}, version="1.0", headers=headers))
        status, answered, body = await connection.answer()
        assert status == 200
        assert answered["connection"] == "close"
        assert "transfer-encoding" not in answered
        if is_stream:
            assert len(parse(body).text()) == 3
        else:
            assert json.loads(body)["usage"]["completion_tokens"] == 3
        assert await connection.ended() == b""

    run(check)


@pytest.mark.parametrize(("version", "is_told"), [("1.1", True), ("1.0", False)])
def test_who_asks_before_sending_a_body(version: str, is_told: bool) -> None:
    """100 Continue is for HTTP/1.1: an older client would take it for the answer."""

    async def check(router: RunningRouter, fake: Any, dial: Dial) -> None:
        connection = await dial()
        await connection.say(request(version=version, headers="Expect: 100-continue\r\n"))
        if is_told:
            assert await connection.reader.readuntil(b"\r\n\r\n") == (
                b"HTTP/1.1 100 Continue\r\n\r\n"
            )
        status, _, body = await connection.answer()
        assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 3)

    run(check)


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_closes_its_sending_side_has_left(is_stream: bool) -> None:
    async def check(router: RunningRouter, fake: Any, dial: Dial) -> None:
        connection = await dial()
        await connection.say(request({**BODY, "max_tokens": 900, "stream": is_stream}))
        await until(lambda: len(fake.submits) == 1)
        connection.writer.write_eof()
        await until(lambda: len(fake.cancels) == 1)
        assert b"[DONE]" not in await connection.ended()

    run(check, byte_scheduler(interval_s=0.01))


def test_too_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    # The client that waits for the router to be ready holds none.
    monkeypatch.setattr(wiring, "raise_file_limit", lambda: 10)

    async def check(router: RunningRouter, fake: Any, dial: Dial) -> None:
        connections = [await dial() for _ in range(8)]
        await asyncio.gather(*(c.say(request()) for c in connections))
        answers = await asyncio.gather(*(c.answer() for c in connections))
        statuses = sorted(status for status, _, _ in answers)
        assert statuses == [200] * 5 + [503] * 3
        refused = next(headers for status, headers, _ in answers if status == 503)
        assert refused["retry-after"] == "1"
        assert refused["connection"] == "close"
        for connection in connections:
            connection.writer.close()
        await until(lambda: num_connections(router) == 0)

    run(check)


def test_a_refused_client_that_goes_on_sending_is_dropped(monkeypatch: Any) -> None:
    monkeypatch.setattr("octavo_router.http_connection.LINGER_S", 0.2)

    async def check(router: RunningRouter, fake: Any, dial: Dial) -> None:
        connection = await dial()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        await connection.say(head)
        chunk = b"1000\r\n" + b" " * 4096 + b"\r\n"

        async def send() -> None:
            while True:
                await connection.say(chunk)
                await asyncio.sleep(0.005)

        sender = asyncio.create_task(send())
        status, _, body = await connection.answer()
        assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")
        await connection.ended()
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)

    run(check, max_body_bytes=8192)


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_does_not_read_is_dropped(is_stream: bool) -> None:
    async def check(router: RunningRouter, fake: Any, dial: Dial) -> None:
        body = {"prompt": ["a"] * 8, "n": 8, "max_tokens": 1200, "logprobs": 5}
        writer = await router.open_stalled({**body, "stream": is_stream})
        await until(lambda: len(fake.submits) == 8)
        await until(lambda: router.value("octavo_requests_in_flight") == 0)
        await until(lambda: fake.num_live == 0)
        assert set(router.outcomes()) == {
            ("completions", "cancelled") if is_stream else ("completions", "length")
        }
        await until(lambda: num_connections(router) == 0)
        writer.close()

    run(check, byte_scheduler(tokens_per_step=200), write_stall_s=0.3)


def num_connections(router: RunningRouter) -> int:
    return len(router.server.server_state.connections)


def test_head_is_get_without_its_body() -> None:
    async def check(router: RunningRouter, fake: Any, dial: Dial) -> None:
        for path in ("/livez", "/readyz", "/v1/models", "/v1/models/nope", "/nope", TEXT):
            got = await router.http.get(path)
            head = await router.http.head(path)
            assert (head.status_code, head.content) == (got.status_code, b"")
            assert head.headers["content-length"] == got.headers["content-length"]

    run(check)


def test_a_slash_at_the_end_is_another_path() -> None:
    """A redirect would send keys to wherever the Host header says."""

    async def check(router: RunningRouter, fake: Any, dial: Dial) -> None:
        for path in ("/v1/completions/", "/v1/models/", "/livez/", "//livez"):
            answer = await router.http.get(path, headers={"host": "evil.example"})
            assert answer.status_code == 404
            assert "evil" not in answer.text

    run(check)


def test_uvicorn_still_has_what_the_connection_extends() -> None:
    """Its own methods, but not documented ones: a version without them would drop our bounds."""
    own = {name for name, value in vars(HttpConnection).items() if callable(value)}
    ours = {name for name in own if not hasattr(HttpToolsProtocol, name)}
    extended = own - ours
    assert {"_start_asgi_task", "on_response_complete", "send_400_response"} <= extended
    assert {"send", "message_event", "disconnected"} <= {
        *vars(RequestResponseCycle),
        *RequestResponseCycle.__init__.__code__.co_names,
    }
