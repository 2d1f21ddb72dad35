"""/v1/completions: its fields, its frames and its body.

Must not know: schedulers, how bytes are sent. Entry points: `parse_completion`,
`CompletionFrames`, `completion_choice`.
"""

from collections.abc import Mapping
from typing import Any

from octavo_router.answer_frames import AnswerFrames
from octavo_router.answers import AnswerHead, AnswerShape, WholeChoice
from octavo_router.generation import Delta, PromptPart
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


class CompletionFrames(AnswerFrames):
    """A stream's frames: an echo of the prompt if asked for, text, then the finish."""

    def __init__(self, head: AnswerHead, shape: AnswerShape) -> None:
        template = FrameTemplate(
            head.fields(),
            before_text='"text":',
            after_text="",
            empty='"text":""',
            num_choices=shape.num_choices,
            has_usage=shape.has_usage,
        )
        super().__init__(template, shape)
        self._logprobs = [CompletionLogprobs(shape.texts) for _ in range(shape.num_choices)]
        self._held: list[Columns] = [{} for _ in range(shape.num_choices)]

    def _opening(self, index: int) -> bytes | None:
        """The prompt's part of a choice."""
        shape = self._shape
        if not (shape.has_echo or shape.has_token_ids):
            return None
        text, logprobs = _echo(shape, shape.prompt_of(index), self._logprobs[index])
        more = members(shape.prompt_members(index))
        if shape.has_token_ids:
            more += members({"token_ids": []})
        said = "null" if logprobs is None else dumps(logprobs)
        return self._template.chunk(index, text, said, more=more)

    def _hold_logprobs(self, delta: Delta) -> None:
        rendered = self._logprobs[delta.choice].render(delta.token_ids, delta.logprobs)
        _append(self._held[delta.choice], rendered)

    def _take_logprobs(self, index: int) -> dict[str, Any]:
        columns, self._held[index] = self._held[index], {}
        return columns


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


def completion_choice(index: int, choice: WholeChoice, shape: AnswerShape) -> dict[str, Any]:
    """One of the unstreamed answer."""
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
