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

from octavo.errors import OctavoError
from octavo_router.served_model import PromptHashes, ServedModel


class Finish(Enum):
    """Why a sequence ended well; whatever else ends it is an error."""

    STOP = "stop"
    LENGTH = "length"


class CancelReason(Enum):
    """Why the router gives up on a sequence."""

    CLIENT = "client"
    STOP = "stop"
    DEADLINE = "deadline"


class TokenLogprob(NamedTuple):
    """Log-probabilities of one generated token; `top`: (id, logprob), best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class ResolvedSampling:
    """Sampling parameters with nothing left open; fields as in common.proto."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    logprobs: int | None


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """One prompt to generate from.

    `token_ids`: [T] u32. `hash_tenant` None = prefixes shared by all tenants. `deadline`: on the
    event loop's clock, in seconds; None = none.
    """

    request_id: str
    token_ids: npt.NDArray[np.uint32]
    model: ServedModel
    hashes: PromptHashes
    hash_tenant: str | None
    sampling: ResolvedSampling
    num_sequences: int
    tenant: str
    deadline: float | None


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
        "num_cached_tokens",
        "num_moves",
        "num_unfinished",
        "order",
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
        # None until a first row started: the prompt's hits, not raised by a later move.
        self.num_cached_tokens: int | None = None
        self.is_failed = False
        self.is_abandoned = False
        self.carrier: Carrier | None = None
        self.handle = 0
        self.num_moves = 0
        self.tried_cells: set[str] = set()

    @property
    def is_over(self) -> bool:
        return self.is_abandoned or self.is_failed or self.num_unfinished == 0

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

    def finish(self, index: int, finish: Finish) -> None:
        """The scheduler ended a sequence."""
        sequence = self.sequences[index]
        if sequence.finish is not None:
            return
        sequence.finish = finish
        self.num_unfinished -= 1
        if not sequence.has_news:
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
