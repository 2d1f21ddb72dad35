"""On a card: steps launched as CUDA graphs draw what eager steps draw, whatever the schedule."""

from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from octavo.row_event import RowEvent
from octavo_worker.backends import choose_backend
from octavo_worker.graph_shapes import batch_sizes
from octavo_worker.models import load_model
from octavo_worker.plan import Chunk, Plan, RowAdd, Sampling
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


@pytest.mark.parametrize("most", [1, 2, 3, 4, 17, 100, 256, 300, 1024])
def test_sizes_rise_to_the_most_rows(most: int) -> None:
    sizes = batch_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == most
    # Padding never doubles a batch.
    assert all(after <= 2 * before for before, after in pairwise(sizes))


def make_runner(
    folder: Path, num_rows: int, *, captured: bool, poison: float, fused: bool = False
) -> Runner:
    backend, device = choose_backend("cuda")
    model = load_model(folder, dtype="float32", device=device, load_format="auto")
    config = model.config
    shape = (NUM_BLOCKS, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    caches = [
        (torch.full(shape, poison, device=device), torch.full(shape, poison, device=device))
        for _ in range(config.num_layers)
    ]
    limits = RowLimits(num_rows, NUM_BLOCKS, BLOCK_SIZE, 256, config.vocab_size)
    decode = None
    if fused:
        # Triton, which a machine without a card needn't have.
        from octavo_worker.backends.fused_decode import FusedDecode

        decode = FusedDecode.of(model, pdl=True)
        assert decode is not None
    runner = Runner(model, backend, caches, limits, device, decode=decode)
    if captured:
        # Most steps with chunks of this test's prompts are captured; a few are too long.
        runner.max_graph_tokens = 64
        runner.capture()
    return runner


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("captured", "fused"),
    [(False, False), (True, False), (True, True)],
    ids=["eager", "graphs", "fused graphs"],
)
def test_any_lawful_schedule_gives_the_lone_answers(
    tiny_folder: Path, captured: bool, fused: bool
) -> None:
    lone = make_runner(tiny_folder, 1, captured=False, poison=float("nan"))

    @lru_cache
    def answer_to(prompt: int) -> list[int]:
        return generate(lone, PROMPTS[prompt], MOST_TOKENS)

    for seed in range(12):
        runner = make_runner(
            tiny_folder, NUM_ROWS, captured=captured, fused=fused, poison=float("nan")
        )
        scheduler = LittleScheduler(Random(seed), runner, answer_to)
        for _ in range(80):
            scheduler.step()
        scheduler.check()
        assert sum(len(sequence.tokens) for sequence in scheduler.all.values()) >= 20


@pytest.mark.gpu
def test_more_ending_ids_than_a_graph_holds(tiny_folder: Path) -> None:
    runner = make_runner(tiny_folder, NUM_ROWS, captured=True, poison=float("nan"))
    answer = generate(runner, PROMPTS[1], 20)
    last = answer.index(answer[10])
    others = [token for token in range(300) if token not in answer][:40]
    stopped = generate(runner, PROMPTS[1], 20, (*others, answer[10]))
    assert stopped == answer[: last + 1]


def generate(
    runner: Runner, prompt: list[int], num_tokens: int, stop_token_ids: tuple[int, ...] = ()
) -> list[int]:
    """The tokens of one request alone."""
    runner.reset()
    total = len(prompt) + num_tokens
    blocks = np.arange(1, 1 + -(-total // BLOCK_SIZE))
    sampling = Sampling(stop_token_ids=stop_token_ids)
    add = RowAdd(0, 1, sampling, 0, blocks, 0, total)
    chunk = Chunk(0, 0, np.array(prompt, np.int64), is_last=True)
    runner.submit(Plan(1, decode_until=1 << 30, added_rows=(add,), chunks=(chunk,)))
    tokens: list[int] = []
    while True:
        outcome = runner.poll()
        assert outcome is not None
        assert outcome.faults == ()
        tokens += outcome.token_ids.tolist()
        if not outcome.events.size or outcome.events[0] != RowEvent.ALIVE:
            return tokens
        runner.submit(None)
