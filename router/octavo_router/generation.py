"""The answer to a request while it is made: ids of all its sequences to text.

Each choice has its own detokenizer, which also finds stop strings; what lies past a stop is cut
from text, ids, logprobs and counts alike, and the scheduler is told. The ending id (EOS, a stop
id) is counted and listed but shown only if the request says that stops are included (and then
as the decoder shows it: a special one only if special tokens are). Must not know: HTTP, protos,
schedulers. Entry points: `Generation.news`, `Generation.prompt_of`, `Generation.wait_admitted`,
`Generation.close`.
"""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from octavo.cancel_reason import CancelReason
from octavo.errors import CancelledError, DeadlineError, OctavoError
from octavo_router.answer_options import DEFAULT_OPTIONS, AnswerOptions
from octavo_router.detokenizer import Detokenizer
from octavo_router.flights import Finish, Flight, Inbox, PromptEcho, SequenceState, TokenLogprob
from octavo_router.meter import Charge
from octavo_router.outcomes import RequestRecord
from octavo_router.stop_strings import StopStrings
from octavo_router.tokenizer import Tokenizer

# Ids turned into text before others get the event loop: about half a millisecond.
MAX_IDS_PER_TURN = 4096
_NEAR_S = 0.05


class Delta(NamedTuple):
    """What is new of one choice.

    `choice`: its index. `logprobs`: one per id of `token_ids`, empty if not asked for.
    `finish`: set once, last.
    """

    choice: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob]
    finish: Finish | None


class Usage(NamedTuple):
    """Token counts over all choices; the prompt counts once however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class PromptPart(NamedTuple):
    """What an answer may say of its prompt. `echo` None = not asked for. `logprobs`: one per id
    of `token_ids`, None for the first; empty if not asked for."""

    token_ids: Sequence[int]
    echo: PromptEcho | None
    logprobs: Sequence[TokenLogprob | None]


class Choice:
    """One choice: a sequence, its detokenizer and how far the client has it.

    `hidden_ids`: an id of these ends the sequence and isn't shown.
    """

    __slots__ = (
        "_detokenizer",
        "_hidden_ids",
        "_num_hidden",
        "_num_read",
        "_num_sent",
        "index",
        "sequence",
    )

    def __init__(
        self,
        index: int,
        sequence: SequenceState,
        detokenizer: Detokenizer,
        hidden_ids: frozenset[int],
    ) -> None:
        self.index = index
        self.sequence = sequence
        self._detokenizer = detokenizer
        self._hidden_ids = hidden_ids
        self._num_read = 0
        self._num_sent = 0
        # 1 once the ending id came: it may come before the finish that it causes.
        self._num_hidden = 0

    def advance(self) -> Delta:
        """Turn the unread ids into text."""
        sequence = self.sequence
        token_ids = sequence.token_ids
        new = token_ids[self._num_read :] if self._num_read else token_ids[:]
        if new and new[-1] in self._hidden_ids:
            new.pop()
            self._num_hidden = 1
        self._num_read = len(token_ids)
        text, num_tokens, matched = self._detokenizer.push(new)
        if matched is None and sequence.finish is not None:
            tail = self._detokenizer.finish()
            text += tail.text
            num_tokens, matched = tail.num_tokens, tail.matched_stop
        if matched is not None:
            sequence.flight.stop(sequence.index, num_tokens)
        elif sequence.finish is not None:
            num_tokens += self._num_hidden
        start, self._num_sent = self._num_sent, num_tokens
        return Delta(
            self.index,
            text,
            sequence.token_ids[start:num_tokens],
            sequence.logprobs[start:num_tokens],
            sequence.finish,
        )


class ScoringChoice(Choice):
    """Only the prompt was to be scored: the one id that was drawn for it is dropped."""

    __slots__ = ()

    def advance(self) -> Delta:
        sequence = self.sequence
        sequence.token_ids.clear()
        sequence.logprobs.clear()
        if sequence.finish is not None:
            sequence.finish = Finish.LENGTH
        return Delta(self.index, "", (), (), sequence.finish)


class Generation:
    """All choices of a request, prompt-major: choice = prompt * n + sequence.

    `is_scoring`: no tokens were asked for. `charge`: settled at the end. `hidden_ids`: ids that end
    a choice and aren't shown.
    """

    def __init__(
        self,
        flights: Sequence[Flight],
        inbox: Inbox,
        tokenizer: Tokenizer,
        stop: tuple[str, ...],
        record: RequestRecord,
        deadline: float | None,
        *,
        options: AnswerOptions = DEFAULT_OPTIONS,
        is_scoring: bool = False,
        charge: Charge | None = None,
    ) -> None:
        self.flights = flights
        self._inbox = inbox
        self._record = record
        self._charge = charge
        sequences = [sequence for flight in flights for sequence in flight.sequences]
        sampling = flights[0].order.sampling
        self.hidden_ids = frozenset(() if options.include_stop else sampling.stop_token_ids)
        stops = StopStrings(stop) if stop else ()
        kind = ScoringChoice if is_scoring else Choice
        self._choices = {
            sequence: kind(
                index,
                sequence,
                Detokenizer(
                    tokenizer,
                    stop=stops,
                    skip_special_tokens=options.skip_special_tokens,
                    include_stop=options.include_stop,
                    min_tokens=sampling.min_tokens,
                ),
                self.hidden_ids,
            )
            for index, sequence in enumerate(sequences)
        }
        self._num_unfinished = len(sequences)
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._deadline = deadline
        self._timer: asyncio.TimerHandle | None = None
        if deadline is not None:
            self._timer = self._loop.call_at(deadline, self._expire)

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    @property
    def is_finished(self) -> bool:
        """Every choice's finish was handed out."""
        return self._num_unfinished == 0

    def prompt_of(self, choice: int) -> PromptPart:
        """What is known of a choice's prompt, complete once the choice has its first news.

        Raises OctavoError if the scheduler owes log-probabilities.
        """
        flight = self.flights[choice * len(self.flights) // len(self._choices)]
        if None in flight.prompt_logprobs[1:]:
            raise OctavoError("the scheduler left out log-probabilities of the prompt")
        order = flight.order
        return PromptPart(order.token_ids.tolist(), order.echo, flight.prompt_logprobs)

    def nudge(self) -> None:
        """Make a waiting `news` return, with nothing if there is nothing."""
        self._inbox.wake()

    def cancel(self) -> None:
        """The client left: stop the work, and let `news` raise."""
        self._abort(CancelledError("the client left"), CancelReason.CLIENT)

    def _expire(self) -> None:
        self._abort(
            DeadlineError("the request's deadline passed; raise it or ask for less"),
            CancelReason.DEADLINE,
        )

    def _abort(self, error: OctavoError, reason: CancelReason) -> None:
        if self._inbox.error is None and not self._is_closed:
            self._inbox.error = error
            self._record.fail(error)
            self._abandon(reason)
            self._inbox.wake()

    def _abandon(self, reason: CancelReason) -> None:
        for flight in self.flights:
            flight.abandon(reason)

    async def wait_admitted(self, timeout_s: float) -> bool:
        """Return when every prompt got a row or one has news; False if none came in that time.

        Raises OctavoError if one was refused: a refusal becomes an HTTP status as long as headers
        can wait.
        """
        is_admitted = False
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if self._inbox.error is not None:
                        self._raise_lost(self._inbox.error)
                    has_rows = all(f.num_cached_tokens is not None for f in self.flights)
                    if has_rows or self._inbox.changed:
                        is_admitted = True
                        break
                    await self._inbox.wait()
        except TimeoutError:
            pass
        self._inbox.wake()
        return is_admitted

    async def news(self) -> list[Delta]:
        """Wait, then what is new of each choice. Raises OctavoError when the request is lost."""
        await self._inbox.wait()
        inbox = self._inbox
        if inbox.error is not None:
            self._raise_lost(inbox.error)
        if not inbox.changed:
            return []
        changed, inbox.changed = inbox.changed, []
        num_tokens = 0
        deltas: list[Delta] = []
        for position, sequence in enumerate(changed):
            if num_tokens >= MAX_IDS_PER_TURN:
                inbox.changed[:0] = changed[position:]
                inbox.wake()
                await asyncio.sleep(0)
                break
            sequence.has_news = False
            delta = self._choices[sequence].advance()
            num_tokens += len(delta.token_ids)
            if delta.finish is not None:
                self._num_unfinished -= 1
            deltas.append(delta)
        self._record.tokens(num_tokens, len(deltas))
        if self.is_finished:
            self._record.cached(self.usage().cached_tokens)
            self._record.finish([s.finish for s in self._choices if s.finish is not None])
        return deltas

    def _raise_lost(self, error: OctavoError) -> NoReturn:
        self._record.fail(error)
        self._abandon(CancelReason.CLIENT)
        raise error

    def usage(self) -> Usage:
        """Counts so far; final once `is_finished`."""
        return Usage(
            sum(len(flight.order.token_ids) for flight in self.flights),
            sum(len(sequence.token_ids) for sequence in self._choices),
            sum(flight.num_cached_tokens or 0 for flight in self.flights),
        )

    def _num_used_tokens(self) -> int:
        """Prompts that got a row, and all that was generated."""
        prompts = (f.order.token_ids for f in self.flights if f.num_cached_tokens is not None)
        return sum(map(len, prompts)) + self.usage().completion_tokens

    def close(self) -> None:
        """Nobody will ask again. What still runs is cancelled; safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._charge is not None:
            self._charge.settle(self._num_used_tokens())
        if not self.is_finished:
            # A gRPC client that reached its deadline may be gone before the timer fires.
            is_late = self._deadline is not None and self._deadline - self._loop.time() < _NEAR_S
            self._abandon(CancelReason.DEADLINE if is_late else CancelReason.CLIENT)
            self._record.end("deadline" if is_late else "cancelled")
