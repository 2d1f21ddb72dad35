"""What is counted and timed of sequences, from their submission to their end.

Looked-up tokens are hits or misses, and each miss has a reason. Only the first start of a
sequence looks up: what is computed again later, after a preemption or a move, is counted apart,
so that thrashing can't pass for a warm cache.

Must not know: the queue, sessions, plans. Entry points: `Accounts`, `misses_of`.
"""

from collections.abc import Callable, Iterable

from octavo.metrics import SchedulerMetrics
from octavo_scheduler.sequence import FinishReason, Sequence
from octavo_scheduler.worker_state import WorkerState


class Accounts:
    """Counters of one cell's sequences."""

    def __init__(self, metrics: SchedulerMetrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock

    def rejected(self, num_sequences: int) -> None:
        self._metrics.outcomes.labels("rejected").inc(num_sequences)

    def placed(
        self, sequence: Sequence, worker: WorkerState, others: Iterable[WorkerState]
    ) -> None:
        """The sequence was given a row of `worker`, `sequence.num_cached` tokens included."""
        metrics, request = self._metrics, sequence.request
        if sequence.lost_by is not None:
            num_again = max(0, sequence.num_lost - sequence.num_cached)
            metrics.recomputed_tokens.labels(sequence.lost_by.value).inc(num_again)
            is_first = False
            sequence.lost_by = None
        else:
            is_first = not sequence.was_started
        if not sequence.was_started:
            sequence.started_at = self._clock()
            metrics.queue_time.observe(sequence.started_at - request.arrival, request.exemplar)
        if is_first:
            metrics.prefix_queries.inc(len(sequence.token_ids))
            metrics.prefix_hits.inc(sequence.num_cached)
            for reason, num_tokens in misses_of(sequence, worker, others).items():
                metrics.prefix_misses.labels(reason).inc(num_tokens)

    def prefilled(self, sequence: Sequence) -> None:
        """Its last known token was computed: the next one is drawn, its first unless it came with
        some from another scheduler."""
        if not sequence.first_token_at and not sequence.num_generated:
            sequence.first_token_at = self._clock()
            prefill_s = sequence.first_token_at - sequence.started_at
            self._metrics.prefill_time.observe(prefill_s, sequence.request.exemplar)

    def ended(self, sequence: Sequence, reason: FinishReason) -> None:
        self._metrics.outcomes.labels(reason.value).inc()
        if sequence.first_token_at and reason is not FinishReason.MOVED:
            decode_s = self._clock() - sequence.first_token_at
            self._metrics.decode_time.observe(decode_s, sequence.request.exemplar)


def misses_of(
    sequence: Sequence, worker: WorkerState, others: Iterable[WorkerState]
) -> dict[str, int]:
    """Known tokens that its prefix hits on `worker` don't cover, by `octavo.metrics.MISS_REASONS`.

    `others`: the cell's other workers.
    """
    num_known, num_cached = len(sequence.token_ids), sequence.num_cached
    if not worker.caching:
        return {"disabled": num_known}
    if sequence.reports_prompt:
        return {"prompt_logprobs": num_known}
    hashes, block_size = sequence.block_hashes, worker.block_size
    start, limit = num_cached // block_size, worker.max_hits(sequence)
    found = [start]
    if start < min(limit, len(hashes)):
        # Who doesn't have the first missing block can't have more of the prefix than was hit.
        having = (other.pool for other in others if other.pool.has(hashes[start]))
        found += [len(pool.match(hashes, limit)) for pool in having]
    reached = max(found)
    num_evicted = worker.pool.num_evicted(hashes, reached, limit)
    blocks = {
        "elsewhere": reached - start,
        "evicted": num_evicted,
        "cold": limit - reached - num_evicted,
    }
    misses = {reason: block_size * count for reason, count in blocks.items() if count}
    misses["tail"] = num_known - block_size * limit
    return misses
