"""A validated request, as both doors hand it to the pipeline, and the fields they share.

Messages are looked at here as far as their list goes; what is in one is the chat template's to
judge, in the thread that renders it. Must not know: protos, HTTP's machinery.
Entry points: `GenerateRequest`, `RequestFields`, `parse_fields`, `parse_chat_prompt`,
`parse_prompts`, `clean_request_id`.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from octavo.errors import InvalidRequestError
from octavo_router.answer_options import AnswerOptions, parse_answer_options
from octavo_router.fields import MAX_INT32, Fields, as_token_ids, refuse
from octavo_router.generation_defaults import GenerationDefaults
from octavo_router.params import SamplingOptions, parse_sampling

MAX_MESSAGES = 4096
MAX_PROMPTS = 1024
MAX_REQUEST_ID_CHARS = 128
MAX_IDEMPOTENCY_KEY_CHARS = 256
MAX_CACHE_SALT_CHARS = 256
MAX_USER_CHARS = 1024
MAX_TEMPLATE_CHARS = 1 << 16
# Names that a template gets from the request itself.
RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
    | {"chat_template", "tokenize"}
)
_NOT_ID = re.compile(r"[^A-Za-z0-9._:/-]")


class Endpoint(Enum):
    """Where a request came in; the label of its metrics."""

    CHAT = "chat_completions"
    COMPLETIONS = "completions"
    GRPC = "grpc_generate"


@dataclass(frozen=True, slots=True)
class ChatRendering:
    """How the template is used. `template` None = the model's; `variables`: extra ones."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages to render by a template: {"role", "content", ...} each."""

    messages: tuple[Mapping[str, Any], ...]
    rendering: ChatRendering = ChatRendering()
    add_special_tokens: bool = False


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text to tokenize as it is."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class IdsPrompt:
    """Ids of the vocabulary."""

    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | IdsPrompt


@dataclass(frozen=True, slots=True)
class RequestRules:
    """What validation must know of the model and of the operator's choices."""

    defaults: GenerationDefaults
    vocab_size: int
    allows_chat_template: bool = False


@dataclass(frozen=True, slots=True)
class RequestFields:
    """A request's own fields, validated; `prompts` are not yet tokenized.

    `truncate_prompt_tokens`: the last so many ids are kept; -1 = as many as fit, None = all.
    `priority`: smaller is served first.
    """

    prompts: tuple[Prompt, ...]
    sampling: SamplingOptions
    answer: AnswerOptions
    truncate_prompt_tokens: int | None
    cache_salt: str | None
    priority: int

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives to compute per prompt token: for the field, and for a scored echo."""
        answer, sampling = self.answer, self.sampling
        asked = [answer.prompt_logprobs, sampling.logprobs if answer.echo else None]
        return max((count for count in asked if count is not None), default=None)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request. `default_max_tokens` None = the rest of the context; `timeout_s` None = no
    deadline."""

    endpoint: Endpoint
    request_id: str
    tenant: str
    fields: RequestFields
    default_max_tokens: int | None
    idempotency_key: str
    timeout_s: float | None
    # Every frame wakes the consumer; otherwise only the end does, unless stop strings need it.
    is_stream: bool
    # As the answer calls it.
    model_name: str = ""


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


def parse_fields(
    raw: Mapping[str, Any], prompts: tuple[Prompt, ...], rules: RequestRules
) -> RequestFields:
    """Everything that does not depend on the door. Raises InvalidRequestError."""
    fields = Fields(raw)
    fields.string("user", MAX_USER_CHARS)
    truncate = fields.integer("truncate_prompt_tokens", -1, MAX_INT32)
    if truncate == 0:
        refuse("truncate_prompt_tokens", "at least 1, or -1 for what fits", 0)
    salt = fields.string("cache_salt", MAX_CACHE_SALT_CHARS)
    if salt == "":
        refuse("cache_salt", "at least one character long", salt)
    return RequestFields(
        prompts=prompts,
        sampling=parse_sampling(raw, rules.defaults, rules.vocab_size),
        answer=parse_answer_options(raw),
        truncate_prompt_tokens=truncate,
        cache_salt=salt,
        priority=fields.integer("priority", -MAX_INT32, MAX_INT32) or 0,
    )


def parse_chat_prompt(raw: Mapping[str, Any], rules: RequestRules) -> ChatPrompt:
    """Messages and how to render them. Raises InvalidRequestError."""
    fields = Fields(raw)
    continues = bool(fields.boolean("continue_final_message"))
    opens = fields.boolean("add_generation_prompt")
    if continues and opens:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other: an answer "
            "either goes on with the last message or opens a new one",
            param="continue_final_message",
        )
    return ChatPrompt(
        messages=_messages(raw.get("messages")),
        rendering=ChatRendering(
            add_generation_prompt=not continues if opens is None else opens,
            continue_final_message=continues,
            template=_template(fields, rules),
            variables=_variables(fields),
        ),
        add_special_tokens=bool(fields.boolean("add_special_tokens")),
    )


def _messages(value: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list | tuple) or not value:
        refuse("messages", "a list of at least one message", value)
    if len(value) > MAX_MESSAGES:
        refuse("messages", f"at most {MAX_MESSAGES} messages", len(value))
    for position, message in enumerate(value):
        if not isinstance(message, Mapping):
            refuse(f"messages[{position}]", "an object with role and content", message)
    return tuple(value)


def _template(fields: Fields, rules: RequestRules) -> str | None:
    template = fields.string("chat_template", MAX_TEMPLATE_CHARS)
    if template is not None and not rules.allows_chat_template:
        raise InvalidRequestError(
            "chat_template isn't allowed here: a template is a program, so the operator must "
            "set trust_request_chat_template; leave it out to use the model's own",
            param="chat_template",
        )
    return template


def _variables(fields: Fields) -> Mapping[str, Any]:
    variables = fields.mapping("chat_template_kwargs") or {}
    for name in variables:
        if name in RESERVED_VARIABLES:
            param = f"chat_template_kwargs.{name}"
            raise InvalidRequestError(f"{param} is set by the request's own fields", param=param)
    return variables


def parse_prompts(raw: Mapping[str, Any], rules: RequestRules) -> tuple[Prompt, ...]:
    """A completion's prompt: text, ids, or a list of either. Raises InvalidRequestError."""
    special = Fields(raw).boolean("add_special_tokens") is not False
    value = raw.get("prompt")
    if isinstance(value, str):
        return (TextPrompt(value, special),)
    if not isinstance(value, list) or not value:
        refuse("prompt", "a string, a list of token ids, or a non-empty list of either", value)
    if not isinstance(value[0], str | list):
        return (_ids("prompt", value, rules.vocab_size),)
    if len(value) > MAX_PROMPTS:
        refuse("prompt", f"at most {MAX_PROMPTS} prompts", len(value))
    prompts: list[Prompt] = []
    for position, item in enumerate(value):
        name = f"prompt[{position}]"
        if isinstance(item, str):
            prompts.append(TextPrompt(item, special))
        elif isinstance(item, list):
            prompts.append(_ids(name, item, rules.vocab_size))
        else:
            refuse(name, "a string or a list of token ids", item)
    return tuple(prompts)


def _ids(name: str, value: Sequence[Any], vocab_size: int) -> IdsPrompt:
    if not value:
        raise InvalidRequestError(f"{name} has no token ids: at least one is needed", param=name)
    return IdsPrompt(as_token_ids(name, value, vocab_size))
