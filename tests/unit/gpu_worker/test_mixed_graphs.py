"""Steps padded to a few shapes draw what unpadded ones draw; captured, they do so bit for bit."""

from collections.abc import Callable
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from octavo_worker.backends import choose_backend
from octavo_worker.backends.cpu import CpuBackend
from octavo_worker.captured import Step, capture
from octavo_worker.graph_shapes import StepShape, max_graph_tokens, mixed_shapes
from octavo_worker.models import load_model
from octavo_worker.plan import Chunk, Plan, RowAdd, Sampling, StepOutcome
from octavo_worker.row_book import RowLimits
from octavo_worker.runner import Runner
from octavo_worker.sent_step import SentStep, pack, shape_of
from octavo_worker.step_work import StepWork
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
_POISON = 1 << 40


class Launches:
    """Makes steps that run as `capture` has them run, and counts the mixed ones.

    What the host had sent is spoilt after each launch: the next one must send all of its own.
    """

    def __init__(self, capture: Callable[[Step], Step] = lambda step: step) -> None:
        self._capture = capture
        self.num_mixed = 0

    def __call__(self, step: Any) -> Step:
        captured = self._capture(step)
        (sent,) = step.args
        if not isinstance(sent, SentStep):
            return captured

        def launch() -> torch.Tensor:
            self.num_mixed += 1
            drawn = captured()
            for values in sent:
                values.fill_(_POISON)
            return drawn

        return launch


@pytest.mark.parametrize("most_rows", [1, 4, 32, 33, 100, 256])
@pytest.mark.parametrize("most_tokens", [0, 63, 64, 500, 2048, 10_000])
def test_shapes_rise_to_the_most_rows(most_tokens: int, most_rows: int) -> None:
    shapes = mixed_shapes(most_tokens, most_rows)
    assert shapes == sorted(set(shapes))
    assert bool(shapes) == (most_tokens >= 64)
    for before, after in pairwise(shapes):
        assert after.num_tokens <= 2 * before.num_tokens
        assert after.num_chunks >= before.num_chunks
    assert all(shape.num_rows <= most_rows for shape in shapes)
    assert {shape.num_tokens for shape in shapes if shape.num_rows == most_rows} == {
        shape.num_tokens for shape in shapes
    }


def test_large_models_are_captured_for_few_tokens() -> None:
    class Shape:
        def __init__(self, hidden_size: int, intermediate_size: int) -> None:
            self.hidden_size = hidden_size
            self.intermediate_size = intermediate_size

    assert max_graph_tokens(Shape(1024, 3072)) == 2048
    assert max_graph_tokens(Shape(4096, 14_336)) in range(512, 768)
    assert max_graph_tokens(Shape(8192, 28_672)) in range(64, 256)


def test_padding_has_no_owner_and_the_spare_row() -> None:
    rows = np.array([6, 2], np.int64)
    work = StepWork(
        chunks=(
            Chunk(3, 0, np.array([11, 12]), is_last=True),
            Chunk(1, 20, np.array([13, 14, 15]), is_last=False),
            Chunk(0, 7, np.array([16]), is_last=True),
        ),
        decode_rows=rows,
        max_context_decode=9,
        entry_rows=np.array([3, 0, 6, 2]),
        entry_generations=np.ones(4, np.int64),
        logprob_counts=np.full(4, -1),
        all_greedy=True,
        any_filter=False,
        rules=None,
        prompt_pieces=(),
        written_blocks=rows,
    )
    shape = StepShape(num_tokens=8, num_chunks=4, num_rows=3)
    sent = SentStep.of(torch.from_numpy(pack(work, shape, spare_row=9)), shape)
    assert sent.shape == shape
    assert {name: values.tolist() for name, values in sent._asdict().items()} == {
        "input_ids": [11, 12, 13, 14, 15, 16, 0, 0],
        "positions": [0, 1, 20, 21, 22, 7, 0, 0],
        "owners": [0, 0, 1, 1, 1, 2, -1, -1],
        "chunk_rows": [3, 1, 0, 9],
        "context_lens": [2, 23, 8, 0],
        "entry_rows": [9, 9, 3, 0],
        "entry_positions": [0, 0, 2, 8],
        "entry_states": [0, 0, 1, 5],
        "cu_seqlens_q": [0, 2, 5, 6, 6],
        "decode_rows": [6, 2, 9],
    }
    assert shape_of(work) == StepShape(num_tokens=6, num_chunks=3, num_rows=2)


MODEL = TinyPagedModel()


@lru_cache
def answer_to(prompt: int) -> list[int]:
    return MODEL.greedy(PROMPTS[prompt], MOST_TOKENS)


@pytest.mark.parametrize("seed", range(3))
def test_padded_steps_give_the_dense_answers(seed: int) -> None:
    """Rows come and go, die, wait for blocks; keys and values not yet written are NaN."""
    limits = RowLimits(NUM_ROWS, NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN, VOCAB_SIZE)
    caches = make_kv_caches(NUM_BLOCKS, BLOCK_SIZE)
    runner = Runner(MODEL, CpuBackend(), caches, limits, torch.device("cpu"))
    runner.max_graph_tokens = 64
    launches = Launches()
    runner.pad_steps(launches)
    scheduler = LittleScheduler(Random(seed), runner, answer_to)
    for _ in range(60):
        scheduler.step()
    scheduler.check()
    assert launches.num_mixed >= 5


def test_what_rows_ask_for_beside_tokens_is_computed_eagerly() -> None:
    limits = RowLimits(NUM_ROWS, NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN, VOCAB_SIZE)
    caches = make_kv_caches(NUM_BLOCKS, BLOCK_SIZE)
    runner = Runner(MODEL, CpuBackend(), caches, limits, torch.device("cpu"))
    runner.max_graph_tokens = 64
    launches = Launches()
    runner.pad_steps(launches)
    prompt, drawn = np.array(PROMPTS[1]), answer_to(1)[0]
    many = tuple(token for token in range(40) if token != drawn)
    for sampling, num_mixed in (
        (Sampling(), 1),
        (Sampling(logprobs=2), 1),
        (Sampling(presence_penalty=0.5), 1),
        (Sampling(prompt_logprobs=1), 1),
        (Sampling(stop_token_ids=many), 1),
        (Sampling(stop_token_ids=many[:5]), 2),
    ):
        runner.reset()
        add = RowAdd(
            *(0, 1, sampling, 0, np.array([1, 2]), 0, 20),
            history_token_ids=prompt,
            num_prompt_tokens=len(prompt),
        )
        runner.submit(Plan(1, added_rows=(add,), chunks=(Chunk(0, 0, prompt, is_last=True),)))
        outcome = runner.poll()
        assert outcome is not None
        assert outcome.token_ids.tolist() == [drawn]
        assert launches.num_mixed == num_mixed


class _Twin:
    """Two runners over the same plans; every result must be the same."""

    def __init__(self, first: Runner, second: Runner) -> None:
        self._runners = first, second

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runners[0], name)

    def submit(self, plan: Plan | None) -> None:
        for runner in self._runners:
            runner.submit(plan)

    def poll(self) -> StepOutcome | None:
        first, second = (runner.poll() for runner in self._runners)
        if first is None or second is None:
            assert first is second
            return None
        assert first.rows.tolist() == second.rows.tolist()
        assert first.token_ids.tolist() == second.token_ids.tolist()
        assert first.events.tolist() == second.events.tolist()
        return first


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captured_steps_equal_those_of_their_shape_bit_for_bit(
    tiny_folder: Path, dtype: str
) -> None:
    backend, device = choose_backend("cuda")
    model = load_model(tiny_folder, dtype=dtype, device=device, load_format="auto")
    config = model.config
    shape = (NUM_BLOCKS, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    limits = RowLimits(NUM_ROWS, NUM_BLOCKS, BLOCK_SIZE, 256, config.vocab_size)
    pool = torch.cuda.graph_pool_handle()
    make = partial(capture, pool=pool, error_mode="global")
    runners, all_caches = [], []
    launches = Launches(), Launches(make)
    for launched in launches:
        caches = [
            tuple(torch.full(shape, torch.nan, dtype=config.dtype, device=device) for _ in "kv")
            for _ in range(config.num_layers)
        ]
        runner = Runner(model, backend, caches, limits, device)
        runner.max_graph_tokens = 128
        runner.pad_steps(launched)
        runners.append(runner)
        all_caches.append(caches)
    for seed in range(6):
        for runner in runners:
            runner.reset()
        twin: Any = _Twin(*runners)
        scheduler = LittleScheduler(Random(seed), twin, lambda _: [5])
        for _ in range(80):
            scheduler.step()
        while twin.poll() is not None:
            pass
    assert launches[0].num_mixed == launches[1].num_mixed >= 20
    for eager, captured in zip(*all_caches, strict=True):
        for x, y in zip(eager, captured, strict=True):
            # Of the null block nobody knows what it holds: padding rows read it.
            torch.testing.assert_close(x[1:], y[1:], rtol=0, atol=0, equal_nan=True)
