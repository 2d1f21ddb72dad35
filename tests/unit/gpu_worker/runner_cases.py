"""What the tests of the runner share: a runner on a tiny model, plans, and what they drew."""

import numpy as np
import torch

from octavo_worker.backends.cpu import CpuBackend
from octavo_worker.plan import Chunk, Plan, RowAdd, Sampling, StepOutcome
from octavo_worker.row_book import RowLimits
from octavo_worker.runner import Runner
from tests.fakes.tiny_paged_model import MAX_MODEL_LEN, VOCAB_SIZE, TinyPagedModel, make_kv_caches

torch.set_num_threads(1)

BLOCK_SIZE = 16
PROMPT = [5, 17, 3, 88, 21, 40, 9, 9, 60, 2, 31, 77, 14, 50, 6, 1, 23, 42, 11]
NO_STOP = Sampling()


def make_runner(
    model: TinyPagedModel | None = None, num_rows: int = 4, num_blocks: int = 64
) -> Runner:
    limits = RowLimits(num_rows, num_blocks, BLOCK_SIZE, MAX_MODEL_LEN, VOCAB_SIZE)
    caches = make_kv_caches(num_blocks, BLOCK_SIZE)
    return Runner(model or TinyPagedModel(), CpuBackend(), caches, limits, torch.device("cpu"))


def row_add(
    row: int = 0,
    generation: int = 1,
    blocks: tuple[int, ...] = (1, 2, 3, 4),
    sampling: Sampling = NO_STOP,
    num_computed: int = 0,
    max_total: int = 64,
    min_total: int = 0,
    sequence_index: int = 0,
) -> RowAdd:
    block_ids = np.array(blocks, np.int64)
    return RowAdd(
        row, generation, sampling, sequence_index, block_ids, num_computed, max_total, min_total
    )


def chunk(row: int, token_ids: list[int], start: int = 0, is_last: bool = True) -> Chunk:
    return Chunk(row, start, np.array(token_ids, np.int64), is_last)


def run(runner: Runner, plan: Plan | None) -> StepOutcome:
    runner.submit(plan)
    outcome = runner.poll()
    assert outcome is not None
    assert runner.num_in_flight == 0
    return outcome


def repeat(runner: Runner) -> list[StepOutcome]:
    outcomes = []
    while runner.can_repeat:
        outcomes.append(run(runner, None))
    return outcomes


def tokens_of(outcomes: list[StepOutcome], row: int = 0) -> list[int]:
    return [
        int(token)
        for outcome in outcomes
        for entry_row, token in zip(outcome.rows, outcome.token_ids, strict=True)
        if entry_row == row
    ]
