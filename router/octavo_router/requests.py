"""A validated request, as both doors hand it to the pipeline, and the fields they share.

Must not know: protos, HTTP's machinery. Entry points: `GenerateRequest`, `parse_messages`,
`parse_prompts`, `clean_request_id`.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from octavo.errors import InvalidRequestError
from octavo_router.params import SamplingOptions, as_token_ids, refuse, show

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 4096
MAX_PROMPTS = 1024
MAX_REQUEST_ID_CHARS = 128
MAX_IDEMPOTENCY_KEY_CHARS = 256
_NOT_ID = re.compile(r"[^A-Za-z0-9._:/-]")


class Endpoint(Enum):
    """Where a request came in; the label of its metrics."""

    CHAT = "chat_completions"
    COMPLETIONS = "completions"
    GRPC = "grpc_generate"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages to render by the model's template: {"role", "content", ...} each."""

    messages: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text to tokenize as it is."""

    text: str


@dataclass(frozen=True, slots=True)
class IdsPrompt:
    """Ids of the vocabulary."""

    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | IdsPrompt


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request. `prompts` are validated, not yet tokenized; `default_max_tokens` None = the
    rest of the context; `timeout_s` None = no deadline."""

    endpoint: Endpoint
    request_id: str
    tenant: str
    prompts: tuple[Prompt, ...]
    sampling: SamplingOptions
    default_max_tokens: int | None
    idempotency_key: str
    timeout_s: float | None
    # Every frame wakes the consumer; otherwise only the end does, unless stop strings need it.
    is_stream: bool


def clean_request_id(given: str | None) -> str:
    """The caller's id, bounded and free of anything a header or a log could choke on.

    For correlation only: it may repeat, nothing is looked up by it.
    """
    cleaned = _NOT_ID.sub("", given or "")[:MAX_REQUEST_ID_CHARS]
    return cleaned or f"req-{secrets.token_hex(12)}"


def check_idempotency_key(key: str) -> str:
    if len(key) > MAX_IDEMPOTENCY_KEY_CHARS:
        raise InvalidRequestError(
            f"Idempotency-Key must be at most {MAX_IDEMPOTENCY_KEY_CHARS} characters long, "
            f"got {len(key)}",
            param="Idempotency-Key",
        )
    return key


def parse_messages(value: Any) -> ChatPrompt:
    """Chat messages. A list of text parts is joined by newlines. Raises InvalidRequestError."""
    if not isinstance(value, list | tuple) or not value:
        refuse("messages", "a list of at least one message", value)
    if len(value) > MAX_MESSAGES:
        refuse("messages", f"at most {MAX_MESSAGES} messages", f"{len(value)} messages")
    return ChatPrompt(tuple(_message(f"messages[{i}]", item) for i, item in enumerate(value)))


def _message(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        refuse(name, "an object with role and content", value)
    role = value.get("role")
    if role not in ROLES:
        refuse(f"{name}.role", f"one of {', '.join(ROLES)}", role)
    for field in ("tool_calls", "function_call", "audio"):
        if value.get(field):
            raise InvalidRequestError(
                f"{name}.{field} isn't supported yet: leave it out", param=f"{name}.{field}"
            )
    message = {"role": role, "content": _content(f"{name}.content", value.get("content"))}
    author = value.get("name")
    if author is not None:
        if not isinstance(author, str):
            refuse(f"{name}.name", "a string", author)
        message["name"] = author
    return message


def _content(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        refuse(name, "a string or a list of text parts", value)
    texts: list[str] = []
    for position, part in enumerate(value):
        where = f"{name}[{position}]"
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise InvalidRequestError(
                f"{where}: only parts of type text are supported, got {show(kind)}", param=where
            )
        text = part.get("text")
        if not isinstance(text, str):
            refuse(f"{where}.text", "a string", text)
        texts.append(text)
    return "\n".join(texts)


def parse_prompts(value: Any, vocab_size: int) -> tuple[Prompt, ...]:
    """A completion's prompt: text, ids, or a list of either. Raises InvalidRequestError."""
    if isinstance(value, str):
        return (TextPrompt(value),)
    if not isinstance(value, list) or not value:
        refuse("prompt", "a string, a list of token ids, or a non-empty list of either", value)
    if isinstance(value[0], str | list):
        if len(value) > MAX_PROMPTS:
            refuse("prompt", f"at most {MAX_PROMPTS} prompts", f"{len(value)} prompts")
        return tuple(_prompt(f"prompt[{i}]", item, vocab_size) for i, item in enumerate(value))
    return (_ids("prompt", value, vocab_size),)


def _prompt(name: str, value: Any, vocab_size: int) -> Prompt:
    if isinstance(value, str):
        return TextPrompt(value)
    if not isinstance(value, list):
        refuse(name, "a string or a list of token ids", value)
    return _ids(name, value, vocab_size)


def _ids(name: str, value: Sequence[Any], vocab_size: int) -> IdsPrompt:
    if not value:
        raise InvalidRequestError(f"{name} has no token ids: at least one is needed", param=name)
    return IdsPrompt(as_token_ids(name, value, vocab_size))
