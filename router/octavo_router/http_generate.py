"""The two generation endpoints, from body to answer.

Must not know: routes, schedulers, protos. Entry points: `answer_chat`, `answer_completion`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidRequestError
from octavo_router.answers import AnswerHead, WholeChoice, collect, new_head
from octavo_router.chat import ChatFrames, chat_body, parse_chat
from octavo_router.completions import (
    DEFAULT_MAX_TOKENS,
    CompletionFrames,
    completion_body,
    parse_completion,
)
from octavo_router.generation import Generation, Usage
from octavo_router.http_body import read_object
from octavo_router.outcomes import RequestRecord
from octavo_router.params import Fields, SamplingOptions, refuse
from octavo_router.requests import (
    Endpoint,
    GenerateRequest,
    Prompt,
    check_idempotency_key,
)
from octavo_router.service import MAX_MODEL_NAME_CHARS, Service
from octavo_router.sse import EventStream, dumps
from octavo_router.tokenizer import Tokenizer

# A refusal within this time becomes an HTTP status; after it a stream's headers go out.
ADMISSION_WAIT_S = 0.25
MAX_USER_CHARS = 1024


@dataclass(frozen=True, slots=True)
class _Kind:
    """How an endpoint reads and writes."""

    endpoint: Endpoint
    id_prefix: str
    body_object: str
    chunk_object: str
    default_max_tokens: int | None
    parse: Callable[..., tuple[tuple[Prompt, ...], SamplingOptions]]
    frames: type[ChatFrames] | type[CompletionFrames]
    body: Callable[..., dict[str, Any]]


_CHAT = _Kind(
    Endpoint.CHAT,
    "chatcmpl",
    "chat.completion",
    "chat.completion.chunk",
    None,
    parse_chat,
    ChatFrames,
    chat_body,
)
_COMPLETIONS = _Kind(
    Endpoint.COMPLETIONS,
    "cmpl",
    "text_completion",
    "text_completion",
    DEFAULT_MAX_TOKENS,
    parse_completion,
    CompletionFrames,
    completion_body,
)


@dataclass(frozen=True, slots=True)
class _Call:
    """A parsed request and how to answer it."""

    request: GenerateRequest
    model_name: str
    has_usage: bool

    @property
    def has_logprobs(self) -> bool:
        return self.request.sampling.logprobs is not None


async def answer_chat(service: Service, request: Request) -> Response:
    """Raises OctavoError."""
    return await _answer(service, request, _CHAT)


async def answer_completion(service: Service, request: Request) -> Response:
    """Raises OctavoError."""
    return await _answer(service, request, _COMPLETIONS)


async def _answer(service: Service, request: Request, kind: _Kind) -> Response:
    with RequestRecord(service.metrics, kind.endpoint) as record:
        service.check_open()
        body = await read_object(request, service.settings.max_body_bytes)
        call = _parse(service, request, kind, body)
        generation = await service.pipeline.start(call.request, record)
        try:
            if call.request.is_stream:
                await generation.wait_admitted(ADMISSION_WAIT_S)
                return _stream(generation, kind, call, service.pipeline.tokenizer)
        except BaseException:
            generation.close()
            raise
        choices = await collect(generation, request.receive)
        return _whole(choices, generation.usage(), kind, call, service.pipeline.tokenizer)


def _parse(service: Service, request: Request, kind: _Kind, body: dict[str, Any]) -> _Call:
    """Validate everything that needs no tokenizer."""
    fields = Fields(body)
    model_name = service.served_name(fields.string("model", MAX_MODEL_NAME_CHARS))
    fields.string("user", MAX_USER_CHARS)
    is_stream = bool(fields.boolean("stream"))
    has_usage = _has_usage(body, is_stream=is_stream)
    prompts, sampling = kind.parse(body, service.defaults, service.vocab_size)
    generate = GenerateRequest(
        endpoint=kind.endpoint,
        request_id=request.scope["octavo.request_id"],
        tenant=request.scope["octavo.tenant"],
        prompts=prompts,
        sampling=sampling,
        default_max_tokens=kind.default_max_tokens,
        idempotency_key=check_idempotency_key(request.headers.get("idempotency-key", "")),
        timeout_s=service.timeout_s,
        is_stream=is_stream,
    )
    return _Call(generate, model_name, has_usage)


def _has_usage(body: dict[str, Any], *, is_stream: bool) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        refuse("stream_options", "an object", options)
    if not is_stream:
        raise InvalidRequestError("stream_options is only for stream: true", param="stream_options")
    if options.get("continuous_usage_stats"):
        raise InvalidRequestError(
            "stream_options.continuous_usage_stats isn't supported yet: leave it out",
            param="stream_options.continuous_usage_stats",
        )
    is_asked = options.get("include_usage")
    if is_asked is not None and not isinstance(is_asked, bool):
        refuse("stream_options.include_usage", "true or false", is_asked)
    return bool(is_asked)


def _stream(generation: Generation, kind: _Kind, call: _Call, tokenizer: Tokenizer) -> Response:
    frames = kind.frames(
        new_head(kind.id_prefix, kind.chunk_object, call.model_name),
        generation.num_choices,
        tokenizer,
        has_usage=call.has_usage,
        has_logprobs=call.has_logprobs,
    )
    return EventStream(generation, frames)


def _whole(
    choices: Sequence[WholeChoice], usage: Usage, kind: _Kind, call: _Call, tokenizer: Tokenizer
) -> Response:
    head: AnswerHead = new_head(kind.id_prefix, kind.body_object, call.model_name)
    body = kind.body(head, choices, usage, tokenizer, has_logprobs=call.has_logprobs)
    return Response(dumps(body), media_type="application/json")
