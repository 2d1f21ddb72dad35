"""Steps of every kind, run once while loading: what compiles at first use compiles here.

A kernel that compiles in the middle of service holds every row up for a second, looks like a
hang and spoils the scheduler's measured costs. Must not know: gRPC, leaders. Entry point:
`warm_up`.
"""

import logging
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from octavo_worker.plan import Chunk, Plan, RowAdd, Sampling
from octavo_worker.row_book import RowLimits
from octavo_worker.runner import Runner

_logger = logging.getLogger(__name__)
_NUM_DECODES = 2


class _Batch(NamedTuple):
    num_rows: int
    num_prompt_tokens: int
    sampling: Sampling


_GREEDY = Sampling()
_SAMPLED = Sampling(temperature=1.0, seed=1)
_FILTERED = Sampling(temperature=1.0, top_p=0.9, top_k=40, min_p=0.01, seed=2, logprobs=2)
# Compiled code differs for sizes of 1, multiples of 16, and others; for long contexts; and experts'
# for few tokens, some hundreds, and beyond a thousand. Products of some thousands of rows are other
# code of the library's, which the card loads at first use.
_BATCHES = (
    _Batch(1, 1, _GREEDY),
    _Batch(1, 600, _SAMPLED),
    _Batch(4, 600, _GREEDY),
    _Batch(8, 600, _GREEDY),
    _Batch(3, 21, _FILTERED),
    _Batch(16, 64, _GREEDY),
    _Batch(16, 33, _SAMPLED),
    _Batch(33, 16, _FILTERED),
)


def warm_up(runner: Runner, limits: RowLimits, max_num_batched_tokens: int) -> None:
    """Run the batches that fit into the limits; the runner is as new afterwards."""
    began = time.monotonic()
    for batch in _BATCHES:
        if not _fits(batch, limits, max_num_batched_tokens):
            continue
        runner.reset()
        for plan in _plans(batch, limits):
            runner.submit(plan)
            outcome = runner.poll()
            assert outcome is not None
            assert not outcome.faults, outcome.faults
        while runner.can_repeat:
            runner.submit(None)
            runner.poll()
    runner.reset()
    _logger.info("kernels ready after %.1f s", time.monotonic() - began)


def _total_tokens(batch: _Batch) -> int:
    return batch.num_prompt_tokens + 2 * _NUM_DECODES


def _blocks_a_row(batch: _Batch, limits: RowLimits) -> int:
    return -(-_total_tokens(batch) // limits.block_size)


def _fits(batch: _Batch, limits: RowLimits, max_num_batched_tokens: int) -> bool:
    return (
        batch.num_rows <= limits.num_rows
        and batch.num_rows * batch.num_prompt_tokens <= max_num_batched_tokens
        and batch.num_rows * _blocks_a_row(batch, limits) < limits.num_blocks
        and _total_tokens(batch) <= limits.max_model_len
    )


def _plans(batch: _Batch, limits: RowLimits) -> Iterator[Plan]:
    """Half of the rows' prompts; then the others' while the first decode; then decodes only."""
    num_first = (batch.num_rows + 1) // 2
    rows = range(batch.num_rows)
    for plan_id, members in enumerate((rows[:num_first], rows[num_first:]), start=1):
        yield Plan(
            plan_id=plan_id,
            decode_until=plan_id + _NUM_DECODES,
            added_rows=tuple(_row(row, batch, limits) for row in members),
            chunks=tuple(
                Chunk(row, 0, np.zeros(batch.num_prompt_tokens, np.int64), is_last=True)
                for row in members
            ),
        )


def _row(row: int, batch: _Batch, limits: RowLimits) -> RowAdd:
    num_blocks = _blocks_a_row(batch, limits)
    first = 1 + row * num_blocks
    return RowAdd(
        row=row,
        generation=1,
        sampling=batch.sampling,
        sequence_index=0,
        block_ids=np.arange(first, first + num_blocks),
        num_computed_tokens=0,
        max_total_tokens=_total_tokens(batch),
    )
