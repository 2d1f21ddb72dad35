"""Clients that speak HTTP in older or odder ways get the same stream."""

import asyncio
import json
from typing import Any

import pytest

from tests.fakes.fake_scheduler import Plan
from tests.fakes.router_process import RunningRouter, byte_scheduler, running_router
from tests.sse_parser import parse

ODD = "a\u2028b\u0085c\r\nd\x0b\x0c"


def run(check: Any) -> None:
    async def main() -> None:
        fake = byte_scheduler(script=lambda *_: Plan([*ODD.encode()]), tokens_per_step=2)
        async with running_router(fake) as router:
            await check(router)

    asyncio.run(main())


def request(version: str) -> bytes:
    body = {"prompt": ODD, "echo": True, "max_tokens": 99, "stream": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


@pytest.mark.parametrize("num_bytes", [1, 4096])
def test_an_http_1_0_client_reads_to_the_end_of_the_connection(num_bytes: int) -> None:
    async def check(router: RunningRouter) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.http_port)
        for start in range(0, len(data := request("1.0")), 64):
            writer.write(data[start : start + 64])
            await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head.partition(b"\r\n")[0]
        assert b"transfer-encoding" not in head.lower()
        received = b""
        while chunk := await reader.read(num_bytes):
            received += chunk
        assert parse(received).text() == ODD + ODD
        writer.close()
        await writer.wait_closed()

    run(check)


def test_a_stream_is_a_stream_whatever_is_accepted() -> None:
    async def check(router: RunningRouter) -> None:
        body = {"prompt": ODD, "echo": True, "max_tokens": 99, "stream": True}
        for accept in ("application/json", "text/event-stream", "*/*", "image/png"):
            answer = await router.http.post(
                "/v1/completions",
                json=body,
                headers={"Accept": accept, "Accept-Encoding": "gzip, br"},
            )
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert "content-encoding" not in answer.headers
            assert parse(answer.content).text() == ODD + ODD

    run(check)
