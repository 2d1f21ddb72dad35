"""The last layer computes only the tokens whose hidden states are read, and stores all keys."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import octavo_worker.step_inputs
from octavo_worker.backends.cpu import CpuBackend
from octavo_worker.graph_shapes import StepShape
from octavo_worker.models import load_model
from octavo_worker.plan import Chunk
from octavo_worker.rows import RowTensors
from octavo_worker.sent_step import SentStep, pack, shape_of
from octavo_worker.step_inputs import StepBounds, step_inputs
from octavo_worker.step_work import StepWork
from tests.tiny_models import save_tiny_model

NUM_ROWS, BLOCK_SIZE, NUM_BLOCKS = 4, 16, 12
# Rows 0 and 1 compute prompts; 2 and 3 decode behind 20 and 5 tokens.
ENDS = Chunk(0, 0, np.arange(3, 24), is_last=True)
GOES_ON = Chunk(1, 0, np.arange(50, 61), is_last=False)
WORK = replace(StepWork.of_nothing(), chunks=(GOES_ON, ENDS), decode_rows=np.array([2, 3]))


class CountingBackend(CpuBackend):
    """Notes how many tokens each layer's MLP has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.num_tokens: list[int] = []

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        self.num_tokens.append(len(gate_up))
        return super().silu_mul(gate_up)


class Step:
    """One step of a tiny model, over caches in which some rows have a history."""

    def __init__(self, folder: Path) -> None:
        self.model = load_model(folder)
        self.backend = CountingBackend()
        config = self.model.config
        shape = (NUM_BLOCKS, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        torch.manual_seed(0)
        self.caches = [(torch.randn(shape), torch.randn(shape)) for _ in range(config.num_layers)]
        self.rows = RowTensors(NUM_ROWS + 1, 4, torch.device("cpu"))
        for row in range(NUM_ROWS):
            self.rows.block_table[row, :2] = torch.tensor([1 + 2 * row, 2 + 2 * row])
        self.rows.is_live[2:4] = True
        self.rows.num_tokens[2:4] = torch.tensor([20, 5])
        self.rows.last_token[2:4] = torch.tensor([7, 9])

    @torch.inference_mode()
    def run(
        self, work: StepWork, num_entries: int | None, shape: StepShape | None = None
    ) -> torch.Tensor:
        padded = shape or shape_of(work)
        sent = SentStep.of(torch.from_numpy(pack(work, padded, NUM_ROWS)), padded)
        bounds = None if shape else StepBounds.of(replace(work, max_context_decode=20))
        inputs = step_inputs(sent, self.rows, BLOCK_SIZE, bounds, num_entries=num_entries)
        return self.model.forward(inputs, self.caches, self.backend)


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Step:
    monkeypatch.setattr(octavo_worker.step_inputs, "_LEAST_UNREAD", 1)
    return Step(save_tiny_model(tmp_path, "llama"))


def test_the_last_layer_computes_the_entries_alone(step: Step) -> None:
    before = [torch.stack(cache).clone() for cache in step.caches]
    every = step.run(WORK, None)
    stored = [torch.stack(cache).clone() for cache in step.caches]
    for cache, values in zip(step.caches, before, strict=True):
        cache[0].copy_(values[0])
        cache[1].copy_(values[1])
    step.backend.num_tokens.clear()
    read = step.run(WORK, 3)
    assert step.backend.num_tokens == [*[34] * (len(step.caches) - 1), 3]
    # The end of the second chunk, then both decode rows.
    torch.testing.assert_close(read, every[[31, 32, 33]], rtol=1e-5, atol=1e-5)
    for cache, expected in zip(step.caches, stored, strict=True):
        assert torch.equal(torch.stack(cache), expected)


def test_a_padded_step_reads_all_its_places(step: Step) -> None:
    expected = step.run(WORK, 3)
    read = step.run(WORK, 5 + 4, StepShape(40, 5, 4))
    # Places of chunks that draw nothing come first, the spare row's behind the decode rows.
    torch.testing.assert_close(read[4:7], expected, rtol=1e-5, atol=1e-5)
    assert read.isfinite().all()


def test_a_step_that_nothing_is_read_of_stores_its_keys(step: Step) -> None:
    work = replace(StepWork.of_nothing(), chunks=(GOES_ON,))
    step.run(work, None)
    stored = [torch.stack(cache).clone() for cache in step.caches]
    for k_cache, v_cache in step.caches:
        k_cache[3:5], v_cache[3:5] = 0, 0
    step.backend.num_tokens.clear()
    read = step.run(work, 0)
    assert read.shape == (0, step.model.config.hidden_size)
    assert step.backend.num_tokens == [11] * (len(step.caches) - 1)
    for cache, expected in zip(step.caches, stored, strict=True):
        written = torch.stack(cache)[:, 3, :, :11]
        assert torch.equal(written, expected[:, 3, :, :11])


def test_a_few_tokens_more_or_less_are_computed_by_all_layers(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(octavo_worker.step_inputs, "_LEAST_UNREAD", 32)
    assert len(step.run(WORK, 3)) == 34
    monkeypatch.setattr(octavo_worker.step_inputs, "_LEAST_UNREAD", 31)
    assert len(step.run(WORK, 3)) == 3
