"""A stream's frames, alike for both endpoints: what opens a choice, its text, its end.

Ids and log-probabilities of text that is still held back wait here for the frame that shows it.
Must not know: either endpoint's shapes, how bytes are sent. Entry point: `AnswerFrames`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from octavo_router.answers import AnswerShape, usage_body
from octavo_router.generation import Delta, Usage
from octavo_router.sse import FrameTemplate, dumps, members


class AnswerFrames(ABC):
    """Turns the deltas of one answer into frames; an endpoint says how a choice looks."""

    def __init__(self, template: FrameTemplate, shape: AnswerShape) -> None:
        self._template = template
        self._shape = shape
        self._is_plain = shape.is_plain
        self._is_open = [False] * shape.num_choices
        self._held_ids: list[list[int]] = [[] for _ in range(shape.num_choices)]

    @abstractmethod
    def _opening(self, index: int) -> bytes | None:
        """The frame before a choice's first text, if there is one."""

    @abstractmethod
    def _hold_logprobs(self, delta: Delta) -> None:
        """Keep a delta's log-probabilities until `_take_logprobs`."""

    @abstractmethod
    def _take_logprobs(self, index: int) -> dict[str, Any]:
        """`choices[].logprobs` of all that was held."""

    def delta(self, delta: Delta) -> Sequence[bytes]:
        """The frames that a delta gives: none while its text is held back."""
        index = delta.choice
        frames: list[bytes] = []
        if not self._is_open[index]:
            self._is_open[index] = True
            if (opening := self._opening(index)) is not None:
                frames.append(opening)
        if self._is_plain and delta.finish is None:
            if delta.text:
                frames.append(self._template.text(index, delta.text))
            return frames
        is_sent = bool(delta.text) or delta.finish is not None
        logprobs, more = self._beside(delta, is_sent=is_sent)
        if is_sent:
            finish = None if delta.finish is None else delta.finish.value
            frames.append(self._template.chunk(index, delta.text or None, logprobs, finish, more))
        return frames

    def _beside(self, delta: Delta, *, is_sent: bool) -> tuple[str, str]:
        """Logprobs and other members of the choice; held while there is no frame for them."""
        shape, index = self._shape, delta.choice
        logprobs, more = "null", ""
        if shape.num_logprobs is not None:
            self._hold_logprobs(delta)
            if is_sent:
                logprobs = dumps(self._take_logprobs(index))
        if shape.has_token_ids:
            self._held_ids[index] += delta.token_ids
            if is_sent:
                more = members({"token_ids": self._held_ids[index]})
                self._held_ids[index] = []
        return logprobs, more

    def end(self, usage: Usage) -> Sequence[bytes]:
        """What follows the last delta: the counts, if asked for."""
        return [self._template.usage(usage_body(usage))] if self._shape.has_usage else []
