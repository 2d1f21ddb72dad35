"""What the answers of both endpoints share: ids, usage, shape, and waiting for a whole answer.

Must not know: schedulers, protos. Entry points: `AnswerHead`, `AnswerShape`, `usage_body`,
`collect`, `ContinuousUsage`.
"""

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from starlette.types import Receive

from octavo_router.flights import Finish, TokenLogprob
from octavo_router.generation import Delta, Generation, Usage
from octavo_router.logprobs import TokenTexts, prompt_logprobs
from octavo_router.requests import RequestFields
from octavo_router.sse import NO_USAGE, Frames, cancel_on_disconnect, dumps
from octavo_router.tokenizer import Tokenizer


class AnswerHead(NamedTuple):
    """What every chunk of a stream, or the one body, says of the answer."""

    id: str
    object: str
    created: int
    model: str

    def fields(self) -> dict[str, Any]:
        return self._asdict()


def new_head(prefix: str, kind: str, model: str) -> AnswerHead:
    return AnswerHead(f"{prefix}-{secrets.token_hex(16)}", kind, int(time.time()), model)


class AnswerShape:
    """What an answer holds beside its text.

    `num_logprobs`, `num_prompt_logprobs`: alternatives; None = no log-probabilities at all.
    """

    def __init__(
        self,
        fields: RequestFields,
        generation: Generation,
        tokenizer: Tokenizer,
        *,
        has_usage: bool = False,
    ) -> None:
        options = fields.answer
        self.has_usage = has_usage
        self.num_logprobs = fields.sampling.logprobs
        self.num_prompt_logprobs = options.prompt_logprobs
        self.has_echo = options.echo
        self.has_token_ids = options.return_token_ids
        self.num_choices = generation.num_choices
        self.prompt_of = generation.prompt_of
        self._num_prompts = len(generation.flights)
        # The last prompt's: its choices follow one another, and they may be megabytes.
        self._prompt_members: tuple[int, dict[str, Any]] = (-1, {})
        self.texts = TokenTexts(
            tokenizer,
            skip_special_tokens=options.skip_special_tokens,
            hidden_ids=generation.hidden_ids,
        )

    @property
    def is_plain(self) -> bool:
        """Nothing stands beside the text."""
        return self.num_logprobs is None and not self.has_token_ids

    def prompt_members(self, choice: int) -> dict[str, Any]:
        """What was asked for of a choice's prompt: its ids, its log-probabilities."""
        prompt = choice * self._num_prompts // self.num_choices
        if self._prompt_members[0] != prompt:
            self._prompt_members = (prompt, self._members_of(choice))
        return self._prompt_members[1]

    def _members_of(self, choice: int) -> dict[str, Any]:
        members: dict[str, Any] = {}
        if self.has_token_ids:
            members["prompt_token_ids"] = self.prompt_of(choice).token_ids
        if self.num_prompt_logprobs is not None:
            members["prompt_logprobs"] = prompt_logprobs(
                self.texts, self.prompt_of(choice), self.num_prompt_logprobs
            )
        return members


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class ContinuousUsage:
    """Frames that say the counts so far, over all choices, in every chunk."""

    def __init__(self, frames: Frames, generation: Generation) -> None:
        self._frames = frames
        self._generation = generation
        self._num_tokens = 0

    def delta(self, delta: Delta) -> Sequence[bytes]:
        self._num_tokens += len(delta.token_ids)
        usage = self._generation.usage()._replace(completion_tokens=self._num_tokens)
        said = f'"usage":{dumps(usage_body(usage))}'.encode()
        # The head's comes first, and in a string the quotes would be escaped.
        return [frame.replace(NO_USAGE, said, 1) for frame in self._frames.delta(delta)]

    def end(self, usage: Usage) -> Sequence[bytes]:
        return self._frames.end(usage)


@dataclass(slots=True)
class WholeChoice:
    """A choice's deltas put together."""

    texts: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    finish: Finish = Finish.LENGTH

    @property
    def text(self) -> str:
        return "".join(self.texts)


async def collect(generation: Generation, receive: Receive) -> Sequence[WholeChoice]:
    """Wait for the whole answer; cancels it if the client leaves. Closes the generation.

    Raises OctavoError.
    """
    watcher = asyncio.create_task(cancel_on_disconnect(receive, generation))
    choices = [WholeChoice() for _ in range(generation.num_choices)]
    try:
        while not generation.is_finished:
            for delta in await generation.news():
                choice = choices[delta.choice]
                choice.texts.append(delta.text)
                choice.token_ids += delta.token_ids
                choice.logprobs += delta.logprobs
                if delta.finish is not None:
                    choice.finish = delta.finish
    finally:
        watcher.cancel()
        generation.close()
    return choices
