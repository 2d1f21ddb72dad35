"""Ways to choose a cell: Octavo's, and those that it is compared with.

All but `octavo` are meant for cells of one worker each, so that to choose a cell is to choose a
worker. What a policy may know differs, and that is the point: see `Target`. Must not know: time,
devices. Entry point: `POLICIES`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from octavo.succession import rendezvous_weight
from octavo_router.cells import Cell, choose_cell
from tests.bench.simulator.workload import SimRequest

# A bounded hash passes on when a worker holds this many times the mean number of requests.
_BOUND = 1.25
_NUM_TOP = 3


@dataclass(frozen=True, slots=True)
class Target:
    """A cell as a router may see it.

    `cell`: what Octavo's routers know (published filter, load of the last frame). The rest is
    the truth of this moment, which a real router would have to ask for: requests that live,
    prompt tokens to compute, blocks of these hashes in its caches.
    """

    cell: Cell
    num_requests: int
    backlog_tokens: int
    tokens_per_s: float
    count_hits: Callable[[Sequence[bytes]], int]

    def ttft_s(self, num_tokens: int) -> float:
        return (self.backlog_tokens + num_tokens) / self.tokens_per_s


@dataclass(slots=True)
class Memory:
    """What a router keeps for itself: which cell it sent a block hash to last."""

    sent_to: dict[bytes, str] = field(default_factory=dict[bytes, str])
    num_live: dict[str, int] = field(default_factory=dict[str, int])


Policy = Callable[[SimRequest, Sequence[Target], int, Memory], str]


def octavo(request: SimRequest, targets: Sequence[Target], block_size: int, _: Memory) -> str:
    """The router's own choice, from filters and loads."""
    choice = choose_cell([target.cell for target in targets], request.hashes, block_size)
    assert choice is not None
    return choice.cell_id


def least_requests(_: SimRequest, targets: Sequence[Target], __: int, ___: Memory) -> str:
    """The fewest live requests, known exactly."""
    return min(targets, key=lambda t: (t.num_requests, t.cell.cell_id)).cell.cell_id


def hash_two_blocks(request: SimRequest, targets: Sequence[Target], _: int, __: Memory) -> str:
    """Consistent hash of the first two blocks."""
    return _by_weight(request, targets)[0].cell.cell_id


def bounded_hash(request: SimRequest, targets: Sequence[Target], _: int, __: Memory) -> str:
    """The same, past targets with more than their share of the requests."""
    limit = _BOUND * (sum(target.num_requests for target in targets) + 1) / len(targets)
    ranked = _by_weight(request, targets)
    return next((t for t in ranked if t.num_requests + 1 <= limit), ranked[0]).cell.cell_id


def top_three(request: SimRequest, targets: Sequence[Target], _: int, __: Memory) -> str:
    """Of the first three by hash, the one with the least expected time to first token."""
    top = _by_weight(request, targets)[:_NUM_TOP]
    return min(top, key=lambda t: t.ttft_s(request.num_prompt_tokens)).cell.cell_id


def least_ttft(request: SimRequest, targets: Sequence[Target], block_size: int, _: Memory) -> str:
    """The least expected time to first token, with every cache known exactly."""

    def ttft_s(target: Target) -> float:
        hits = target.count_hits(request.hashes) * block_size
        return target.ttft_s(request.num_prompt_tokens - hits)

    return min(targets, key=ttft_s).cell.cell_id


def private(request: SimRequest, targets: Sequence[Target], block_size: int, memory: Memory) -> str:
    """Each router trusts its own memory: a quarter of the prompt, else its fewest requests."""
    run = 0
    chosen = ""
    for block_hash in request.hashes:
        where = memory.sent_to.get(block_hash)
        if where is None or (chosen and where != chosen):
            break
        chosen, run = where, run + 1
    if run * block_size < 0.25 * request.num_prompt_tokens:
        ids = [target.cell.cell_id for target in targets]
        chosen = min(ids, key=lambda cell_id: memory.num_live.get(cell_id, 0))
    memory.sent_to.update(dict.fromkeys(request.hashes, chosen))
    return chosen


POLICIES: dict[str, Policy] = {
    "octavo": octavo,
    "least requests": least_requests,
    "hash of 2 blocks": hash_two_blocks,
    "bounded hash": bounded_hash,
    "top 3, least TTFT": top_three,
    "least TTFT, exact index": least_ttft,
    "private knowledge": private,
}


def _by_weight(request: SimRequest, targets: Sequence[Target]) -> list[Target]:
    key = request.hashes[min(1, len(request.hashes) - 1)] if request.hashes else b""
    return sorted(targets, key=lambda t: rendezvous_weight(t.cell.cell_id, key), reverse=True)
