"""/v1/completions: its fields, its frames and its body.

Must not know: schedulers, how bytes are sent. Entry points: `parse_completion`,
`CompletionFrames`, `completion_body`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from octavo_router.answers import AnswerHead, AnswerShape, WholeChoice, usage_body
from octavo_router.generation import Delta, PromptPart, Usage
from octavo_router.logprobs import CompletionLogprobs
from octavo_router.requests import RequestFields, RequestRules, parse_fields, parse_prompts
from octavo_router.sse import FrameTemplate, dumps, members
from octavo_router.unsupported import CHAT_ONLY, refuse_unsupported

DEFAULT_MAX_TOKENS = 16
Columns = dict[str, list[Any]]


def parse_completion(body: Mapping[str, Any], rules: RequestRules) -> RequestFields:
    """A completion request's fields. Raises InvalidRequestError."""
    refuse_unsupported(body, CHAT_ONLY)
    return parse_fields(body, parse_prompts(body, rules), rules)


class CompletionFrames:
    """A stream's frames: an echo of the prompt if asked for, text, then the finish."""

    def __init__(self, head: AnswerHead, shape: AnswerShape) -> None:
        self._template = FrameTemplate(
            head.fields(),
            before_text='"text":',
            after_text="",
            empty='"text":""',
            num_choices=shape.num_choices,
            has_usage=shape.has_usage,
        )
        self._shape = shape
        # Nothing to say but text, to choices whose beginning is said.
        self._is_plain = shape.is_plain
        self._is_open = [not (shape.has_echo or shape.has_token_ids)] * shape.num_choices
        self._logprobs = [CompletionLogprobs(shape.texts) for _ in range(shape.num_choices)]
        # Ids and logprobs whose text is still held back.
        self._held_ids: list[list[int]] = [[] for _ in range(shape.num_choices)]
        self._held_logprobs: list[Columns] = [{} for _ in range(shape.num_choices)]

    def delta(self, delta: Delta) -> Sequence[bytes]:
        index = delta.choice
        frames: list[bytes] = []
        if not self._is_open[index]:
            self._is_open[index] = True
            frames.append(self._opening(index))
        if self._is_plain and delta.finish is None:
            if delta.text:
                frames.append(self._template.text(index, delta.text))
            return frames
        logprobs, more = self._beside(delta)
        if delta.text or delta.finish is not None:
            finish = None if delta.finish is None else delta.finish.value
            frames.append(self._template.chunk(index, delta.text, logprobs, finish, more))
        return frames

    def _opening(self, index: int) -> bytes:
        """The prompt's part of a choice."""
        text, logprobs = _echo(self._shape, self._shape.prompt_of(index), self._logprobs[index])
        more = members(self._shape.prompt_members(index))
        if self._shape.has_token_ids:
            more += members({"token_ids": []})
        said = "null" if logprobs is None else dumps(logprobs)
        return self._template.chunk(index, text, said, more=more)

    def _beside(self, delta: Delta) -> tuple[str, str]:
        """Logprobs and other members of the choice; held while there is no frame for them."""
        shape, index = self._shape, delta.choice
        is_sent = bool(delta.text) or delta.finish is not None
        logprobs, more = "null", ""
        if shape.num_logprobs is not None:
            held = self._held_logprobs[index]
            _append(held, self._logprobs[index].render(delta.token_ids, delta.logprobs))
            if is_sent:
                self._held_logprobs[index] = {}
                logprobs = dumps(held)
        if shape.has_token_ids:
            held_ids = self._held_ids[index]
            held_ids += delta.token_ids
            if is_sent:
                self._held_ids[index] = []
                more = members({"token_ids": held_ids})
        return logprobs, more

    def end(self, usage: Usage) -> Sequence[bytes]:
        return [self._template.usage(usage_body(usage))] if self._shape.has_usage else []


def _echo(
    shape: AnswerShape, prompt: PromptPart, logprobs: CompletionLogprobs
) -> tuple[str, Columns | None]:
    """Text and logprobs of an echoed prompt; nothing of it unless asked for."""
    if prompt.echo is None:
        return "", None
    if shape.num_logprobs is None:
        return prompt.echo.text, None
    return prompt.echo.text, logprobs.render_prompt(prompt, shape.num_logprobs)


def _append(columns: Columns, more: Columns) -> None:
    for name, values in more.items():
        columns.setdefault(name, []).extend(values)


def completion_body(
    head: AnswerHead, choices: Sequence[WholeChoice], usage: Usage, shape: AnswerShape
) -> dict[str, Any]:
    """The unstreamed answer."""
    return {
        **head.fields(),
        "choices": [_choice(index, choice, shape) for index, choice in enumerate(choices)],
        "usage": usage_body(usage),
    }


def _choice(index: int, choice: WholeChoice, shape: AnswerShape) -> dict[str, Any]:
    renderer = CompletionLogprobs(shape.texts)
    text, logprobs = "", None
    if shape.has_echo:
        text, logprobs = _echo(shape, shape.prompt_of(index), renderer)
    if shape.num_logprobs is not None:
        logprobs = logprobs or {}
        _append(logprobs, renderer.render(choice.token_ids, choice.logprobs))
    body: dict[str, Any] = {
        "index": index,
        "text": text + choice.text,
        "logprobs": logprobs,
        "finish_reason": choice.finish.value,
        **shape.prompt_members(index),
    }
    return body | {"token_ids": choice.token_ids} if shape.has_token_ids else body
