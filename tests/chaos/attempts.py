"""One attempt at a call through one door of one router: what it received, strictly read.

`BrokenError` = the router was gone, went, or turned the call away because it drains; with what
it gave until then. Any other failure is an answer with `error`.
Entry points: `over_grpc`, `over_http`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import grpc.aio
import httpx

from octavo.streams import ending
from octavo.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.sse_parser import Stream, parse

TIMEOUT_S = 120.0
_FINISHES = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}


class Request(Protocol):
    """What is asked; `Call` of traffic.py."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def fields(self) -> dict[str, Any]: ...
    @property
    def key(self) -> str: ...
    @property
    def num_choices(self) -> int: ...


@dataclass
class Choice:
    """What one choice received."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_logprobs: int = 0
    finish: str = ""


@dataclass
class Attempt:
    """An attempt's choices, or the error that a client saw."""

    choices: list[Choice]
    cached_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""


class BrokenError(Exception):
    """The call has to be made again. `attempt`: what came until then."""

    def __init__(self, attempt: Attempt, reason: str) -> None:
        super().__init__(reason)
        self.attempt = attempt


async def over_grpc(
    stub: inference_pb2_grpc.InferenceStub, call: Request, on_piece: Callable[[], None]
) -> Attempt:
    """Raises BrokenError."""
    token_ids = inference_pb2.TokenIds(token_ids=list(call.prompt_ids))
    message = inference_pb2.InferenceGenerateRequest(
        token_ids=token_ids, idempotency_key=call.key, **{"temperature": 0.0, **call.fields}
    )
    attempt = Attempt([Choice() for _ in range(call.num_choices)])
    try:
        with ending(stub.Generate(message, timeout=TIMEOUT_S)) as stream:
            async for response in stream:
                on_piece()
                if response.HasField("usage"):
                    attempt.cached_tokens = response.usage.cached_tokens
                    attempt.completion_tokens = response.usage.completion_tokens
                choice = attempt.choices[response.index]
                assert not choice.finish or not (response.text or response.token_ids), "it went on"
                choice.text += response.text
                choice.token_ids += response.token_ids
                choice.num_logprobs += len(response.logprobs)
                if response.finish_reason:
                    assert not choice.finish, "a choice finished twice"
                    choice.finish = _FINISHES[response.finish_reason]
    except grpc.aio.AioRpcError as error:
        reason = f"{error.code().name}: {error.details()}"
        is_begun = any(choice.token_ids for choice in attempt.choices)
        is_lost = error.code() is grpc.StatusCode.UNAVAILABLE and not (
            is_begun and "scheduler" in (error.details() or "")
        )
        # Nobody here cancels: the call met a server's last moment, which gRPC answers so.
        is_lost |= error.code() is grpc.StatusCode.CANCELLED and not is_begun
        if is_lost:
            raise BrokenError(attempt, reason) from None
        attempt.error = reason
    return attempt


async def over_http(
    http: httpx.AsyncClient,
    url: str,
    call: Request,
    on_piece: Callable[[], None],
    *,
    is_streamed: bool,
) -> Attempt:
    """Raises BrokenError."""
    body: dict[str, Any] = {
        "prompt": list(call.prompt_ids),
        "temperature": 0.0,
        "return_token_ids": True,
        **call.fields,
        "stream": is_streamed,
    }
    if is_streamed:
        body["stream_options"] = {"include_usage": True}
    headers = {"idempotency-key": call.key} if call.key else {}
    data = b""
    try:
        path = f"{url}/v1/completions"
        async with http.stream("POST", path, json=body, headers=headers) as response:
            async for part in response.aiter_raw():
                on_piece()
                data += part
    except httpx.TransportError as error:
        raise BrokenError(_read(_begun(data), call), repr(error)) from None
    if response.status_code == 503:
        raise BrokenError(Attempt([]), data.decode())
    if response.status_code != 200:
        return Attempt([], error=f"{response.status_code}: {data.decode()}")
    return _read(parse(data, num_choices=None) if is_streamed else _whole(data), call)


def _read(stream: Stream, call: Request) -> Attempt:
    attempt = Attempt([_choice_of(stream, i) for i in range(call.num_choices)])
    if stream.error is not None:
        attempt.error = str(stream.error)
    if stream.usage is not None:
        attempt.cached_tokens = stream.usage["prompt_tokens_details"]["cached_tokens"]
        attempt.completion_tokens = stream.usage["completion_tokens"]
    return attempt


def _whole(data: bytes) -> Stream:
    """A whole answer as a stream of one chunk."""
    chunk = json.loads(data)
    return Stream([chunk], usage=chunk["usage"])


def _begun(data: bytes) -> Stream:
    """What a stream that broke off held in whole events."""
    whole = data[: data.rfind(b"\n\n") + 2].decode()
    events = [event for event in whole.split("\n\n") if event.startswith("data: {")]
    return Stream([json.loads(event.removeprefix("data: ")) for event in events])


def _choice_of(stream: Stream, index: int) -> Choice:
    parts = [choice for choice in stream.choices if choice["index"] == index]
    logprobs = [part["logprobs"] for part in parts if part.get("logprobs")]
    return Choice(
        text="".join(part["text"] for part in parts),
        token_ids=[i for part in parts for i in part.get("token_ids") or ()],
        num_logprobs=sum(len(entry["tokens"]) for entry in logprobs),
        finish=(parts[-1]["finish_reason"] or "") if parts else "",
    )
