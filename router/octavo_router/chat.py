"""/v1/chat/completions: its fields, its frames and its body.

Must not know: schedulers, how bytes are sent. Entry points: `parse_chat`, `ChatFrames`,
`chat_body`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import InvalidRequestError
from octavo_router.answers import AnswerHead, WholeChoice, usage_body
from octavo_router.generation import Delta, Usage
from octavo_router.generation_defaults import GenerationDefaults
from octavo_router.logprobs import chat_logprobs
from octavo_router.params import MAX_INT32, MAX_LOGPROBS, Fields, parse_sampling
from octavo_router.params import SamplingOptions as Options
from octavo_router.requests import Prompt, parse_messages
from octavo_router.sse import FrameTemplate, dumps
from octavo_router.tokenizer import Tokenizer
from octavo_router.unsupported import refuse_unsupported


def parse_chat(
    body: Mapping[str, Any], defaults: GenerationDefaults, vocab_size: int
) -> tuple[tuple[Prompt, ...], Options]:
    """The one prompt and options of a chat request. Raises InvalidRequestError."""
    refuse_unsupported(body)
    sampling = {**body, "logprobs": _num_logprobs(body), "max_tokens": _max_tokens(body)}
    options = parse_sampling(sampling, defaults, vocab_size)
    return (parse_messages(body.get("messages")),), options


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
    num_top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if is_wanted:
        return num_top or 0
    if num_top:
        raise InvalidRequestError(
            f"top_logprobs is {num_top}, which needs logprobs to be true", param="top_logprobs"
        )
    return None


class ChatFrames:
    """A stream's frames: the role once per choice, then text, then the finish."""

    def __init__(
        self,
        head: AnswerHead,
        num_choices: int,
        tokenizer: Tokenizer,
        *,
        has_usage: bool,
        has_logprobs: bool,
    ) -> None:
        self._template = FrameTemplate(
            head.fields(),
            before_text='"delta":{"content":',
            after_text="}",
            empty='"delta":{}',
            num_choices=num_choices,
            has_usage=has_usage,
        )
        self._tokenizer = tokenizer
        self._has_usage = has_usage
        self._has_logprobs = has_logprobs
        self._is_open = [False] * num_choices
        # Logprobs of ids whose text is still held back.
        self._pending: list[list[dict[str, Any]]] = [[] for _ in range(num_choices)]

    def delta(self, delta: Delta) -> Sequence[bytes]:
        index = delta.choice
        frames: list[bytes] = []
        if not self._is_open[index]:
            self._is_open[index] = True
            frames.append(self._template.raw(index, '"delta":{"role":"assistant","content":""}'))
        if self._has_logprobs:
            self._pending[index] += chat_logprobs(self._tokenizer, delta.token_ids, delta.logprobs)
        if delta.finish is None and not delta.text:
            return frames
        if delta.finish is None and not self._has_logprobs:
            frames.append(self._template.text(index, delta.text))
            return frames
        finish = None if delta.finish is None else delta.finish.value
        frames.append(
            self._template.chunk(index, delta.text or None, self._take_logprobs(index), finish)
        )
        return frames

    def _take_logprobs(self, index: int) -> str:
        if not self._has_logprobs:
            return "null"
        content, self._pending[index] = self._pending[index], []
        return dumps({"content": content, "refusal": None})

    def end(self, usage: Usage) -> Sequence[bytes]:
        return [self._template.usage(usage_body(usage))] if self._has_usage else []


def chat_body(
    head: AnswerHead,
    choices: Sequence[WholeChoice],
    usage: Usage,
    tokenizer: Tokenizer,
    *,
    has_logprobs: bool,
) -> dict[str, Any]:
    """The unstreamed answer."""
    return {
        **head.fields(),
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": {
                    "content": chat_logprobs(tokenizer, choice.token_ids, choice.logprobs),
                    "refusal": None,
                }
                if has_logprobs
                else None,
                "finish_reason": choice.finish.value,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": usage_body(usage),
    }
