"""/v1/completions: its fields, its frames and its body.

Must not know: schedulers, how bytes are sent. Entry points: `parse_completion`,
`CompletionFrames`, `completion_body`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from octavo_router.answers import AnswerHead, WholeChoice, usage_body
from octavo_router.generation import Delta, Usage
from octavo_router.generation_defaults import GenerationDefaults
from octavo_router.logprobs import CompletionLogprobs
from octavo_router.params import SamplingOptions as Options
from octavo_router.params import parse_sampling
from octavo_router.requests import Prompt, parse_prompts
from octavo_router.sse import FrameTemplate, dumps
from octavo_router.tokenizer import Tokenizer
from octavo_router.unsupported import refuse_unsupported

DEFAULT_MAX_TOKENS = 16


def parse_completion(
    body: Mapping[str, Any], defaults: GenerationDefaults, vocab_size: int
) -> tuple[tuple[Prompt, ...], Options]:
    """Prompts and options of a completion request. Raises InvalidRequestError."""
    refuse_unsupported(body)
    options = parse_sampling(body, defaults, vocab_size)
    return parse_prompts(body.get("prompt"), vocab_size), options


class CompletionFrames:
    """A stream's frames: text, then the finish."""

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
            before_text='"text":',
            after_text="",
            empty='"text":""',
            num_choices=num_choices,
            has_usage=has_usage,
        )
        self._has_usage = has_usage
        self._logprobs = (
            [CompletionLogprobs(tokenizer) for _ in range(num_choices)] if has_logprobs else []
        )
        # Logprobs of ids whose text is still held back.
        self._pending: list[dict[str, list[Any]]] = [{} for _ in range(num_choices)]

    def delta(self, delta: Delta) -> Sequence[bytes]:
        index = delta.choice
        if not self._logprobs and delta.finish is None:
            return [self._template.text(index, delta.text)] if delta.text else []
        logprobs = "null"
        if self._logprobs:
            pending = self._pending[index]
            rendered = self._logprobs[index].render(delta.token_ids, delta.logprobs)
            for name, values in rendered.items():
                pending.setdefault(name, []).extend(values)
            if delta.finish is None and not delta.text:
                return []
            self._pending[index] = {}
            logprobs = dumps(pending)
        finish = None if delta.finish is None else delta.finish.value
        return [self._template.chunk(index, delta.text, logprobs, finish)]

    def end(self, usage: Usage) -> Sequence[bytes]:
        return [self._template.usage(usage_body(usage))] if self._has_usage else []


def completion_body(
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
                "text": choice.text,
                "logprobs": CompletionLogprobs(tokenizer).render(choice.token_ids, choice.logprobs)
                if has_logprobs
                else None,
                "finish_reason": choice.finish.value,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": usage_body(usage),
    }
