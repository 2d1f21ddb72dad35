"""Which worker a waiting sequence should run on: a pure decision over a few numbers a worker.

Among the workers whose index covers at least a quarter of the prompt, the one with the least
expected time to first token; if none covers that much, the least of all. A worker without room
is waited for only while that costs at most the affinity budget over the best one with room. And a
warm worker is passed over when its many rows would slow the answer by more than its prefix saves:
so a prefix that everybody shares spreads over the workers, and a long one of few stays where it is.

Must not know: sequences, pools, I/O. Entry point: `choose_worker`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# Share of the prompt from which on a worker counts as warm.
WARM_SHARE = 0.25
# Assumed while no prefill was measured yet.
_DEFAULT_TOKENS_PER_S = 10_000.0
# Times to first token that differ by less are equal: then the worker with fewer rows is better.
_EQUAL_TTFT_S = 0.02


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker, seen from one waiting sequence.

    `hit_tokens` of the prompt lie in its cache; `backlog_tokens` of other prompts are computed
    first; `wait_s` until it has room (0 = has room now); `fits` is False if it never has. Each
    of its rows adds `row_s` to every step (0 = unknown).
    """

    hit_tokens: int
    backlog_tokens: int
    tokens_per_s: float
    wait_s: float
    num_rows: int
    fits: bool = True
    row_s: float = 0.0


def expected_ttft_s(candidate: Candidate, num_tokens: int) -> float:
    """Time to first token of a prompt of `num_tokens` on this worker."""
    rate = candidate.tokens_per_s or _DEFAULT_TOKENS_PER_S
    compute = candidate.backlog_tokens + num_tokens - candidate.hit_tokens
    return candidate.wait_s + compute / rate


def choose_worker(
    candidates: Sequence[Candidate],
    num_tokens: int,
    affinity_budget_s: float,
    num_output_tokens: int = 0,
) -> int | None:
    """Index of the worker to bind to now, or to wait for; None if it fits nowhere.

    `num_output_tokens`: as many steps is the answer expected to take.
    """
    ttfts = [expected_ttft_s(candidate, num_tokens) for candidate in candidates]

    def cost(i: int) -> tuple[int, int]:
        return round(ttfts[i] / _EQUAL_TTFT_S), candidates[i].num_rows

    fitting = [i for i, candidate in enumerate(candidates) if candidate.fits]
    if not fitting:
        return None
    warm = [i for i in fitting if candidates[i].hit_tokens >= WARM_SHARE * num_tokens]
    best = min(warm or fitting, key=cost)
    with_room = [i for i in fitting if candidates[i].wait_s <= 0.0]
    if candidates[best].wait_s <= 0.0:
        return _roomier(candidates, ttfts, num_output_tokens, with_room, best)
    if not with_room:
        return best
    fallback = min(with_room, key=cost)
    extra_s = ttfts[best] - ttfts[fallback]
    return best if extra_s <= affinity_budget_s else fallback


def _roomier(
    candidates: Sequence[Candidate],
    ttfts: Sequence[float],
    num_output_tokens: int,
    with_room: Sequence[int],
    best: int,
) -> int:
    """`best`, or a worker that ends the answer sooner because fewer rows share its steps."""
    crowding_s = [item.row_s * item.num_rows * num_output_tokens for item in candidates]
    other = min(with_room, key=lambda i: ttfts[i] + crowding_s[i])
    relief_s = crowding_s[best] - crowding_s[other]
    lost_hits = max(0, candidates[best].hit_tokens - candidates[other].hit_tokens)
    saving_s = lost_hits / (candidates[other].tokens_per_s or _DEFAULT_TOKENS_PER_S)
    gain_s = ttfts[best] + crowding_s[best] - ttfts[other] - crowding_s[other]
    return other if relief_s > saving_s and gain_s > _EQUAL_TTFT_S else best
