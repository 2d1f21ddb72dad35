"""The HTTP API's types for its OpenAPI document, and the bodies of its small answers.

Requests are validated by `params`, `requests` and `unsupported`, whose rules these models repeat
for readers and generators of clients; a test holds the two together. Must not know: services.
Entry points: `describe`, `request_body`, the models.
"""

from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import models_json_schema

from octavo_router.params import (
    MAX_INT32,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TEMPERATURE,
)

_REF = "#/components/schemas/{model}"


class _Request(BaseModel):
    """Unknown fields that change nothing are ignored."""

    model_config = ConfigDict(extra="allow")

    model: str | None = Field(None, description="A served name; absent = the served model.")


class StreamOptions(BaseModel):
    include_usage: bool | None = Field(None, description="One more chunk with token counts.")


class _Sampling(_Request):
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    temperature: float | None = Field(None, ge=0, le=MAX_TEMPERATURE, description="0 = greedy.")
    top_p: float | None = Field(None, ge=0, le=1, description="1 = off, 0 = greedy.")
    top_k: int | None = Field(None, ge=-1, le=MAX_INT32, description="-1 and 0 = off.")
    min_p: float | None = Field(None, ge=0, le=1, description="0 = off.")
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: str | list[str] | None = Field(None, description=f"Up to {MAX_STOPS} strings.")
    stop_token_ids: list[int] | None = Field(None, max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool | None = None
    n: int | None = Field(None, ge=1, le=MAX_N)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None


class ChatRequest(_Sampling):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(
        None, ge=1, le=MAX_INT32, description="Newer name of max_tokens; absent = the rest."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)


class CompletionRequest(_Sampling):
    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)


class TokenizeRequest(_Request):
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = Field(None, description="For prompt; absent = true.")


class DetokenizeRequest(_Request):
    tokens: list[int]


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class UsageBody(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ChatTopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(ChatTopLogprob):
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob]
    refusal: None = None


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody


class TextLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageBody


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "octavo"
    max_model_len: int | None


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokenized(BaseModel):
    count: int
    max_model_len: int | None
    tokens: list[int]


class Detokenized(BaseModel):
    prompt: str


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


_REQUESTS = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest, ErrorBody)
_ERRORS = {
    "400": "The request can't be served as it is",
    "401": "No API key, or a wrong one",
    "404": "No such model",
    "413": "The body is too large",
    "429": "Too much is waiting; see Retry-After",
    "503": "No scheduler or worker can serve now; see Retry-After",
    "504": "The deadline passed",
}


def request_body(model: str, *, has_stream: bool = False) -> dict[str, Any]:
    """A route's `openapi_extra`: its body, its errors and, if it streams, that."""
    error = {"application/json": {"schema": {"$ref": _REF.format(model="ErrorBody")}}}
    responses: dict[str, Any] = {
        status: {"description": text, "content": error} for status, text in _ERRORS.items()
    }
    if has_stream:
        text = "JSON, or with stream: true server-sent events of chunks, ended by [DONE]"
        events = {"text/event-stream": {"schema": {"type": "string"}}}
        responses["200"] = {"description": text, "content": events}
    content = {"application/json": {"schema": {"$ref": _REF.format(model=model)}}}
    return {"requestBody": {"required": True, "content": content}, "responses": responses}


def describe(app: FastAPI) -> None:
    """Add the request models, the key scheme, and nothing that isn't so, to the document."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            _, definitions = models_json_schema(
                [(model, "validation") for model in _REQUESTS],
                ref_template=_REF,
            )
            components = document.setdefault("components", {})
            components.setdefault("schemas", {}).update(definitions["$defs"])
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}, {}]
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
