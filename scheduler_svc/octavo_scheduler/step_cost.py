"""What steps cost on a worker, learned from the times that it reports.

A decode step's time is a line over its rows. A chunk beside decode rows adds a time for each token
and, for attention, one for each pair of a token and a token before it: late chunks of a long
prompt take longer than first ones of the same length. Both are fitted to recent steps (least
squares, older ones counting ever less), so that models, cards and lengths need no table.

Must not know: policies, sequences, time. Entry point: `StepCost`.
"""

from typing import NamedTuple

_SMOOTHING = 0.1
# What the line says of other numbers of rows is trusted up to this factor of their mean.
_FARTHEST = 2.0


class ChunkWork(NamedTuple):
    """A step's chunks together: their tokens, and each with the tokens before it in its row."""

    num_tokens: int = 0
    num_pairs: float = 0.0

    @staticmethod
    def of(start: int, length: int) -> "ChunkWork":
        """Tokens [start, start + length) of one row."""
        return ChunkWork(length, length * (start + length / 2))

    def plus(self, other: "ChunkWork") -> "ChunkWork":
        return ChunkWork(self.num_tokens + other.num_tokens, self.num_pairs + other.num_pairs)


NO_CHUNKS = ChunkWork()


class StepCost:
    """Measured step times: a decode step's, and what chunks add (0 = unknown).

    `prefill_token_s`, of all steps with chunks, is their time over their tokens, so that large
    chunks count for more: a short one costs a step's fixed time and says little about a token.
    """

    def __init__(self) -> None:
        self.decode_s = 0.0
        self._usual = _Quantile()
        self._line = _Line()
        self._beside = _ChunkFit()
        self._chunks_s = 0.0
        self._chunk_tokens = 0.0

    @property
    def prefill_token_s(self) -> float:
        return self._chunks_s / self._chunk_tokens if self._chunk_tokens else 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        return 1.0 / self.prefill_token_s if self.prefill_token_s else 0.0

    @property
    def row_s(self) -> float:
        """What each decoding row adds to a step's time; 0 = unknown, or nothing."""
        return self._line.slope

    @property
    def usual_s(self) -> float:
        """What streams are used to: most steps beside them lately took this long or longer."""
        return self._usual.value

    def observe(self, step_s: float, num_decoding: int, chunks: ChunkWork = NO_CHUNKS) -> None:
        """A step that decoded `num_decoding` rows and computed `chunks` was measured."""
        if step_s <= 0.0 or not (num_decoding or chunks.num_tokens):
            return
        if num_decoding:
            self._usual.add(step_s)
        if not chunks.num_tokens:
            self.decode_s = _smooth(self.decode_s, step_s)
            self._line.add(num_decoding, step_s)
            return
        decode_s = self.decode_step_s(num_decoding) if num_decoding else self.decode_s
        extra_s = max(step_s - decode_s, 0.1 * step_s)
        self._chunks_s = (1 - _SMOOTHING) * self._chunks_s + extra_s
        self._chunk_tokens = (1 - _SMOOTHING) * self._chunk_tokens + chunks.num_tokens
        if num_decoding:
            self._beside.add(chunks, extra_s)

    def decode_step_s(self, num_decoding: int) -> float:
        """Expected time of a decode step of so many rows."""
        mean_s = self._line.mean
        expected_s = self._line.at(num_decoding)
        return min(max(expected_s, mean_s / _FARTHEST), mean_s * _FARTHEST)

    def chunk_tokens_within(self, extra_s: float, num_context: int) -> int | None:
        """Tokens after `num_context` others that add at most `extra_s` to a decode step.

        None: no chunk was measured yet.
        """
        token_s, pair_s = self._beside.fit() or (self.prefill_token_s, 0.0)
        if not token_s:
            return None
        # Each token's own pairs grow with the chunk; the first guess is without them.
        guess = extra_s / (token_s + pair_s * num_context)
        return max(0, int(extra_s / (token_s + pair_s * (num_context + guess / 2))))


class _Quantile:
    """Follows a quantile below the median in small steps: seconds of steps move it.

    Values of two kinds, decode steps and longer ones with chunks, have it among the longer ones
    only while these are a clear majority, so that the median is theirs as well.
    """

    _SHARE = 0.35
    _STEP = 0.006

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, value: float) -> None:
        if not self.value:
            self.value = value
        elif value > self.value:
            self.value *= 1.0 + self._STEP * self._SHARE
        else:
            self.value *= 1.0 - self._STEP * (1.0 - self._SHARE)


class _Line:
    """A line fitted to the recent points, older ones counting ever less (least squares)."""

    _KEPT = 0.99

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        kept = self._KEPT
        self._weight = kept * self._weight + 1.0
        self._x = kept * self._x + x
        self._y = kept * self._y + y
        self._xx = kept * self._xx + x * x
        self._xy = kept * self._xy + x * y

    @property
    def mean(self) -> float:
        """Of the y; 0 without any point."""
        return self._y / self._weight if self._weight else 0.0

    @property
    def slope(self) -> float:
        """Never below 0; 0 while all x are about the same."""
        if not self._weight:
            return 0.0
        mean = self._x / self._weight
        variance = self._xx / self._weight - mean * mean
        if variance < 0.25:
            return 0.0
        covariance = self._xy / self._weight - mean * self._y / self._weight
        return max(0.0, covariance / variance)

    def at(self, x: float) -> float:
        """The line's y; 0 without any point."""
        if not self._weight:
            return 0.0
        return self.mean + self.slope * (x - self._x / self._weight)


class _ChunkFit:
    """Seconds = token_s · tokens + pair_s · pairs: recent chunks beside decode rows.

    Without a constant: what a step with chunks costs whatever their length is spread over the
    tokens of such chunks as there are, and longer ones count for more.
    """

    _KEPT = 0.95
    # Above this (squared) correlation the two can't be told apart.
    _ALIKE = 0.99
    # A step that takes so many times what was expected had to wait for something else.
    _STALL = 4.0

    def __init__(self) -> None:
        self._tt = self._tp = self._pp = self._ts = self._ps = 0.0

    def add(self, chunks: ChunkWork, seconds: float) -> None:
        kept, (tokens, pairs) = self._KEPT, chunks
        if (fitted := self.fit()) is not None:
            seconds = min(seconds, self._STALL * (fitted[0] * tokens + fitted[1] * pairs))
        self._tt = kept * self._tt + tokens * tokens
        self._tp = kept * self._tp + tokens * pairs
        self._pp = kept * self._pp + pairs * pairs
        self._ts = kept * self._ts + tokens * seconds
        self._ps = kept * self._ps + pairs * seconds

    def fit(self) -> tuple[float, float] | None:
        """(token_s, pair_s), or None before the first chunk."""
        if not self._tt:
            return None
        determinant = self._tt * self._pp - self._tp * self._tp
        if determinant > (1 - self._ALIKE) * self._tt * self._pp:
            token_s = (self._pp * self._ts - self._tp * self._ps) / determinant
            pair_s = (self._tt * self._ps - self._tp * self._ts) / determinant
            if token_s > 0.0 and pair_s > 0.0:
                return token_s, pair_s
        return self._ts / self._tt, 0.0


def _smooth(old: float, new: float) -> float:
    return new if old == 0.0 else old + _SMOOTHING * (new - old)
