"""Random but lawful schedules: whatever the order of events, every sequence gets its tokens."""

from functools import lru_cache
from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_worker.backends.cpu import CpuBackend
from octavo_worker.row_book import RowLimits
from octavo_worker.runner import Runner
from tests.fakes.little_scheduler import (
    BLOCK_SIZE,
    MOST_TOKENS,
    NUM_BLOCKS,
    NUM_ROWS,
    PROMPTS,
    LittleScheduler,
)
from tests.fakes.tiny_paged_model import MAX_MODEL_LEN, VOCAB_SIZE, TinyPagedModel, make_kv_caches

torch.set_num_threads(1)
MODEL = TinyPagedModel()


@lru_cache
def answer_to(prompt: int) -> list[int]:
    return MODEL.greedy(PROMPTS[prompt], MOST_TOKENS)


def make_runner() -> Runner:
    limits = RowLimits(NUM_ROWS, NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN, VOCAB_SIZE)
    caches = make_kv_caches(NUM_BLOCKS, BLOCK_SIZE)
    return Runner(MODEL, CpuBackend(), caches, limits, torch.device("cpu"))


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32))
def test_any_lawful_schedule_gives_the_dense_answers(seed: int) -> None:
    scheduler = LittleScheduler(Random(seed), make_runner(), answer_to)
    for _ in range(80):
        scheduler.step()
    scheduler.check()
    assert len(scheduler.all) >= 4
    assert sum(len(sequence.tokens) for sequence in scheduler.all.values()) >= 20
