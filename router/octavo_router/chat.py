"""/v1/chat/completions: its fields, its frames and its body.

Must not know: schedulers, how bytes are sent. Entry points: `parse_chat`, `ChatFrames`,
`chat_choice`, `chat_prompt`.
"""

from collections.abc import Mapping
from typing import Any

from octavo.errors import InvalidRequestError
from octavo.request_limits import MAX_ALTERNATIVES
from octavo_router.answer_frames import AnswerFrames
from octavo_router.answers import AnswerHead, AnswerShape, WholeChoice
from octavo_router.fields import MAX_INT32, Fields
from octavo_router.generation import Delta
from octavo_router.logprobs import chat_logprobs
from octavo_router.requests import RequestFields, RequestRules, parse_chat_prompt, parse_fields
from octavo_router.sse import FrameTemplate, members
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


class ChatFrames(AnswerFrames):
    """A stream's frames: the role once per choice, then text, then the finish."""

    def __init__(self, head: AnswerHead, shape: AnswerShape) -> None:
        template = FrameTemplate(
            head.fields(),
            before_text='"delta":{"content":',
            after_text="}",
            empty='"delta":{}',
            num_choices=shape.num_choices,
            has_usage=shape.has_usage,
        )
        super().__init__(template, shape)
        self._held: list[list[dict[str, Any]]] = [[] for _ in range(shape.num_choices)]

    def _opening(self, index: int) -> bytes:
        more = members(self._shape.prompt_members(index))
        return self._template.raw(index, '"delta":{"role":"assistant","content":""}', more)

    def _hold_logprobs(self, delta: Delta) -> None:
        self._held[delta.choice] += chat_logprobs(
            self._shape.texts, delta.token_ids, delta.logprobs
        )

    def _take_logprobs(self, index: int) -> dict[str, Any]:
        content, self._held[index] = self._held[index], []
        return {"content": content, "refusal": None}


def chat_prompt(shape: AnswerShape) -> dict[str, Any]:
    """What the unstreamed answer says of the prompt, which all choices share."""
    return shape.prompt_members(0)


def chat_choice(index: int, choice: WholeChoice, shape: AnswerShape) -> dict[str, Any]:
    """One of the unstreamed answer."""
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
