"""The gRPC door: octavo.v1.Inference, with the HTTP API's validation, defaults and errors.

Must not know: HTTP, schedulers. Entry point: `InferenceServicer`.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from typing import Any

import grpc.aio

from octavo.errors import InvalidRequestError
from octavo.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from octavo_router.fields import Fields, as_token_ids
from octavo_router.flights import Finish, TokenLogprob
from octavo_router.generation import Delta, Generation, PromptPart, Usage
from octavo_router.grpc_guard import Reader, answering
from octavo_router.http_body import parse_object
from octavo_router.outcomes import RequestRecord
from octavo_router.request_trace import begin_trace
from octavo_router.requests import (
    Endpoint,
    GenerateRequest,
    IdsPrompt,
    Prompt,
    RequestFields,
    TextPrompt,
    check_idempotency_key,
    clean_request_id,
    parse_chat_prompt,
    parse_fields,
)
from octavo_router.service import Service

_FINISHES = {
    Finish.STOP: common_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
_Request = inference_pb2.InferenceGenerateRequest | inference_pb2.InferenceTokenizeRequest
# Fields that have another name, or another shape, over HTTP; the rest goes through as it is.
_OWN_FIELDS = frozenset(
    {"model", "text", "token_ids", "chat", "request_id", "idempotency_key"}
    | {"logit_bias", "chat_template_kwargs_json"}
)
_Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """The public gRPC API."""

    def __init__(self, service: Service) -> None:
        self._service = service
        # Generate calls that are being answered, or refused.
        self.num_running = 0

    async def Generate(  # noqa: N802
        self, request: inference_pb2.InferenceGenerateRequest, context: _Context
    ) -> AsyncIterator[inference_pb2.InferenceGenerateResponse]:
        """Stream deltas of every choice; the last message holds the usage."""
        async with answering(request, context):
            request_id = clean_request_id(request.request_id)
            trace = begin_trace(self._service.tracer, Endpoint.GRPC, _header_of(context))
            record = RequestRecord(self._service.metrics, Endpoint.GRPC, trace)
            with self._counted(), record:
                tenant = self._authenticate(context)
                self._service.check_open()
                parsed = self._parse(request, request_id, tenant, context)
                generation = await self._service.pipeline.start(parsed, record)
                reader = Reader(self._service.settings.write_stall_s)
                try:
                    async for message in _messages(generation, request_id, parsed.fields):
                        reader.begin()
                        yield message
                        reader.end()
                finally:
                    reader.stop()
                    generation.close()

    @contextlib.contextmanager
    def _counted(self) -> Generator[None]:
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1

    def _parse(
        self,
        request: inference_pb2.InferenceGenerateRequest,
        request_id: str,
        tenant: str,
        context: _Context,
    ) -> GenerateRequest:
        service = self._service
        model_name = service.served_name(request.model)
        raw = _raw(request)
        prompts = (self._prompt(request, raw),)
        left_s = context.time_remaining()
        limits = [limit for limit in (left_s, service.timeout_s) if limit is not None]
        return GenerateRequest(
            endpoint=Endpoint.GRPC,
            request_id=request_id,
            tenant=tenant,
            fields=parse_fields(raw, prompts, service.rules),
            default_max_tokens=None,
            idempotency_key=check_idempotency_key(request.idempotency_key),
            timeout_s=min(limits, default=None),
            is_stream=True,
            model_name=model_name,
        )

    def _prompt(self, request: _Request, raw: Mapping[str, Any]) -> Prompt:
        match request.WhichOneof("input"):
            case "text":
                special = Fields(raw).boolean("add_special_tokens") is not False
                return TextPrompt(request.text, special)
            case "token_ids":
                assert isinstance(request, inference_pb2.InferenceGenerateRequest)
                ids = as_token_ids(
                    "token_ids", list(request.token_ids.token_ids), self._service.vocab_size
                )
                return IdsPrompt(ids)
            case "chat":
                messages = [_message_of(message) for message in request.chat.messages]
                return parse_chat_prompt({**raw, "messages": messages}, self._service.rules)
            case _:
                raise InvalidRequestError("input is missing: set text, token_ids or chat")

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.InferenceTokenizeRequest, context: _Context
    ) -> inference_pb2.InferenceTokenizeResponse:
        """Ids exactly as Generate would see them."""
        async with answering(request, context):
            self._authenticate(context)
            self._service.served_name(request.model)
            prompt = self._prompt(request, _raw(request))
            token_ids = await self._service.pipeline.tokenize(prompt)
            return inference_pb2.InferenceTokenizeResponse(
                token_ids=token_ids.tolist(), max_model_len=self._max_model_len
            )

    async def Detokenize(  # noqa: N802
        self, request: inference_pb2.InferenceDetokenizeRequest, context: _Context
    ) -> inference_pb2.InferenceDetokenizeResponse:
        """Ids to text, special tokens included."""
        async with answering(request, context):
            self._authenticate(context)
            self._service.served_name(request.model)
            ids = as_token_ids("token_ids", list(request.token_ids), self._service.vocab_size)
            text = await self._service.pipeline.detokenize(ids)
            return inference_pb2.InferenceDetokenizeResponse(text=text)

    async def ListModels(  # noqa: N802
        self,
        request: inference_pb2.InferenceListModelsRequest,
        context: _Context,
    ) -> inference_pb2.InferenceListModelsResponse:
        """The served names."""
        async with answering(request, context):
            self._authenticate(context)
            models = [
                inference_pb2.ServedModel(
                    id=name, max_model_len=self._max_model_len, created_s=self._service.created_s
                )
                for name in self._service.model_names
            ]
            return inference_pb2.InferenceListModelsResponse(models=models)

    @property
    def _max_model_len(self) -> int:
        """0 until a scheduler was met."""
        model = self._service.sessions.model
        return 0 if model is None else model.max_model_len

    def _authenticate(self, context: _Context) -> str:
        """The tenant of the metadata `authorization: Bearer <key>`."""
        headers = [
            value.encode() if isinstance(value, str) else value
            for key, value in context.invocation_metadata() or ()
            if key == "authorization"
        ]
        return self._service.keys.authenticate(headers)


def _header_of(context: _Context) -> Callable[[str], str | None]:
    """Looks a name up in the call's metadata."""

    def header(name: str) -> str | None:
        metadata = context.invocation_metadata() or ()
        return next((v for k, v in metadata if k == name and isinstance(v, str)), None)

    return header


def _raw(request: _Request) -> dict[str, Any]:
    """The fields that were set, as the HTTP API names and shapes them."""
    raw: dict[str, Any] = {}
    for descriptor, value in request.ListFields():
        if descriptor.name not in _OWN_FIELDS:
            # No message is left: what is no scalar is a list of them.
            is_scalar = isinstance(value, str | int | float)
            raw[descriptor.name] = value if is_scalar else list(value)
    if isinstance(request, inference_pb2.InferenceGenerateRequest) and request.logit_bias:
        raw["logit_bias"] = {str(key): value for key, value in request.logit_bias.items()}
    if request.HasField("chat_template_kwargs_json"):
        raw["chat_template_kwargs"] = _variables(request.chat_template_kwargs_json)
    return raw


def _variables(text: str) -> dict[str, Any]:
    try:
        return parse_object(text.encode())
    except InvalidRequestError as error:
        message = error.message.replace("the body", "chat_template_kwargs_json")
        raise InvalidRequestError(message, param="chat_template_kwargs_json") from None


def _message_of(message: inference_pb2.ChatMessage) -> dict[str, Any]:
    """A message as the HTTP API has it."""
    raw: dict[str, Any] = {"role": message.role}
    for name in ("content", "name", "tool_call_id"):
        if message.HasField(name):
            raw[name] = getattr(message, name)
    if message.tool_calls:
        raw["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments_json},
            }
            for call in message.tool_calls
        ]
    return raw


async def _messages(
    generation: Generation, request_id: str, fields: RequestFields
) -> AsyncIterator[inference_pb2.InferenceGenerateResponse]:
    """Each delta; a choice's first has the prompt if asked for, its last says why it ended, the
    stream's last has the usage."""
    owes_prompt = fields.answer.echo or fields.answer.prompt_logprobs is not None
    opened: set[int] = set() if owes_prompt else set(range(generation.num_choices))
    while not generation.is_finished:
        deltas = await generation.news()
        for position, delta in enumerate(deltas, start=1):
            message = _message(delta, request_id)
            if delta.choice not in opened:
                opened.add(delta.choice)
                message.prompt.CopyFrom(_prompt_part(generation.prompt_of(delta.choice)))
            if generation.is_finished and position == len(deltas):
                message.usage.CopyFrom(_usage(generation.usage()))
            yield message


def _prompt_part(prompt: PromptPart) -> inference_pb2.GeneratePrompt:
    return inference_pb2.GeneratePrompt(
        text="" if prompt.echo is None else prompt.echo.text,
        token_ids=prompt.token_ids,
        logprobs=_logprobs(prompt.token_ids, prompt.logprobs) if prompt.logprobs else None,
    )


def _message(delta: Delta, request_id: str) -> inference_pb2.InferenceGenerateResponse:
    message = inference_pb2.InferenceGenerateResponse(
        index=delta.choice, text=delta.text, token_ids=delta.token_ids, request_id=request_id
    )
    if delta.logprobs:
        message.logprobs.extend(_logprobs(delta.token_ids, delta.logprobs))
    if delta.finish is not None:
        message.finish_reason = _FINISHES[delta.finish]
    return message


def _logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]
) -> list[inference_pb2.GenerateLogprob]:
    return [
        inference_pb2.GenerateLogprob(token_id=token_id)
        if entry is None
        else inference_pb2.GenerateLogprob(
            token_id=token_id,
            logprob=entry.logprob,
            top=[
                inference_pb2.GenerateTopLogprob(token_id=top_id, logprob=value)
                for top_id, value in entry.top
            ],
        )
        for token_id, entry in zip(token_ids, logprobs, strict=True)
    ]


def _usage(usage: Usage) -> inference_pb2.GenerateUsage:
    return inference_pb2.GenerateUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )
