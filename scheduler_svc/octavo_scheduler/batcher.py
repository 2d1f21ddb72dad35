"""What one step computes: pure decisions, numbers in, numbers out.

Running rows decode first; what is left of the token budget goes to prefill chunks; a lease
(`decode_until`) lets the worker decode on by itself while nothing else is to be done. A
simulator can call everything here.

Must not know: sequences' contents, workers, I/O, time. Entry points: `chunk_budget`,
`admission_room`, `share_budget`, `choose_victim`, `can_lease`, `lease_end`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# A lease may use up at most this share of the free blocks.
_LEASE_SHARE = 0.25
_SMOOTHING = 0.1


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Fixed numbers of one worker's batches; `itl_target_s` 0 = none."""

    max_num_seqs: int
    max_num_batched_tokens: int
    min_chunk_tokens: int
    itl_target_s: float = 0.0
    plans_queued: int = 2
    lease_steps: int = 0

    @staticmethod
    def of(
        max_num_seqs: int,
        max_num_batched_tokens: int,
        min_chunk_tokens: int,
        itl_target_s: float = 0.0,
        plans_queued: int = 2,
        lease_steps: int = 0,
    ) -> "BatchLimits":
        """Limits that leave every step room for a least chunk beside the decode rows."""
        chunk = max(1, min(min_chunk_tokens, max_num_batched_tokens // 2))
        rows = max(1, min(max_num_seqs, max_num_batched_tokens - chunk))
        return BatchLimits(
            rows, max_num_batched_tokens, chunk, itl_target_s, plans_queued, lease_steps
        )


class StepCost:
    """Measured step times: a decode step's, and a prefill token's on top (0 = unknown).

    A prefill token's cost is the time of recent chunks over their tokens, so that large chunks
    count for more: a short one costs a step's fixed time and says little about a token. What a
    row adds to a decode step is the slope of a line through recent steps.
    """

    def __init__(self) -> None:
        self.decode_s = 0.0
        self._line = _Line()
        self._chunks_s = 0.0
        self._chunk_tokens = 0.0

    @property
    def prefill_token_s(self) -> float:
        return self._chunks_s / self._chunk_tokens if self._chunk_tokens else 0.0

    @property
    def row_s(self) -> float:
        """What each decoding row adds to a step's time; 0 = unknown, or nothing."""
        return self._line.slope

    def observe(self, step_s: float, num_prefill_tokens: int, num_rows: int) -> None:
        """A step of `num_rows` drawn tokens was measured."""
        if step_s <= 0.0:
            return
        if num_prefill_tokens == 0:
            self.decode_s = _smooth(self.decode_s, step_s)
            self._line.add(num_rows, step_s)
        else:
            extra = max(step_s - self.decode_s, 0.1 * step_s)
            self._chunks_s = (1 - _SMOOTHING) * self._chunks_s + extra
            self._chunk_tokens = (1 - _SMOOTHING) * self._chunk_tokens + num_prefill_tokens

    @property
    def prefill_tokens_per_s(self) -> float:
        return 1.0 / self.prefill_token_s if self.prefill_token_s else 0.0

    def step_s(self, num_prefill_tokens: int) -> float:
        return self.decode_s + num_prefill_tokens * self.prefill_token_s


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


def _smooth(old: float, new: float) -> float:
    return new if old == 0.0 else old + _SMOOTHING * (new - old)


def chunk_budget(limits: BatchLimits, num_decoding: int, cost: StepCost) -> int:
    """Tokens that a step's prefill chunks may take beside `num_decoding` decode rows.

    With rows decoding and an inter-token target, as many as the target leaves time for, but
    never below the least chunk.
    """
    budget = max(0, limits.max_num_batched_tokens - num_decoding)
    if num_decoding and limits.itl_target_s and cost.prefill_token_s:
        time_left = max(0.0, limits.itl_target_s - cost.decode_s)
        by_time = int(time_left / cost.prefill_token_s)
        budget = min(budget, max(limits.min_chunk_tokens, by_time))
    return budget


class Room(NamedTuple):
    """Tokens of the step's chunk budget open to newcomers: of any length, and short ones."""

    any_length: int
    short: int

    def accepts(self, tokens: int, min_chunk: int) -> bool:
        """Whether a newcomer would get a worthwhile chunk (its all, or a least chunk) now."""
        return self.any_length >= min(tokens, min_chunk) or tokens <= min(min_chunk, self.short)

    def after(self, tokens: int, min_chunk: int) -> "Room":
        short = self.short - (tokens if tokens <= min_chunk else 0)
        return Room(max(0, self.any_length - tokens), max(0, short))


def admission_room(budget: int, remaining: Sequence[int], min_chunk: int) -> Room:
    """Room beside prefilling rows with `remaining` tokens each, in their order."""
    if not remaining:
        return Room(budget, budget)
    short = budget - min(min_chunk, remaining[0])
    short -= sum(tokens for tokens in remaining[1:] if tokens <= min_chunk)
    return Room(max(0, budget - sum(remaining)), max(0, short))


def share_budget(budget: int, remaining: Sequence[int], min_chunk: int) -> list[int]:
    """Chunk length for each prefilling row, in order; the sum is at most `budget`.

    The first row is sure of a least chunk; then short rows, which would otherwise wait for
    long ones, get all they need; then the rest in order. No row gets a piece below the
    least chunk unless it ends its prompt or nothing else fills the step.
    """
    chunks = [0] * len(remaining)
    if not remaining or budget <= 0:
        return chunks
    chunks[0] = min(remaining[0], min_chunk, budget)
    left = budget - chunks[0]
    for i in range(1, len(remaining)):
        if remaining[i] <= min(min_chunk, left):
            chunks[i] = remaining[i]
            left -= remaining[i]
    for i in range(len(remaining)):
        more = min(remaining[i] - chunks[i], left)
        if more >= min(min_chunk, remaining[i]) or (more and chunks[i]):
            chunks[i] += more
            left -= more
    return chunks


def choose_victim(
    candidates: Sequence[tuple[tuple[int, int, int], int]],
    needy: tuple[int, int, int],
    max_preemptions: int,
) -> int | None:
    """Which row gives its blocks to the row of order `needy`, which can't grow.

    `candidates`: (order, preemptions so far) of all rows, the needy one included. Only rows
    that go after the needy one, the last of them first, and none that was preempted
    `max_preemptions` times: unless the needy row goes before all others, so that somebody
    always advances. None: the needy row stalls (or, alone, can't be served).
    """
    after = [i for i, (order, _) in enumerate(candidates) if order > needy]
    willing = [i for i in after if candidates[i][1] < max_preemptions]
    if not willing and len(after) == len(candidates) - 1:
        willing = after
    return max(willing, key=lambda i: candidates[i][0], default=None)


def can_lease(limits: BatchLimits, num_decoding: int, num_free: int, block_size: int) -> bool:
    """Whether looking `lease_steps` ahead leaves the pool ample room."""
    if limits.lease_steps <= limits.plans_queued:
        return False
    blocks_a_row = -(-limits.lease_steps // block_size)
    return num_decoding * blocks_a_row <= num_free * _LEASE_SHARE


def lease_end(limits: BatchLimits, last_step: int, horizon: int) -> int:
    """`decode_until` of a leased plan: `lease_steps` past the last step that was read."""
    return max(horizon + 1, last_step + limits.lease_steps)


def steps_ahead(limits: BatchLimits, *, leased: bool) -> int:
    """A further plan is due when at most this many steps are still covered."""
    if leased:
        return max(limits.plans_queued - 1, limits.lease_steps // 2)
    return limits.plans_queued - 1
