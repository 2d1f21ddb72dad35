"""The client's data types, and their translation to and from `octavo.v1.inference`.

The edge between the client and the wire: `client.py` holds no message, users see none.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from octavo.errors import InvalidRequestError
from octavo.v1 import common_pb2, inference_pb2


class Options(TypedDict, total=False):
    """What `generate` accepts beside its input; absent = the model's default."""

    model: str
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    n: int
    logprobs: int
    min_tokens: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    echo: bool
    prompt_logprobs: int
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    truncate_prompt_tokens: int
    add_special_tokens: bool
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str
    chat_template_kwargs: Mapping[str, Any]
    cache_salt: str
    priority: int
    idempotency_key: str
    request_id: str
    user: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the whole request, all choices together."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural logs of a token's probability and of the likeliest ones', best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What an answer says of its prompt. `text`: with echo only. `logprobs`: one per id, None for
    the first; empty if not asked for."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprob | None, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of one choice; `finish_reason` is set in its last one, `prompt` in its first if
    echo or prompt_logprobs was asked for.

    The stream's last Delta carries the usage only: no text, no ids.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...]
    finish_reason: str | None
    request_id: str
    prompt: Prompt | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole answer. `finish_reason`: stop or length. `prompt`: see Delta."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...]
    finish_reason: str | None
    prompt: Prompt | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """All choices, by index."""

    choices: tuple[Choice, ...]
    usage: Usage | None
    request_id: str

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text


@dataclass(frozen=True, slots=True)
class Tokens:
    """Ids of a prompt, and the longest sequence that the model takes."""

    token_ids: tuple[int, ...]
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Model:
    """A served name. `created_s`: seconds since 1970."""

    id: str
    max_model_len: int
    created_s: int


@dataclass(slots=True)
class _Parts:
    text: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[Logprob] = field(default_factory=list[Logprob])
    finish_reason: str | None = None
    prompt: Prompt | None = None


class GenerationBuilder:
    """Puts a stream's Deltas together."""

    def __init__(self) -> None:
        self._parts: dict[int, _Parts] = {}
        self._request_id = ""

    def add(self, delta: Delta) -> None:
        parts = self._parts.setdefault(delta.index, _Parts())
        parts.text.append(delta.text)
        parts.token_ids.extend(delta.token_ids)
        parts.logprobs.extend(delta.logprobs)
        parts.finish_reason = delta.finish_reason or parts.finish_reason
        parts.prompt = delta.prompt or parts.prompt
        self._request_id = delta.request_id or self._request_id

    def build(self, usage: Usage | None) -> Generation:
        choices = tuple(
            Choice(
                index,
                "".join(parts.text),
                tuple(parts.token_ids),
                tuple(parts.logprobs),
                parts.finish_reason,
                parts.prompt,
            )
            for index, parts in sorted(self._parts.items())
        )
        return Generation(choices, usage, self._request_id)


def generate_request(
    prompt: str | None,
    messages: Sequence[Mapping[str, Any]] | None,
    token_ids: Iterable[int] | None,
    options: Options,
) -> inference_pb2.InferenceGenerateRequest:
    """Raises InvalidRequestError for what no message can hold; the router checks the rest."""
    if sum(value is not None for value in (prompt, messages, token_ids)) != 1:
        raise InvalidRequestError("give exactly one of prompt, messages and token_ids")
    unknown = options.keys() - Options.__annotations__.keys()
    if unknown:
        raise InvalidRequestError(f"no such option: {', '.join(sorted(unknown))}")
    fields: dict[str, Any] = {k: v for k, v in options.items() if v is not None}
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    try:
        if "chat_template_kwargs" in fields:
            variables = fields.pop("chat_template_kwargs")
            fields["chat_template_kwargs_json"] = json.dumps(dict(variables))
        request = inference_pb2.InferenceGenerateRequest(**fields)
        if token_ids is not None:
            request.token_ids.token_ids.extend(token_ids)
            request.token_ids.SetInParent()
        else:
            _set_text_or_chat(request, prompt, messages)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequestError(f"not a valid request: {error}") from None
    return request


def tokenize_request(
    prompt: str | None,
    messages: Sequence[Mapping[str, Any]] | None,
    add_special_tokens: bool,
    model: str,
) -> inference_pb2.InferenceTokenizeRequest:
    if (prompt is None) == (messages is None):
        raise InvalidRequestError("give exactly one of prompt and messages")
    try:
        request = inference_pb2.InferenceTokenizeRequest(model=model)
        if messages is None:
            request.add_special_tokens = add_special_tokens
        _set_text_or_chat(request, prompt, messages)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"not a valid request: {error}") from None
    return request


def _set_text_or_chat(
    request: Any, prompt: str | None, messages: Sequence[Mapping[str, Any]] | None
) -> None:
    if messages is None:
        request.text = prompt
        return
    request.chat.SetInParent()
    for message in messages:
        fields = dict(message)
        calls = [_call_of(call) for call in fields.pop("tool_calls", None) or ()]
        request.chat.messages.add(**fields, tool_calls=calls)


def _call_of(call: Mapping[str, Any]) -> inference_pb2.ToolCall:
    """A call in OpenAI's shape; its arguments as JSON text or as an object."""
    function = call["function"]
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    return inference_pb2.ToolCall(
        id=call.get("id", ""), name=function.get("name", ""), arguments_json=arguments
    )


def detokenize_request(
    token_ids: Iterable[int], model: str
) -> inference_pb2.InferenceDetokenizeRequest:
    try:
        return inference_pb2.InferenceDetokenizeRequest(token_ids=token_ids, model=model)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"not a valid id: {error}", param="token_ids") from None


def delta_of(message: inference_pb2.InferenceGenerateResponse) -> Delta:
    reason = None
    if message.finish_reason:
        name = common_pb2.FinishReason.Name(message.finish_reason)
        reason = name.removeprefix("FINISH_REASON_").lower()
    logprobs = tuple(map(_logprob, message.logprobs))
    prompt = None
    if message.HasField("prompt"):
        part = message.prompt
        scored = (_logprob(item) if item.HasField("logprob") else None for item in part.logprobs)
        prompt = Prompt(part.text, tuple(part.token_ids), tuple(scored))
    return Delta(
        index=message.index,
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=logprobs,
        finish_reason=reason,
        request_id=message.request_id,
        prompt=prompt,
    )


def _logprob(item: inference_pb2.GenerateLogprob) -> Logprob:
    return Logprob(item.token_id, item.logprob, tuple((t.token_id, t.logprob) for t in item.top))


def usage_of(message: inference_pb2.InferenceGenerateResponse) -> Usage | None:
    """Set in a stream's last message only."""
    if not message.HasField("usage"):
        return None
    usage = message.usage
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)


def tokens_of(message: inference_pb2.InferenceTokenizeResponse) -> Tokens:
    return Tokens(tuple(message.token_ids), message.max_model_len)


def models_of(message: inference_pb2.InferenceListModelsResponse) -> tuple[Model, ...]:
    return tuple(Model(item.id, item.max_model_len, item.created_s) for item in message.models)
