"""Which worker a waiting sequence should run on: a pure decision over a few numbers a worker.

Among the workers whose index covers at least a quarter of the prompt, the one with the least
expected time to first token; if none covers that much, the least of all. A worker without room
is waited for only while that costs at most the affinity budget over the best one with room.

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
    first; `wait_s` until it has room (0 = has room now); `fits` is False if it never has.
    """

    hit_tokens: int
    backlog_tokens: int
    tokens_per_s: float
    wait_s: float
    num_rows: int
    fits: bool = True


def expected_ttft_s(candidate: Candidate, num_tokens: int) -> float:
    """Time to first token of a prompt of `num_tokens` on this worker."""
    rate = candidate.tokens_per_s or _DEFAULT_TOKENS_PER_S
    compute = candidate.backlog_tokens + num_tokens - candidate.hit_tokens
    return candidate.wait_s + compute / rate


def choose_worker(
    candidates: Sequence[Candidate], num_tokens: int, affinity_budget_s: float
) -> int | None:
    """Index of the worker to bind to now, or to wait for; None if it fits nowhere."""

    ttfts = [expected_ttft_s(candidate, num_tokens) for candidate in candidates]

    def cost(i: int) -> tuple[int, int]:
        return round(ttfts[i] / _EQUAL_TTFT_S), candidates[i].num_rows

    fitting = [i for i, candidate in enumerate(candidates) if candidate.fits]
    if not fitting:
        return None
    warm = [i for i in fitting if candidates[i].hit_tokens >= WARM_SHARE * num_tokens]
    best = min(warm or fitting, key=cost)
    if candidates[best].wait_s <= 0.0:
        return best
    with_room = [i for i in fitting if candidates[i].wait_s <= 0.0]
    if not with_room:
        return best
    fallback = min(with_room, key=cost)
    extra_s = ttfts[best] - ttfts[fallback]
    return best if extra_s <= affinity_budget_s else fallback
