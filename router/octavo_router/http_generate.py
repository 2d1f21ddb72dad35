"""The two generation endpoints, from body to answer.

Must not know: routes, schedulers, protos. Entry points: `answer_chat`, `answer_completion`.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from octavo.errors import InvalidRequestError
from octavo_router.answers import (
    AnswerShape,
    ContinuousUsage,
    WholeChoice,
    collect,
    new_head,
    usage_body,
)
from octavo_router.chat import ChatFrames, chat_choice, chat_prompt, parse_chat
from octavo_router.completions import (
    DEFAULT_MAX_TOKENS,
    CompletionFrames,
    completion_choice,
    parse_completion,
)
from octavo_router.edge import QUOTA_HEADERS
from octavo_router.fields import Fields, refuse
from octavo_router.generation import Generation
from octavo_router.http_body import read_object
from octavo_router.outcomes import RequestRecord
from octavo_router.request_trace import begin_trace
from octavo_router.requests import (
    Endpoint,
    GenerateRequest,
    RequestFields,
    RequestRules,
    check_idempotency_key,
    clean_request_id,
)
from octavo_router.service import MAX_MODEL_NAME_CHARS, Service
from octavo_router.sse import EventStream, Frames, cancel_on_disconnect, dumps, members

# A stream's headers go out once it has a row, so that a refusal becomes an HTTP status until then:
# so long at most, and a client that waits longer is shown a sign of life, then and every 15 s.
HEADERS_WAIT_S = 10.0
# Most streams have a row before; only for others it pays to watch whether the client leaves.
_UNWATCHED_S = 0.25
MAX_REQUEST_ID_FIELD_CHARS = 1 << 16


@dataclass(frozen=True, slots=True)
class _Kind:
    """How an endpoint reads and writes."""

    endpoint: Endpoint
    id_prefix: str
    body_object: str
    chunk_object: str
    default_max_tokens: int | None
    parse: Callable[[dict[str, Any], RequestRules], RequestFields]
    frames: type[ChatFrames] | type[CompletionFrames]
    choice: Callable[[int, WholeChoice, AnswerShape], dict[str, Any]]
    # What an unstreamed answer says of its prompt beside the choices.
    prompt: Callable[[AnswerShape], dict[str, Any]]


_CHAT = _Kind(
    Endpoint.CHAT,
    "chatcmpl",
    "chat.completion",
    "chat.completion.chunk",
    None,
    parse_chat,
    ChatFrames,
    chat_choice,
    chat_prompt,
)
_COMPLETIONS = _Kind(
    Endpoint.COMPLETIONS,
    "cmpl",
    "text_completion",
    "text_completion",
    DEFAULT_MAX_TOKENS,
    parse_completion,
    CompletionFrames,
    completion_choice,
    lambda _: {},
)


class _StreamUsage(NamedTuple):
    """What `stream_options` asks for: the counts at the end, and in every chunk before."""

    is_included: bool = False
    is_continuous: bool = False


@dataclass(frozen=True, slots=True)
class _Call:
    """A parsed request and how to answer it."""

    request: GenerateRequest
    model_name: str
    usage: "_StreamUsage"


async def answer_chat(service: Service, request: Request) -> Response:
    """Raises OctavoError."""
    return await _answer(service, request, _CHAT)


async def answer_completion(service: Service, request: Request) -> Response:
    """Raises OctavoError."""
    return await _answer(service, request, _COMPLETIONS)


async def _answer(service: Service, request: Request, kind: _Kind) -> Response:
    trace = begin_trace(service.tracer, kind.endpoint, request.headers.get)
    with RequestRecord(service.metrics, kind.endpoint, trace) as record:
        service.check_open()
        # Unnamed: a large body isn't kept while the answer is made.
        limit = service.settings.max_body_bytes
        call = _parse(service, request, kind, await read_object(request, limit))
        meter = service.quotas and service.quotas.meter(call.request.tenant)
        if meter is not None:
            request.scope[QUOTA_HEADERS] = meter.headers
        generation = await service.pipeline.start(call.request, record)
        try:
            if call.request.is_stream:
                await _wait_admitted(generation, request.receive)
                if trace is not None:
                    trace.has_answered = True
                return _stream(generation, kind, call, service)
        except BaseException:
            generation.close()
            raise
        choices = await collect(generation, request.receive)
        return await _whole(choices, generation, kind, call, service)


async def _wait_admitted(generation: Generation, receive: Receive) -> None:
    """Until a stream's headers may go out. Raises OctavoError if it is refused before."""
    if await generation.wait_admitted(_UNWATCHED_S):
        return
    watcher = asyncio.create_task(cancel_on_disconnect(receive, generation))
    try:
        await generation.wait_admitted(HEADERS_WAIT_S - _UNWATCHED_S)
    finally:
        watcher.cancel()


def _parse(service: Service, request: Request, kind: _Kind, body: dict[str, Any]) -> _Call:
    """Validate everything that needs no tokenizer."""
    fields = Fields(body)
    model_name = service.served_name(fields.string("model", MAX_MODEL_NAME_CHARS))
    is_stream = bool(fields.boolean("stream"))
    usage = _stream_usage(body, is_stream=is_stream)
    asked = kind.parse(body, service.rules)
    if is_stream and asked.answer.prompt_logprobs is not None:
        raise InvalidRequestError(
            "prompt_logprobs isn't for streams: leave out stream, or ask a completion for echo "
            "and logprobs",
            param="prompt_logprobs",
        )
    generate = GenerateRequest(
        endpoint=kind.endpoint,
        request_id=_request_id(request, fields),
        tenant=request.scope["octavo.tenant"],
        fields=asked,
        default_max_tokens=kind.default_max_tokens,
        idempotency_key=check_idempotency_key(request.headers.get("idempotency-key", "")),
        timeout_s=service.timeout_s,
        is_stream=is_stream,
        model_name=model_name,
    )
    return _Call(generate, model_name, usage)


def _request_id(request: Request, fields: Fields) -> str:
    """The header's, else the body's, else the one that was made up for the header."""
    given = fields.string("request_id", MAX_REQUEST_ID_FIELD_CHARS)
    if given and "x-request-id" not in request.headers:
        # Read by the edge when the answer's headers go out.
        request.scope["octavo.request_id"] = clean_request_id(given)
    return request.scope["octavo.request_id"]


def _stream_usage(body: dict[str, Any], *, is_stream: bool) -> _StreamUsage:
    options = body.get("stream_options")
    if options is None:
        return _StreamUsage()
    if not isinstance(options, dict):
        refuse("stream_options", "an object", options)
    if not is_stream:
        raise InvalidRequestError("stream_options is only for stream: true", param="stream_options")
    is_included = _flag(options, "include_usage")
    # Counts in every chunk are an addition to the last one's.
    return _StreamUsage(is_included, is_included and _flag(options, "continuous_usage_stats"))


def _flag(options: dict[str, Any], name: str) -> bool:
    value = options.get(name)
    if value is not None and not isinstance(value, bool):
        refuse(f"stream_options.{name}", "true or false", value)
    return bool(value)


def _stream(generation: Generation, kind: _Kind, call: _Call, service: Service) -> Response:
    head = new_head(kind.id_prefix, kind.chunk_object, call.model_name)
    shape = AnswerShape(
        call.request.fields,
        generation,
        service.pipeline.tokenizer,
        has_usage=call.usage.is_included,
    )
    frames: Frames = kind.frames(head, shape)
    if call.usage.is_continuous:
        frames = ContinuousUsage(frames, generation)
    return EventStream(generation, frames)


async def _whole(
    choices: Sequence[WholeChoice],
    generation: Generation,
    kind: _Kind,
    call: _Call,
    service: Service,
) -> Response:
    head = new_head(kind.id_prefix, kind.body_object, call.model_name)
    shape = AnswerShape(call.request.fields, generation, service.pipeline.tokenizer)
    rendered: list[str] = []
    for index, choice in enumerate(choices):
        if index:
            # One may hold megabytes of log-probabilities: others get the event loop in between.
            await asyncio.sleep(0)
        rendered.append(dumps(kind.choice(index, choice, shape)))
    usage = {"usage": usage_body(generation.usage())}
    rest = members({**usage, **kind.prompt(shape)})
    body = f'{dumps(head.fields())[:-1]},"choices":[{",".join(rendered)}]{rest}}}'
    return Response(body, media_type="application/json")
