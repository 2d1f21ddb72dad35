"""Clients of a fleet that is being disturbed: many streams at once, and what came of each.

A `Call` is one request in the API's terms, through any door. `Traffic.run` starts all, calls
`disturb` (in a thread) once enough pieces arrived, waits for every stream's end, and checks what
holds for any stream: one finish for each choice, no id missing, no id twice.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import grpc.aio
import httpx

from octavo.serving import open_channel
from octavo.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.sse_parser import Stream, parse

TIMEOUT_S = 120.0
_FINISHES = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}


class Door(Enum):
    """How a call reaches a router."""

    GRPC = "grpc"
    SSE = "sse"
    WHOLE = "whole"  # HTTP, the answer in one piece


@dataclass(frozen=True)
class Call:
    """One request. `fields`: max_tokens, temperature, seed, stop, ... by their API names."""

    prompt_ids: Sequence[int]
    fields: dict[str, Any]
    door: Door = Door.GRPC

    @property
    def num_choices(self) -> int:
        return self.fields.get("n", 1)

    @property
    def is_greedy(self) -> bool:
        return not self.fields.get("temperature", 0.0)


@dataclass
class Choice:
    """What one choice received."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_logprobs: int = 0
    finish: str = ""


@dataclass
class Answer:
    """A call's end: its choices, or the error that a client saw."""

    choices: list[Choice]
    cached_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""
    # The longest time between two pieces of a stream.
    pause_s: float | None = None


@dataclass
class Report:
    """All answers of a run, in the order of its calls."""

    answers: list[Answer]

    def pauses(self) -> str:
        """For people: the longest pause of each stream, p50 / p99 / max."""
        pauses = sorted(a.pause_s for a in self.answers if a.pause_s is not None)
        p99 = pauses[min(len(pauses) - 1, int(0.99 * len(pauses)))]
        return f"p50 {pauses[len(pauses) // 2]:.2f} p99 {p99:.2f} max {pauses[-1]:.2f} s"


class _Clock:
    """Times the pieces of a stream, and counts those of all streams."""

    def __init__(self, on_piece: Callable[[], None]) -> None:
        self._on_piece = on_piece
        self._last = time.monotonic()
        self.pause_s = 0.0

    def tick(self) -> None:
        now = time.monotonic()
        self.pause_s = max(self.pause_s, now - self._last)
        self._last = now
        self._on_piece()


class Traffic:
    """Runs calls over all routers in turn. Addresses: HTTP URLs and gRPC addresses."""

    def __init__(self, urls: Sequence[str], grpc_addresses: Sequence[str]) -> None:
        self._urls = urls
        self._grpc_addresses = grpc_addresses

    def run(
        self,
        calls: Sequence[Call],
        disturb: Callable[[], None] | None = None,
        *,
        after: int = 0,
    ) -> Report:
        """All calls at once; `disturb` runs when `after` pieces arrived. Raises its error."""
        return asyncio.run(asyncio.wait_for(self._run(calls, disturb, after), TIMEOUT_S))

    async def _run(
        self, calls: Sequence[Call], disturb: Callable[[], None] | None, after: int
    ) -> Report:
        num_pieces = 0
        is_due = asyncio.Event()

        def on_piece() -> None:
            nonlocal num_pieces
            num_pieces += 1
            if num_pieces >= after:
                is_due.set()

        async def disturb_once() -> None:
            if disturb is not None:
                await is_due.wait()
                await asyncio.to_thread(disturb)

        channels = [open_channel(address) for address in self._grpc_addresses]
        stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in channels]
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits, trust_env=False) as http:
            disturbing = asyncio.create_task(disturb_once())
            tasks: list[asyncio.Task[Answer]] = []
            for i, call in enumerate(calls):
                clock = _Clock(on_piece)
                if call.door is Door.GRPC:
                    answer = _over_grpc(stubs[i % len(stubs)], call, clock)
                else:
                    answer = _over_http(http, self._urls[i % len(self._urls)], call, clock)
                tasks.append(asyncio.create_task(answer))
            try:
                answers = list(await asyncio.gather(*tasks))
                await disturbing
            finally:
                disturbing.cancel()
                for channel in channels:
                    await channel.close()
        return Report(answers)


async def _over_grpc(stub: inference_pb2_grpc.InferenceStub, call: Call, clock: _Clock) -> Answer:
    token_ids = inference_pb2.TokenIds(token_ids=list(call.prompt_ids))
    message = inference_pb2.InferenceGenerateRequest(
        token_ids=token_ids, **{"temperature": 0.0, **call.fields}
    )
    answer = Answer([Choice() for _ in range(call.num_choices)])
    try:
        async for response in stub.Generate(message, timeout=TIMEOUT_S):
            clock.tick()
            if response.HasField("usage"):
                answer.cached_tokens = response.usage.cached_tokens
                answer.completion_tokens = response.usage.completion_tokens
            choice = answer.choices[response.index]
            assert not choice.finish or not (response.text or response.token_ids), "it went on"
            choice.text += response.text
            choice.token_ids += response.token_ids
            choice.num_logprobs += len(response.logprobs)
            if response.finish_reason:
                assert not choice.finish, "a choice finished twice"
                choice.finish = _FINISHES[response.finish_reason]
    except grpc.aio.AioRpcError as error:
        answer.error = f"{error.code().name}: {error.details()}"
    answer.pause_s = clock.pause_s
    return answer


async def _over_http(http: httpx.AsyncClient, url: str, call: Call, clock: _Clock) -> Answer:
    is_streamed = call.door is Door.SSE
    body: dict[str, Any] = {
        "prompt": list(call.prompt_ids),
        "temperature": 0.0,
        "return_token_ids": True,
        **call.fields,
        "stream": is_streamed,
    }
    if is_streamed:
        body["stream_options"] = {"include_usage": True}
    data = b""
    async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
        async for part in response.aiter_raw():
            clock.tick()
            data += part
    if response.status_code != 200:
        return Answer([], error=f"{response.status_code}: {data.decode()}", pause_s=clock.pause_s)
    stream = parse(data, num_choices=None) if is_streamed else _whole(data)
    if stream.error is not None:
        return Answer([], error=str(stream.error), pause_s=clock.pause_s)
    assert stream.usage is not None
    return Answer(
        [_choice_of(stream, i) for i in range(call.num_choices)],
        cached_tokens=stream.usage["prompt_tokens_details"]["cached_tokens"],
        completion_tokens=stream.usage["completion_tokens"],
        pause_s=clock.pause_s if is_streamed else None,
    )


def _whole(data: bytes) -> Stream:
    """A whole answer as a stream of one chunk."""
    chunk = httpx.Response(200, content=data).json()
    return Stream([chunk], usage=chunk["usage"])


def _choice_of(stream: Stream, index: int) -> Choice:
    parts = [choice for choice in stream.choices if choice["index"] == index]
    logprobs = [part["logprobs"] for part in parts if part.get("logprobs")]
    return Choice(
        text="".join(part["text"] for part in parts),
        token_ids=[i for part in parts for i in part.get("token_ids") or ()],
        num_logprobs=sum(len(entry["tokens"]) for entry in logprobs),
        finish=parts[-1]["finish_reason"] or "",
    )
