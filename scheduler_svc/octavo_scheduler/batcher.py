"""What one step computes: pure decisions, numbers in, numbers out.

Running rows decode first; what is left of the token budget goes to prefill chunks; a lease
(`decode_until`) lets the worker decode on by itself while nothing else is to be done. A
simulator can call everything here.

Must not know: sequences' contents, workers, I/O, time. Entry points: `chunk_budget`,
`step_target_s`, `admission_room`, `share_budget`, `choose_victim`, `can_lease`, `lease_end`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from octavo_scheduler.step_cost import StepCost

# A lease may use up at most this share of the free blocks.
_LEASE_SHARE = 0.25
_UNSEEN_S = 0.01
# Of decode steps: what streams get used to under a load that lasts grows no further. Else chunks
# that are usual would let longer ones in, up to any target.
_MOST_USUAL = 4 / 3


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Fixed numbers of one worker's batches; `itl_target_s` and `itl_stretch` 0 = none."""

    max_num_seqs: int
    max_num_batched_tokens: int
    min_chunk_tokens: int
    itl_target_s: float = 0.0
    plans_queued: int = 2
    lease_steps: int = 0
    itl_stretch: float = 0.0

    @staticmethod
    def of(
        max_num_seqs: int,
        max_num_batched_tokens: int,
        min_chunk_tokens: int,
        itl_target_s: float = 0.0,
        plans_queued: int = 2,
        lease_steps: int = 0,
        itl_stretch: float = 0.0,
    ) -> "BatchLimits":
        """Limits that leave every step room for a least chunk beside the decode rows."""
        chunk = max(1, min(min_chunk_tokens, max_num_batched_tokens // 2))
        rows = max(1, min(max_num_seqs, max_num_batched_tokens - chunk))
        return BatchLimits(
            *(rows, max_num_batched_tokens, chunk),
            *(itl_target_s, plans_queued, lease_steps, itl_stretch),
        )


def step_target_s(limits: BatchLimits, decode_s: float) -> float:
    """How long a step with chunks may last beside rows whose decode step takes `decode_s`; 0 = as
    long as it takes.

    Who reads a stream sees a gap beside the usual ones: so many times a decode step is what stays
    unseen on any model and card. Below `_UNSEEN_S` nobody sees any.
    """
    if not limits.itl_stretch:
        return limits.itl_target_s
    target_s = max(limits.itl_stretch * decode_s, _UNSEEN_S)
    return min(target_s, limits.itl_target_s) if limits.itl_target_s else target_s


def chunk_budget(
    limits: BatchLimits, num_decoding: int, cost: StepCost, num_context: int = 0
) -> int:
    """Tokens that a step's prefill chunks may take beside `num_decoding` decode rows.

    With rows decoding and an inter-token target, as many as the target leaves time for, but
    never below the least chunk. `num_context`: tokens before the chunk, the most of any row.
    """
    budget = max(0, limits.max_num_batched_tokens - num_decoding)
    if not num_decoding:
        return budget
    decode_s = cost.decode_step_s(num_decoding)
    usual_s = min(cost.usual_s, _MOST_USUAL * decode_s)
    target_s = step_target_s(limits, max(decode_s, usual_s))
    if target_s:
        by_time = cost.chunk_tokens_within(max(0.0, target_s - decode_s), num_context)
        if by_time is not None:
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
