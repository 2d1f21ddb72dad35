"""The HTTP API's types for its OpenAPI document, and the bodies of its small answers.

Requests are validated by `params`, `requests` and `unsupported`, whose rules these models repeat
for readers and generators of clients; a test holds the two together. Must not know: services.
Entry points: `describe`, `request_body`, the models.
"""

from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import models_json_schema

from octavo.request_limits import MAX_ALTERNATIVES, MAX_SEQUENCES
from octavo_router.fields import MAX_INT32
from octavo_router.params import (
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TEMPERATURE,
)
from octavo_router.requests import (
    MAX_CACHE_SALT_CHARS,
    MAX_MESSAGES,
    MAX_PROMPTS,
    MAX_TEMPLATE_CHARS,
    MAX_USER_CHARS,
)
from octavo_router.token_rules import (
    MAX_BAD_WORDS,
    MAX_BIASED_IDS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MIN_REPETITION_PENALTY,
)

_REF = "#/components/schemas/{model}"


class _Request(BaseModel):
    """Unknown fields that change nothing are ignored."""

    model_config = ConfigDict(extra="allow")

    model: str | None = Field(None, description="A served name; absent = the served model.")


class StreamOptions(BaseModel):
    include_usage: bool | None = Field(None, description="One more chunk with token counts.")
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: the counts so far in every chunk."
    )


class _Sampling(_Request):
    temperature: float | None = Field(None, ge=0, le=MAX_TEMPERATURE, description="0 = greedy.")
    top_p: float | None = Field(None, ge=0, le=1, description="1 = off, 0 = greedy.")
    top_k: int | None = Field(None, ge=-1, le=MAX_INT32, description="-1 and 0 = off.")
    min_p: float | None = Field(None, ge=0, le=1, description="0 = off.")
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: str | list[str] | None = Field(None, description=f"Up to {MAX_STOPS} strings.")
    stop_token_ids: list[int] | None = Field(None, max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(
        None, ge=0, le=MAX_INT32, description="Nothing ends the answer before; at most max_tokens."
    )
    presence_penalty: float | None = Field(None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    frequency_penalty: float | None = Field(None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    repetition_penalty: float | None = Field(
        None, ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY, description="1 = off."
    )
    logit_bias: dict[str, float] | None = Field(
        None, max_length=MAX_BIASED_IDS, description="Token id to bias, -100 .. 100."
    )
    allowed_token_ids: list[int] | None = Field(None, min_length=1)
    bad_words: list[str] | None = Field(None, max_length=MAX_BAD_WORDS)
    n: int | None = Field(None, ge=1, le=MAX_SEQUENCES)
    best_of: int | None = Field(None, description="As n, or absent.")
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_ALTERNATIVES, description="Not with stream."
    )
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = Field(None, description="Absent = true.")
    spaces_between_special_tokens: bool | None = Field(None, description="Without effect.")
    return_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=MAX_INT32, description="Keep the last so many; -1 = what fits."
    )
    add_special_tokens: bool | None = Field(
        None, description="Absent = true for a prompt, false for messages."
    )
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_CACHE_SALT_CHARS)
    priority: int | None = Field(
        None, ge=-MAX_INT32, le=MAX_INT32, description="Smaller is served first."
    )
    request_id: str | None = Field(None, description="As the X-Request-Id header, which wins.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=MAX_USER_CHARS, description="Not used.")


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class CalledFunction(BaseModel):
    name: str | None = None
    arguments: str | dict[str, Any] = Field(description="JSON text of an object, or the object.")


class PastToolCall(BaseModel):
    model_config = ConfigDict(extra="allow")

    function: CalledFunction


class Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = Field(
        None, description="May be absent beside tool_calls only."
    )
    name: str | None = None
    tool_calls: list[PastToolCall] | None = None
    tool_call_id: str | None = None


class _Rendering(BaseModel):
    add_generation_prompt: bool | None = Field(
        None, description="Absent = true, unless continue_final_message."
    )
    continue_final_message: bool | None = None
    chat_template: str | None = Field(
        None, max_length=MAX_TEMPLATE_CHARS, description="Refused unless the operator allows it."
    )
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(_Sampling, _Rendering):
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    max_completion_tokens: int | None = Field(
        None, ge=1, le=MAX_INT32, description="Newer name of max_tokens; absent = the rest."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_ALTERNATIVES)


class CompletionRequest(_Sampling):
    prompt: str | list[int] | list[str] | list[list[int]] = Field(
        description=f"A list has up to {MAX_PROMPTS} prompts, or the ids of one."
    )
    max_tokens: int | None = Field(
        None, ge=0, le=MAX_INT32, description="0 only with echo: the prompt is scored."
    )
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_ALTERNATIVES)


class TokenizeRequest(_Request, _Rendering):
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = Field(
        None, description="Absent = true for a prompt, false for messages."
    )


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
    token_ids: list[int] | None = None


class PromptLogprob(BaseModel):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class TextLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


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
        # No schema: OpenAPI has no word for one event of many, and tools read it as each event's.
        events: dict[str, Any] = {"text/event-stream": {}}
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
            _drop_validation_errors(document)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _drop_validation_errors(document: dict[str, Any]) -> None:
    """FastAPI's own 422: no route gives it."""
    for methods in document["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
