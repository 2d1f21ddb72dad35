"""A prompt in flight: what was submitted, what came back, and who waits for it.

A flight is one Submit (one prompt, n sequences). The session's reader appends what arrives
and wakes the consumer; the consumer reads at its own pace. What is buffered between the two is
token ids only, at most `max_tokens` per sequence, and they are kept anyway: they are what a
re-submit to another scheduler must name. So a slow client costs bounded memory and never
stalls a session. Must not know: the wire, text, HTTP. Entry points: `Flight`, `Inbox`.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from opentelemetry.trace import SpanContext

from octavo.cancel_reason import CancelReason
from octavo.errors import OctavoError
from octavo.telemetry import Value
from octavo_router.served_model import PromptHashes, ServedModel
from octavo_router.token_rules import NO_RULES, TokenRules


class Finish(Enum):
    """Why a sequence ended well; whatever else ends it is an error."""

    STOP = "stop"
    LENGTH = "length"


class TokenLogprob(NamedTuple):
    """Log-probabilities of one token; `top`: (id, logprob), best first. `rank`: 0 = likeliest."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int = 0


@dataclass(frozen=True, slots=True)
class ResolvedSampling:
    """Sampling parameters with nothing left open; fields as in common.proto.

    `bad_word_ids`: the rules' bad words, each way to spell one.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    logprobs: int | None
    min_tokens: int = 0
    prompt_logprobs: int | None = None
    rules: TokenRules = NO_RULES
    bad_word_ids: tuple[tuple[int, ...], ...] = ()


class PromptEcho(NamedTuple):
    """A prompt's text as an answer repeats it. `shows_special`: special tokens stand in it."""

    text: str
    shows_special: bool


class FlightTrace(Protocol):
    """Who keeps the trace of the request that a flight belongs to."""

    @property
    def context(self) -> SpanContext: ...

    def event(self, name: str, **attributes: Value) -> None: ...


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """One prompt to generate from.

    `token_ids`: [T] u32. `hash_salt` None = prefixes shared by all. `deadline`: on the event
    loop's clock, in seconds; None = none. `priority`: larger is served first. `echo`: set if the
    answer repeats the prompt. `trace`: set if the request is traced.
    """

    request_id: str
    token_ids: npt.NDArray[np.uint32]
    model: ServedModel
    hashes: PromptHashes
    hash_salt: str | None
    sampling: ResolvedSampling
    num_sequences: int
    tenant: str
    deadline: float | None
    priority: int = 0
    echo: PromptEcho | None = None
    trace: FlightTrace | None = None


class Inbox:
    """What a request's flights have for its one consumer: sequences with news, or an error.

    A wake-up before the wait is not lost.
    """

    __slots__ = ("_is_set", "_waiter", "changed", "error")

    def __init__(self) -> None:
        # Each sequence at most once, in order of its first unread news.
        self.changed: list[SequenceState] = []
        self.error: OctavoError | None = None
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        self._is_set = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self) -> None:
        """Return once `wake` was called since the last return."""
        if not self._is_set:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_set = False


class SequenceState:
    """What arrived of one sequence. `finish` is set once; no id arrives after it."""

    __slots__ = ("finish", "flight", "has_news", "index", "logprobs", "token_ids")

    def __init__(self, flight: "Flight", index: int) -> None:
        self.flight = flight
        self.index = index
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish: Finish | None = None
        self.has_news = False


class Carrier(Protocol):
    """Whatever carries a flight now (a session)."""

    def cancel(
        self, flight: "Flight", index: int | None, reason: CancelReason, num_kept: int
    ) -> None: ...


class Flight:
    """One prompt's sequences, from submit to the last finish.

    `inbox` is shared by the flights of a request. `is_over` is true when nothing more is wanted:
    all finished, failed or abandoned.
    """

    __slots__ = (
        "carrier",
        "handle",
        "inbox",
        "is_abandoned",
        "is_failed",
        "is_quiet",
        "lost_at",
        "lost_cell",
        "num_cached_tokens",
        "num_delivered_before",
        "num_owed_logprobs",
        "num_suspicions",
        "num_unfinished",
        "num_worker_suspicions",
        "order",
        "prompt_logprobs",
        "sequences",
        "tried_cells",
    )

    def __init__(
        self,
        order: PromptOrder,
        inbox: Inbox,
        *,
        is_quiet: bool = False,
    ) -> None:
        self.order = order
        self.inbox = inbox
        # Only the first ids and the end wake the consumer; it wants nothing between.
        self.is_quiet = is_quiet
        self.sequences = [SequenceState(self, i) for i in range(order.num_sequences)]
        self.num_unfinished = order.num_sequences
        # One per prompt token, None = not there (yet): the first has none. Empty if not asked.
        has_prompt_logprobs = order.sampling.prompt_logprobs is not None
        num_prompt_logprobs = len(order.token_ids) if has_prompt_logprobs else 0
        self.prompt_logprobs: list[TokenLogprob | None] = [None] * num_prompt_logprobs
        # The consumer hears nothing of the sequences before it can have all of these.
        self.num_owed_logprobs = max(num_prompt_logprobs - 1, 0)
        # None until a first row started: the prompt's hits, not raised by a later move.
        self.num_cached_tokens: int | None = None
        self.is_failed = False
        self.is_abandoned = False
        self.carrier: Carrier | None = None
        self.handle = 0
        # The cell that had it last, and was lost; "" = none yet.
        self.lost_cell = ""
        self.lost_at = 0.0
        # Ids delivered before the present carrier had it.
        self.num_delivered_before = 0
        # Schedulers that broke while they had given nothing of it.
        self.num_suspicions = 0
        # Workers that died as they began it, as its last scheduler told.
        self.num_worker_suspicions = 0
        self.tried_cells: set[str] = set()

    @property
    def is_over(self) -> bool:
        return self.is_abandoned or self.is_failed or self.num_unfinished == 0

    @property
    def num_delivered(self) -> int:
        """Ids of all sequences so far."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    def start(self, num_cached_tokens: int) -> None:
        """A sequence got its first row."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = num_cached_tokens
            self.inbox.wake()

    def deliver(self, index: int, token_ids: list[int]) -> None:
        """New ids of a sequence; dropped when the answer is complete already."""
        sequence = self.sequences[index]
        if sequence.finish is not None:
            return
        is_worth_waking = not self.is_quiet or not sequence.token_ids
        sequence.token_ids += token_ids
        if self.num_owed_logprobs:
            return
        if not sequence.has_news:
            sequence.has_news = True
            self.inbox.changed.append(sequence)
        if is_worth_waking:
            self.inbox.wake()

    def deliver_logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> None:
        """One entry per id of the `deliver` that follows."""
        sequence = self.sequences[index]
        if sequence.finish is None:
            sequence.logprobs += logprobs

    def deliver_prompt_logprobs(self, start: int, logprobs: Sequence[TokenLogprob]) -> None:
        """Entries of the prompt's tokens from `start` on; after a move the same come again."""
        end = start + len(logprobs)
        if start < 1 or end > len(self.prompt_logprobs):
            self.fail(OctavoError("the scheduler sent log-probabilities of no prompt token"))
            if self.carrier is not None:
                self.carrier.cancel(self, None, CancelReason.CLIENT, 0)
            return
        self.prompt_logprobs[start:end] = logprobs
        was_owed = self.num_owed_logprobs
        self.num_owed_logprobs = self.prompt_logprobs.count(None) - 1
        if was_owed and not self.num_owed_logprobs:
            self._tell_all()

    def finish(self, index: int, finish: Finish) -> None:
        """The scheduler ended a sequence."""
        sequence = self.sequences[index]
        if sequence.finish is not None:
            return
        sequence.finish = finish
        self.num_unfinished -= 1
        if not self.num_owed_logprobs:
            if not sequence.has_news:
                sequence.has_news = True
                self.inbox.changed.append(sequence)
            self.inbox.wake()
        elif not self.num_unfinished:
            # They will never come: the consumer finds out.
            self._tell_all()

    def _tell_all(self) -> None:
        for sequence in self.sequences:
            if (sequence.token_ids or sequence.finish is not None) and not sequence.has_news:
                sequence.has_news = True
                self.inbox.changed.append(sequence)
        self.inbox.wake()

    def fail(self, error: OctavoError) -> None:
        """The flight is lost, and its request with it; the first error counts."""
        if not self.is_over:
            self.is_failed = True
            self.inbox.error = self.inbox.error or error
            self.inbox.wake()

    def stop(self, index: int, num_kept: int) -> None:
        """The router found a stop string: the sequence keeps `num_kept` ids."""
        sequence = self.sequences[index]
        del sequence.token_ids[num_kept:]
        del sequence.logprobs[num_kept:]
        if sequence.finish is not None:
            sequence.finish = Finish.STOP
            return
        sequence.finish = Finish.STOP
        self.num_unfinished -= 1
        if self.carrier is not None:
            self.carrier.cancel(self, index, CancelReason.STOP, num_kept)

    def abandon(self, reason: CancelReason) -> None:
        """Nobody wants the rest."""
        if self.is_over:
            return
        self.is_abandoned = True
        if self.carrier is not None:
            self.carrier.cancel(self, None, reason, 0)
