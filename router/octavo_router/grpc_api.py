"""The gRPC door: octavo.v1.Inference, with the HTTP API's validation, defaults and errors.

Must not know: HTTP, schedulers. Entry point: `InferenceServicer`.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio

from octavo.errors import InvalidRequestError
from octavo.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from octavo_router.flights import Finish, TokenLogprob
from octavo_router.generation import Delta, Generation, Usage
from octavo_router.grpc_guard import answering
from octavo_router.outcomes import RequestRecord
from octavo_router.params import as_token_ids, parse_sampling
from octavo_router.requests import (
    Endpoint,
    GenerateRequest,
    IdsPrompt,
    Prompt,
    TextPrompt,
    check_idempotency_key,
    clean_request_id,
    parse_messages,
)
from octavo_router.service import Service

_FINISHES = {
    Finish.STOP: common_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
# Fields that are absent unless they were set, and those that are lists.
_OPTIONAL = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "n")
_LISTS = ("stop", "stop_token_ids")
_Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """The public gRPC API."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def Generate(  # noqa: N802
        self, request: inference_pb2.InferenceGenerateRequest, context: _Context
    ) -> AsyncIterator[inference_pb2.InferenceGenerateResponse]:
        """Stream deltas of every choice; the last message holds the usage."""
        async with answering(request, context):
            request_id = clean_request_id(request.request_id)
            with RequestRecord(self._service.metrics, Endpoint.GRPC) as record:
                tenant = self._authenticate(context)
                self._service.check_open()
                parsed = self._parse(request, request_id, tenant, context)
                generation = await self._service.pipeline.start(parsed, record)
                try:
                    async for message in _messages(generation, request_id):
                        yield message
                finally:
                    generation.close()

    def _parse(
        self,
        request: inference_pb2.InferenceGenerateRequest,
        request_id: str,
        tenant: str,
        context: _Context,
    ) -> GenerateRequest:
        service = self._service
        service.served_name(request.model)
        raw: dict[str, Any] = {
            name: getattr(request, name) for name in _OPTIONAL if request.HasField(name)
        }
        raw |= {name: list(getattr(request, name)) for name in _LISTS}
        if request.HasField("logprobs"):
            raw["logprobs"] = request.logprobs
        left_s = context.time_remaining()
        limits = [limit for limit in (left_s, service.timeout_s) if limit is not None]
        return GenerateRequest(
            endpoint=Endpoint.GRPC,
            request_id=request_id,
            tenant=tenant,
            prompts=(self._prompt(request),),
            sampling=parse_sampling(raw, service.defaults, service.vocab_size),
            default_max_tokens=None,
            idempotency_key=check_idempotency_key(request.idempotency_key),
            timeout_s=min(limits, default=None),
            is_stream=True,
        )

    def _prompt(
        self,
        request: inference_pb2.InferenceGenerateRequest | inference_pb2.InferenceTokenizeRequest,
    ) -> Prompt:
        match request.WhichOneof("input"):
            case "text":
                return TextPrompt(request.text)
            case "token_ids":
                assert isinstance(request, inference_pb2.InferenceGenerateRequest)
                ids = as_token_ids(
                    "token_ids", list(request.token_ids.token_ids), self._service.vocab_size
                )
                return IdsPrompt(ids)
            case "chat":
                messages = [{"role": m.role, "content": m.content} for m in request.chat.messages]
                return parse_messages(messages)
            case _:
                raise InvalidRequestError("input is missing: set text, token_ids or chat")

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.InferenceTokenizeRequest, context: _Context
    ) -> inference_pb2.InferenceTokenizeResponse:
        """Ids exactly as Generate would see them."""
        async with answering(request, context):
            self._authenticate(context)
            self._service.served_name(request.model)
            special = not request.HasField("add_special_tokens") or request.add_special_tokens
            token_ids = await self._service.pipeline.tokenize(
                self._prompt(request), add_special_tokens=special
            )
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


async def _messages(
    generation: Generation, request_id: str
) -> AsyncIterator[inference_pb2.InferenceGenerateResponse]:
    """Each delta; a choice's last says why it ended, the stream's last has the usage."""
    while not generation.is_finished:
        deltas = await generation.news()
        for position, delta in enumerate(deltas, start=1):
            message = _message(delta, request_id)
            if generation.is_finished and position == len(deltas):
                message.usage.CopyFrom(_usage(generation.usage()))
            yield message


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
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
) -> list[inference_pb2.GenerateLogprob]:
    return [
        inference_pb2.GenerateLogprob(
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
