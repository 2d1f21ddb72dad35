"""Layers in 8-bit floats on two ranks: each rounds a token's values that it holds.

Of a layer that is cut along its inputs a rank has a part of them, and rounds that part with its
own scale, never a coarser one than all of them have. So two ranks' numbers aren't one rank's, but
those of a twin whose cut layers round each half by itself.
"""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from octavo_worker.models import load_model
from octavo_worker.models.fp8_linear import Fp8Linear
from tests.fakes.thread_ranks import ThreadExchange, run_ranks
from tests.tiny_models import tiny_config, tiny_model
from tests.unit.gpu_worker.test_fp8_models import (
    TOLERANCE,
    Split,
    TwinLinear,
    compressed,
    logits_of,
    per_channel,
    per_tensor,
    quantized_twin,
    save,
    twin_logits,
)
from tests.unit.gpu_worker.test_tensor_parallel import BLOCKS, NUM_TOKENS, PROMPTS, generate
from tests.unit.gpu_worker.test_worker_process import worker_process

NUM_RANKS = 2
CUT_ALONG_INPUTS = ("o_proj", "down_proj")
NEAR_TIE = 0.02  # what a value that rounds the other way may do to logits


class CutTwin(nn.Module):
    """A `TwinLinear` whose inputs lie on the ranks; its bias is added once."""

    def __init__(self, whole: TwinLinear) -> None:
        super().__init__()
        weights = whole.weight.chunk(NUM_RANKS, dim=1)
        self.first = TwinLinear(weights[0], whole.bias)
        self.second = TwinLinear(weights[1], None)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(NUM_RANKS, dim=-1)
        return self.first(first) + self.second(second)


def cut_twin(split: Split, family: str) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """See `quantized_twin`."""
    twin, stored = quantized_twin(split, family)
    for name, module in list(twin.named_modules()):
        if isinstance(module, TwinLinear) and name.endswith(CUT_ALONG_INPUTS):
            twin.set_submodule(name, CutTwin(module))
    return twin, stored


def rank_logits(folder: Path, quantization: str, exchange: ThreadExchange) -> Tensor:
    model = load_model(folder, dtype="float32", quantization=quantization, exchange=exchange)
    assert isinstance(model.layers[0].qkv, Fp8Linear)
    return logits_of(model)


def check_ranks(folder: Path, quantization: str, twin: PreTrainedModel) -> None:
    first, second = run_ranks(NUM_RANKS, partial(rank_logits, folder, quantization))
    assert torch.equal(first, second)
    expected = twin_logits(twin)
    assert float((first - expected).norm() / expected.norm()) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_layers_rounded_at_load(family: str, tmp_path: Path) -> None:
    twin, _ = cut_twin(per_channel, family)
    tiny_model(tiny_config(family)).save_pretrained(tmp_path)
    check_ranks(tmp_path, "fp8", twin)


@pytest.mark.parametrize(
    ("split", "config"),
    [(per_channel, compressed("channel")), (per_tensor, compressed("tensor"))],
    ids=["channel", "tensor"],
)
def test_stored_layers(split: Split, config: dict[str, Any], tmp_path: Path) -> None:
    twin, stored = cut_twin(split, "qwen2")
    check_ranks(save(tmp_path, stored, config, "qwen2"), "auto", twin)


@pytest.mark.slow
@torch.inference_mode()
def test_ranks_as_processes_answer_as_the_twin_does(tmp_path: Path) -> None:
    twin, _ = cut_twin(per_channel, "qwen2")
    folder = tmp_path / "model"
    tiny_model(tiny_config("qwen2")).save_pretrained(folder)
    flags = (*BLOCKS, "--quantization", "fp8", "--tensor-parallel", str(NUM_RANKS))
    with worker_process(folder, tmp_path, *flags) as worker:
        answers = asyncio.run(generate(worker.address()))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert len(answer) == NUM_TOKENS
        logits = twin(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]
        gaps = logits.amax(dim=-1) - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert bool((gaps < NEAR_TIE).all()), gaps
