"""What the answers of both endpoints share: ids, usage, and waiting for a whole answer.

Must not know: schedulers, protos. Entry points: `AnswerHead`, `usage_body`, `collect`.
"""

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from starlette.types import Receive

from octavo_router.flights import Finish, TokenLogprob
from octavo_router.generation import Generation, Usage
from octavo_router.sse import cancel_on_disconnect


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


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


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
