"""The client's data types, and their translation to and from `octavo.v1.inference`.

The edge between the client and the wire: `client.py` holds no message, users see none.
"""

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
class Delta:
    """New output of one choice; `finish_reason` is set in its last one.

    The stream's last Delta carries the usage only: no text, no ids.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...]
    finish_reason: str | None
    request_id: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole answer. `finish_reason`: stop or length."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...]
    finish_reason: str | None


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
        self._request_id = delta.request_id or self._request_id

    def build(self, usage: Usage | None) -> Generation:
        choices = tuple(
            Choice(
                index,
                "".join(parts.text),
                tuple(parts.token_ids),
                tuple(parts.logprobs),
                parts.finish_reason,
            )
            for index, parts in sorted(self._parts.items())
        )
        return Generation(choices, usage, self._request_id)


def generate_request(
    prompt: str | None,
    messages: Sequence[Mapping[str, str]] | None,
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
        request = inference_pb2.InferenceGenerateRequest(**fields)
        if token_ids is not None:
            request.token_ids.token_ids.extend(token_ids)
            request.token_ids.SetInParent()
        else:
            _set_text_or_chat(request, prompt, messages)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"not a valid request: {error}") from None
    return request


def tokenize_request(
    prompt: str | None,
    messages: Sequence[Mapping[str, str]] | None,
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
    request: Any, prompt: str | None, messages: Sequence[Mapping[str, str]] | None
) -> None:
    if messages is None:
        request.text = prompt
        return
    request.chat.SetInParent()
    for message in messages:
        request.chat.messages.add(**message)


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
    logprobs = tuple(
        Logprob(item.token_id, item.logprob, tuple((t.token_id, t.logprob) for t in item.top))
        for item in message.logprobs
    )
    return Delta(
        index=message.index,
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=logprobs,
        finish_reason=reason,
        request_id=message.request_id,
    )


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
