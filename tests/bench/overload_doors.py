"""The doors by which the overload's requests come: one request, and how it went.

Both keep their connections, as a gateway in front of the router does. `HttpDoor` speaks HTTP/1.1
by itself: what a general client takes of the CPU would count as the service's.
Entry points: `Offered`, `GrpcDoor`, `HttpDoor`.
"""

import asyncio
import json
import time
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol, Self
from urllib.parse import urlsplit

import grpc

from octavo.serving import open_channel
from octavo.v1 import inference_pb2, inference_pb2_grpc
from tests.e2e.generation import Answer, generate, request

PROMPT_TOKENS, OUTPUT_TOKENS = 48, 64
_READ_BYTES = 1 << 16
_TAIL_BYTES = 1 << 12
_CHUNKS_END = b"0\r\n\r\n"


@dataclass(slots=True)
class Offered:
    """One request: when it was sent, and how it went. Times from the load's start."""

    sent_s: float
    first_s: float | None = None
    ended_s: float = 0.0
    num_tokens: int = 0
    is_refused: bool = False
    # The stream had begun, and with it the chance for a Retry-After was over.
    is_late: bool = False
    # In whole seconds over HTTP.
    retry_after_ms: int | None = None


class Door(Protocol):
    """Sends requests by number; each number has a prompt of its own."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def send(self, number: int, started: float) -> Offered: ...


def _prompt_of(number: int) -> list[int]:
    rng = Random(number)
    return [rng.randrange(3, 200) for _ in range(PROMPT_TOKENS)]


def message(number: int) -> inference_pb2.InferenceGenerateRequest:
    return request(_prompt_of(number), max_tokens=OUTPUT_TOKENS, ignore_eos=True)


class GrpcDoor:
    """`Inference.Generate` on one channel."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._channel.close()

    async def send(self, number: int, started: float) -> Offered:
        offered = Offered(time.perf_counter() - started)

        def note(answer: Answer) -> None:
            del answer
            if offered.first_s is None:
                offered.first_s = time.perf_counter() - started

        try:
            answer = await generate(self._stub, message(number), on_message=note)
            offered.num_tokens = answer.completion_tokens
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            offered.is_refused = True
            trailers = dict(error.trailing_metadata() or ())
            if (text := trailers.get("octavo-retry-after-ms")) is not None:
                offered.retry_after_ms = int(text)
        offered.ended_s = time.perf_counter() - started
        return offered


class HttpDoor:
    """Streams of `/v1/completions`, a connection for as many as run at once."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname, parts.port
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for _, writer in self._idle:
            writer.close()

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._idle:
            return self._idle.pop()
        return await asyncio.open_connection(self._host, self._port)

    async def send(self, number: int, started: float) -> Offered:
        offered = Offered(time.perf_counter() - started)
        reader, writer = await self._connection()
        try:
            writer.write(_post(number))
            head = await reader.readuntil(b"\r\n\r\n")
            status = int(head.split(b" ", 2)[1])
            if status == 200:
                await _read_answer(reader, offered, started)
            elif status == 429:
                headers = _headers_of(head)
                await reader.readexactly(int(headers[b"content-length"]))
                offered.is_refused = True
                offered.retry_after_ms = 1000 * int(headers[b"retry-after"])
            else:
                raise AssertionError(head.decode(errors="replace"))
        except BaseException:
            writer.close()
            raise
        self._idle.append((reader, writer))
        offered.ended_s = time.perf_counter() - started
        return offered


def _post(number: int) -> bytes:
    fields = {
        "prompt": _prompt_of(number),
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body = json.dumps(fields).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _read_answer(reader: asyncio.StreamReader, offered: Offered, started: float) -> None:
    """A chunked body of events to its end; the last event but [DONE] has the usage."""
    tail = b""
    while not tail.endswith(_CHUNKS_END):
        data = await reader.read(_READ_BYTES)
        if not data:
            raise EOFError("the stream ended too soon")
        if offered.first_s is None and b"data: {" in data:
            offered.first_s = time.perf_counter() - started
        tail = (tail + data)[-_TAIL_BYTES:]
    events = [line[6:] for line in tail.split(b"\n") if line.startswith(b"data: {")]
    last: dict[str, Any] = json.loads(events[-1])
    if "error" in last:
        assert last["error"]["code"] == "overloaded", last
        offered.is_refused, offered.is_late, offered.first_s = True, True, None
    else:
        offered.num_tokens = last["usage"]["completion_tokens"]


def _headers_of(head: bytes) -> dict[bytes, bytes]:
    lines = (line.partition(b":") for line in head.split(b"\r\n")[1:] if line)
    return {name.lower(): value.strip() for name, _, value in lines}
