"""How much longer than expected waits turn out: what a bound on them has to leave room for.

What comes later can't be known: others' arrivals that pass, answers of another length, steps that
take longer than they did. With a bound on the expected wait alone, half of those that are let in
just below it wait longer than it says. So the errors of waits that ended lately are kept, and the
margin is what nearly all of them stayed within.

Must not know: sequences, queues, clocks. Entry point: `Margin`.
"""

from math import ceil, exp

# Errors beyond the margin, of all: errors come in bunches, so that 99 % of the waits are within it
# in the worse of the times too.
_BEYOND = 0.005
# Old errors count less: by 1 / e each so many seconds.
_MEMORY_S = 120.0
# The least share of the bound that is kept until so many seconds of long waits were seen lately:
# those of one moment err alike, however many they are. A quarter is what expectations were short by
# wherever it was measured.
_FIRST_SHARE, _ENOUGH_S = 0.25, 60.0
# Between two errors, no more of the time was seen.
_LONGEST_GAP_S = 1.0
# What can't be foreseen better than this is no reason to leave workers without a queue.
_MOST_SHARE = 0.5
_NUM_BINS = 64


class Margin:
    """The margin under a bound, learned from errors; all in seconds of the caller's clock."""

    def __init__(self, bound_s: float) -> None:
        self._bin_s = _MOST_SHARE * bound_s / _NUM_BINS
        # Of errors in (i - 1, i] times `_bin_s`: the first are none, the last all larger ones.
        self._weights = [0.0] * (_NUM_BINS + 1)
        self._seen_s = 0.0
        self._changed_at = 0.0
        self._first_s = _FIRST_SHARE * bound_s
        self.seconds = self._first_s

    def add(self, now: float, error_s: float) -> None:
        """A wait ended that was so much longer than expected, or shorter if negative."""
        passed_s, self._changed_at = now - self._changed_at, now
        kept = exp(-passed_s / _MEMORY_S)
        self._seen_s = kept * self._seen_s + min(passed_s, _LONGEST_GAP_S)
        self._weights = [kept * weight for weight in self._weights]
        self._weights[min(max(ceil(error_s / self._bin_s), 0), _NUM_BINS)] += 1.0
        learned_s = self._bin_s * self._bin_within()
        is_enough = self._seen_s >= _ENOUGH_S
        self.seconds = learned_s if is_enough else max(learned_s, self._first_s)

    def _bin_within(self) -> int:
        """The lowest bin beyond which lie at most `_BEYOND` of the errors."""
        allowed = _BEYOND * sum(self._weights)
        for i in range(_NUM_BINS, 0, -1):
            allowed -= self._weights[i]
            if allowed < 0.0:
                return i
        return 0
