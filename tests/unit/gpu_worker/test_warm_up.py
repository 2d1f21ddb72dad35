"""Warming up runs every kind of step that fits and leaves the runner as new."""

import torch

from octavo_worker.backends.cpu import CpuBackend
from octavo_worker.row_book import RowLimits
from octavo_worker.runner import Runner
from octavo_worker.warm_up import warm_up
from tests.fakes.tiny_paged_model import MAX_MODEL_LEN, VOCAB_SIZE, TinyPagedModel, make_kv_caches

BLOCK_SIZE = 16


def make(num_rows: int, num_blocks: int) -> tuple[Runner, TinyPagedModel, RowLimits]:
    limits = RowLimits(num_rows, num_blocks, BLOCK_SIZE, MAX_MODEL_LEN, VOCAB_SIZE)
    caches = make_kv_caches(num_blocks, BLOCK_SIZE)
    model = TinyPagedModel()
    return Runner(model, CpuBackend(), caches, limits, torch.device("cpu")), model, limits


def test_leaves_the_runner_as_new() -> None:
    runner, model, limits = make(num_rows=64, num_blocks=400)
    warm_up(runner, limits, max_num_batched_tokens=2048)
    assert model.num_forwards >= 5 * 4
    assert runner.num_live_rows == 0
    assert runner.num_in_flight == 0
    assert not runner.can_repeat


def test_small_limits_leave_out_what_does_not_fit() -> None:
    runner, model, limits = make(num_rows=1, num_blocks=2)
    warm_up(runner, limits, max_num_batched_tokens=16)
    assert model.num_forwards >= 3
    assert runner.num_live_rows == 0
