"""What is sent to a server and when: lengths, arrivals, prompts; the same for the same seed.

No I/O. Read first: `make_load`. Must not know: HTTP, servers.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from octavo.cli.serve_trace import TRACE_BLOCK_TOKENS, TraceEntry
from octavo.errors import ConfigurationError

# Common words: about one token each in any vocabulary.
_COMMON = """
    the of and to in is you that it he was for on are as with his they at be this have from or
    one had by word but not what all were we when your can said there use an each which she do
    how their if will up other about out many then them these so some her would make like him
    into time has look two more write go see number no way could people my than first water
    been call who oil its now find long down day did get come made may part
"""
WORDS = tuple(_COMMON.split())
FIRST_ID = 10


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts: always in [low, high], around `mean` if `stddev` is set."""

    low: int
    high: int
    mean: float = 0.0
    stddev: float = 0.0

    def draw(self, source: random.Random) -> int:
        if self.stddev:
            drawn = round(source.gauss(self.mean, self.stddev))
            return min(max(drawn, self.low), self.high)
        return self.low if self.low == self.high else source.randint(self.low, self.high)


def parse_lengths(flag: str, text: str) -> Lengths:
    """`N`, `LOW:HIGH` (uniform), or `MEAN~STDDEV` (normal, cut to 1 .. mean + 4 stddev).

    Raises ConfigurationError naming `flag`.
    """
    try:
        if "~" in text:
            mean, stddev = (float(part) for part in text.split("~"))
            lengths = Lengths(1, round(mean + 4 * stddev), mean, stddev)
            is_sound = mean >= 1 and stddev > 0
        else:
            ends = [int(part) for part in text.split(":")]
            lengths = Lengths(ends[0], ends[-1])
            is_sound = len(ends) <= 2 and 1 <= lengths.low <= lengths.high
    except (ValueError, OverflowError):
        is_sound, lengths = False, Lengths(1, 1)
    if not is_sound:
        raise ConfigurationError(f"{flag} {text!r}: must be N, LOW:HIGH or MEAN~STDDEV, at least 1")
    return lengths


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to come. `due_s`: seconds after the start; None = when a client is free."""

    index: int
    due_s: float | None
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...] = ()


def make_load(
    num_requests: int | None, prompt: Lengths, output: Lengths, rate: float | None, seed: int
) -> Iterator[Arrival]:
    """`num_requests` (None: endless) with drawn lengths: a Poisson process of `rate` per second
    (infinite = all at once), or without times for clients that wait for answers (None)."""
    lengths = random.Random(seed)
    # Apart, so that the same requests come at another rate.
    times = random.Random(seed + 1)
    due_s = 0.0
    for index in itertools.count() if num_requests is None else range(num_requests):
        if rate is not None and rate != float("inf"):
            due_s += times.expovariate(rate)
        at = None if rate is None else due_s
        yield Arrival(index, at, prompt.draw(lengths), output.draw(lengths))


def trace_load(entries: Sequence[TraceEntry]) -> list[Arrival]:
    """The trace's requests at their times."""
    return [
        Arrival(index, e.arrival_s, e.num_prompt_tokens, e.num_output_tokens, e.block_ids)
        for index, e in enumerate(entries)
    ]


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Prompts of a given count of tokens: random ids, or words where a server takes no ids.

    `tokens_per_word` and `extra_tokens` (a chat template's) say how a server counts words.
    """

    seed: int
    is_words: bool
    vocab_size: int
    tokens_per_word: float = 1.0
    extra_tokens: float = 0.0

    def prompt(self, arrival: Arrival) -> list[int] | str:
        """The same at every call; no two requests share a beginning, unless a trace says so."""
        items: list[int] = []
        if self.is_words:
            num_items = round(
                (arrival.num_prompt_tokens - self.extra_tokens) / self.tokens_per_word
            )
            block_items = round(TRACE_BLOCK_TOKENS / self.tokens_per_word)
        else:
            num_items, block_items = arrival.num_prompt_tokens, TRACE_BLOCK_TOKENS
        num_items = max(1, num_items)
        for block_id in arrival.block_ids:
            items += self._items(f"{self.seed}/block/{block_id}", block_items)
        if len(items) < num_items:
            items += self._items(f"{self.seed}/{arrival.index}", num_items - len(items))
        items = items[:num_items]
        return " ".join(WORDS[item] for item in items) if self.is_words else items

    def _items(self, seed: str, count: int) -> list[int]:
        source = random.Random(seed)
        if self.is_words:
            return source.choices(range(len(WORDS)), k=count)
        return source.choices(range(FIRST_ID, self.vocab_size), k=count)
