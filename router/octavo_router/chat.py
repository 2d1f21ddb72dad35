"""/v1/chat/completions: its fields, its frames and its body.

Must not know: schedulers, how bytes are sent. Entry points: `parse_chat`, `ChatFrames`,
`chat_body`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import InvalidRequestError
from octavo.request_limits import MAX_ALTERNATIVES
from octavo_router.answers import AnswerHead, AnswerShape, WholeChoice, usage_body
from octavo_router.fields import MAX_INT32, Fields
from octavo_router.generation import Delta, Usage
from octavo_router.logprobs import chat_logprobs
from octavo_router.requests import RequestFields, RequestRules, parse_chat_prompt, parse_fields
from octavo_router.sse import FrameTemplate, dumps, members
from octavo_router.unsupported import COMPLETIONS_ONLY, refuse_unsupported


def parse_chat(body: Mapping[str, Any], rules: RequestRules) -> RequestFields:
    """A chat request's fields. Raises InvalidRequestError."""
    refuse_unsupported(body, COMPLETIONS_ONLY)
    raw = {**body, "logprobs": _num_logprobs(body), "max_tokens": _max_tokens(body)}
    return parse_fields(raw, (parse_chat_prompt(body, rules),), rules)


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    """`max_completion_tokens`, or its older name `max_tokens`; both only if equal."""
    fields = Fields(body)
    older = fields.integer("max_tokens", 1, MAX_INT32)
    newer = fields.integer("max_completion_tokens", 1, MAX_INT32)
    if older is not None and newer is not None and older != newer:
        raise InvalidRequestError(
            f"max_completion_tokens is {newer} but max_tokens is {older}: send one of them",
            param="max_completion_tokens",
        )
    return older if newer is None else newer


def _num_logprobs(body: Mapping[str, Any]) -> int | None:
    fields = Fields(body)
    is_wanted = fields.boolean("logprobs")
    num_top = fields.integer("top_logprobs", 0, MAX_ALTERNATIVES)
    if is_wanted:
        return num_top or 0
    if num_top:
        raise InvalidRequestError(
            f"top_logprobs is {num_top}, which needs logprobs to be true", param="top_logprobs"
        )
    return None


class ChatFrames:
    """A stream's frames: the role once per choice, then text, then the finish."""

    def __init__(self, head: AnswerHead, shape: AnswerShape) -> None:
        self._template = FrameTemplate(
            head.fields(),
            before_text='"delta":{"content":',
            after_text="}",
            empty='"delta":{}',
            num_choices=shape.num_choices,
            has_usage=shape.has_usage,
        )
        self._shape = shape
        self._is_plain = shape.is_plain
        self._is_open = [False] * shape.num_choices
        # Ids and logprobs whose text is still held back.
        self._held_ids: list[list[int]] = [[] for _ in range(shape.num_choices)]
        self._held_logprobs: list[list[dict[str, Any]]] = [[] for _ in range(shape.num_choices)]

    def delta(self, delta: Delta) -> Sequence[bytes]:
        index = delta.choice
        frames: list[bytes] = []
        if not self._is_open[index]:
            self._is_open[index] = True
            more = members(self._shape.prompt_members(index))
            part = '"delta":{"role":"assistant","content":""}'
            frames.append(self._template.raw(index, part, more))
        if self._is_plain and delta.finish is None:
            if delta.text:
                frames.append(self._template.text(index, delta.text))
            return frames
        logprobs, more = self._beside(delta)
        if delta.text or delta.finish is not None:
            finish = None if delta.finish is None else delta.finish.value
            text = delta.text or None
            frames.append(self._template.chunk(index, text, logprobs, finish, more))
        return frames

    def _beside(self, delta: Delta) -> tuple[str, str]:
        """Logprobs and other members of the choice; held while there is no frame for them."""
        shape, index = self._shape, delta.choice
        is_sent = bool(delta.text) or delta.finish is not None
        logprobs, more = "null", ""
        if shape.num_logprobs is not None:
            held = self._held_logprobs[index]
            held += chat_logprobs(shape.texts, delta.token_ids, delta.logprobs)
            if is_sent:
                self._held_logprobs[index] = []
                logprobs = dumps({"content": held, "refusal": None})
        if shape.has_token_ids:
            held_ids = self._held_ids[index]
            held_ids += delta.token_ids
            if is_sent:
                self._held_ids[index] = []
                more = members({"token_ids": held_ids})
        return logprobs, more

    def end(self, usage: Usage) -> Sequence[bytes]:
        return [self._template.usage(usage_body(usage))] if self._shape.has_usage else []


def chat_body(
    head: AnswerHead, choices: Sequence[WholeChoice], usage: Usage, shape: AnswerShape
) -> dict[str, Any]:
    """The unstreamed answer."""
    return {
        **head.fields(),
        "choices": [_choice(index, choice, shape) for index, choice in enumerate(choices)],
        "usage": usage_body(usage),
        **shape.prompt_members(0),
    }


def _choice(index: int, choice: WholeChoice, shape: AnswerShape) -> dict[str, Any]:
    logprobs: dict[str, Any] | None = None
    if shape.num_logprobs is not None:
        content = chat_logprobs(shape.texts, choice.token_ids, choice.logprobs)
        logprobs = {"content": content, "refusal": None}
    body: dict[str, Any] = {
        "index": index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": choice.finish.value,
    }
    return body | {"token_ids": choice.token_ids} if shape.has_token_ids else body
