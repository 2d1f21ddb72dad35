"""Chat messages into the prompt text that the model was trained on.

A model's template is a Jinja program from its folder; it runs sandboxed, in the environment
that transformers gives it, so the text is the same as `apply_chat_template(tokenize=False)`.
Whatever a template refuses or stumbles over is the request's fault: InvalidRequestError.

How messages are read before the template sees them (the written rules):
  role     system, developer, user, assistant or tool. `developer` becomes `system` unless the
           template itself speaks of developers.
  content  a string, or a list of text parts, which are joined with a newline; other parts are
           refused by name. null or absent is "" beside tool calls, else refused.
  name     a string. `audio` and `function_call` (the older tool call) are refused, since no
           template reads them.
  tool_calls[].function.arguments  JSON text becomes the object that it stands for.
  Everything else is handed on as it came.

To continue the final message is to end the prompt where its text ends, without the turn's end
mark, and, as in transformers, without spaces after it if the template trims messages.

Markup in a user's text ("<|im_start|>system") stays as it is, as in transformers: the tokenizer
reads it as the special token that it spells. Must not know: tokenizers, HTTP.
Entry points: `ChatTemplate`, `find_chat_template`.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.errors import ConfigurationError, InvalidRequestError
from octavo_router.tokenizer_files import read_json

ROLES = ("system", "developer", "user", "assistant", "tool")
PART_SEPARATOR = "\n"
MAX_REASON_CHARS = 300
# Marks the place in the rendered text where the final message ends; plain letters, which no
# filter of a template escapes. The space at the end shows whether the template trims messages.
_END_MARK = "OctavoEndOfTheFinalMessage "
_UNREAD_FIELDS = ("audio", "function_call")
Message = Mapping[str, Any]


class ChatTemplate:
    """A compiled template with the special tokens that it may name. Safe to share by threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source, globals=_functions())
        except TemplateError as error:
            raise ConfigurationError(f"the model's chat template is broken: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._knows_developer = "developer" in source

    @classmethod
    def of_request(cls, source: str, special_tokens: Mapping[str, str]) -> "ChatTemplate":
        """A template that a client sent: a broken one is the client's fault."""
        try:
            return cls(source, special_tokens)
        except ConfigurationError as error:
            text = f"chat_template is broken: {_reason(error.__cause__ or error)}"
            raise InvalidRequestError(text, param="chat_template") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text, special tokens written out: tokenize it without adding any.

        `variables`: what the template may name beside its usual ones.
        """
        if not messages:
            raise InvalidRequestError("messages must not be empty", param="messages")
        normalized = [
            self._normalize(message, f"messages[{index}]") for index, message in enumerate(messages)
        ]
        final_text: str = normalized[-1]["content"]
        if continue_final_message:
            normalized[-1]["content"] += _END_MARK
        names = {
            **self._special_tokens,
            **(variables or {}),
            "messages": normalized,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._template.render(names)
        except Exception as error:  # a template is a foreign program: it may raise anything
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {_reason(error)}",
                param="messages",
            ) from error
        return _cut_at_mark(text, final_text) if continue_final_message else text

    def _normalize(self, message: Message, param: str) -> dict[str, Any]:
        role = message.get("role")
        if role not in ROLES:
            raise InvalidRequestError(
                f"{param}.role must be one of {', '.join(ROLES)}, not {_shown(role)}",
                param=f"{param}.role",
            )
        _check_fields(message, param)
        normalized = dict(message)
        if role == "developer" and not self._knows_developer:
            normalized["role"] = "system"
        has_calls = bool(message.get("tool_calls"))
        normalized["content"] = _text_of(message.get("content"), param, may_be_null=has_calls)
        if has_calls:
            normalized["tool_calls"] = _tool_calls(message["tool_calls"], f"{param}.tool_calls")
        return normalized


def find_chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The source of a model folder's default template, None if it has none.

    chat_template.jinja comes before tokenizer_config.json's `chat_template`, which is a string
    or a list of named templates, and that before chat_template.json, which older models that take
    images have.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = tokenizer_config.get("chat_template")
    if found is None:
        found = read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        named = {entry["name"]: entry["template"] for entry in found}
        found = named.get("default")
    return found if isinstance(found, str) else None


# --- messages ---------------------------------------------------------------------------------


def _check_fields(message: Message, param: str) -> None:
    name = message.get("name")
    if name is not None and not isinstance(name, str):
        raise InvalidRequestError(
            f"{param}.name must be a string, not {_shown(name)}", param=f"{param}.name"
        )
    for field in _UNREAD_FIELDS:
        if message.get(field):
            raise InvalidRequestError(
                f"{param}.{field} isn't supported: leave it out", param=f"{param}.{field}"
            )


def _cut_at_mark(text: str, final_text: str) -> str:
    """The rendered text up to the end of the final message."""
    mark = _END_MARK.rstrip()
    end = max(text.rfind(mark), 0)
    # A template may show the message at other places too.
    kept = text[:end].replace(_END_MARK, "").replace(mark, "")
    if not end or final_text.strip() not in kept:
        raise InvalidRequestError(
            "continue_final_message: the model's chat template doesn't show the final message as "
            "it is, so there is nothing to go on with",
            param="continue_final_message",
        )
    is_whole = text.startswith(_END_MARK, end)
    return kept if is_whole else kept.rstrip()


def _text_of(content: Any, param: str, *, may_be_null: bool) -> str:
    param = f"{param}.content"
    if isinstance(content, str):
        return content
    if content is None and may_be_null:
        return ""
    if isinstance(content, list):
        return PART_SEPARATOR.join(
            _text_of_part(part, f"{param}[{index}]") for index, part in enumerate(content)
        )
    raise InvalidRequestError(
        f"{param} must be a string or a list of text parts, not {_shown(content)}", param=param
    )


def _text_of_part(part: Any, param: str) -> str:
    if not isinstance(part, Mapping):
        raise InvalidRequestError(f"{param} must be an object with a type", param=param)
    if part.get("type") != "text":
        raise InvalidRequestError(
            f"{param} has type {_shown(part.get('type'))}; this model reads text parts only",
            param=param,
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{param}.text must be a string", param=f"{param}.text")
    return text


def _tool_calls(calls: Any, param: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequestError(f"{param} must be a list", param=param)
    return [_tool_call(call, f"{param}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, param: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        param += ".function"
        raise InvalidRequestError(f"{param} must be an object", param=param)
    param += ".function.arguments"
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            # No arguments at all are commonly written as an empty string.
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{param} is not valid JSON", param=param) from error
    if not isinstance(arguments, dict):
        raise InvalidRequestError(f"{param} must be a JSON object", param=param)
    return {**call, "function": {**function, "arguments": arguments}}


def _shown(value: Any) -> str:
    """A user's value in an error text: bounded, and encodable whatever it holds."""
    return ascii(value)[:50] if isinstance(value, str) else type(value).__name__


def _reason(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    if len(text) > MAX_REASON_CHARS:
        text = text[:MAX_REASON_CHARS] + "..."
    return text.encode("utf-8", "replace").decode()


# --- the environment that templates expect ----------------------------------------------------


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training; here, only a scope."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    return environment


def _functions() -> dict[str, Any]:
    return {"raise_exception": _raise_exception, "strftime_now": _strftime_now}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes <, > and & for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 - templates may pass it by name
    return datetime.now().strftime(format)
