"""What one cache over all workers' memory could hit: least recently used, nothing in flight.

The yardstick of every routing policy. Must not know: fleets. Entry points: `pooled_lru_hits`,
`reusable_tokens`.
"""

from octavo_scheduler.block_pool import BlockPool
from tests.bench.simulator.workload import Workload


def pooled_lru_hits(workload: Workload, num_blocks: int) -> int:
    """Prompt tokens found in one pool of `num_blocks`, requests one after the other."""
    pool = BlockPool(num_blocks + 1)
    num_hits = 0
    for request in workload.requests:
        limit = (request.num_prompt_tokens - 1) // workload.block_size
        hits = pool.match(request.hashes, limit)
        num_hits += len(hits)
        pool.touch(hits)
        missing = min(len(request.hashes) - len(hits), pool.num_free)
        new = pool.allocate(missing)
        for block, block_hash in zip(new, request.hashes[len(hits) :], strict=False):
            pool.index(block, block_hash)
        pool.free([*hits, *new])
    return num_hits * workload.block_size


def reusable_tokens(workload: Workload) -> int:
    """Prompt tokens that an earlier prompt, or the answer it follows, already computed."""
    seen: set[bytes] = set()
    reusable = 0
    for request in workload.requests:
        limit = (request.num_prompt_tokens - 1) // workload.block_size
        run = 0
        if request.follows is not None:
            # All of the turn before, up to its answer's last token but one.
            before = workload.requests[request.follows]
            run = (before.num_prompt_tokens + before.num_output_tokens - 1) // workload.block_size
        while run < min(limit, len(request.hashes)) and request.hashes[run] in seen:
            run += 1
        reusable += min(run, limit)
        seen.update(request.hashes)
    return reusable * workload.block_size
