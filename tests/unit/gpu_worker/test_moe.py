"""Mixtures of experts: both ways in which checkpoints store them, and who may choose experts."""

from pathlib import Path

import pytest
import torch

from octavo.errors import ConfigurationError
from octavo_worker.backends.cpu import CpuBackend
from octavo_worker.models import load_model
from octavo_worker.models.moe import SparseMlp
from tests.tiny_models import TINY_VOCAB_SIZE, save_tiny_model, tiny_config, tiny_model
from tests.unit.gpu_worker.checkpoint_files import assert_refused, drop, edit
from tests.unit.gpu_worker.dense_backend import DenseBackend, PagedRun, greedy

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")
GATE_NAMES = {
    "mixtral": "model.layers.1.block_sparse_moe.experts.5.w1.weight",
    "qwen2_moe": "model.layers.1.mlp.experts.5.gate_proj.weight",
    "qwen3_moe": "model.layers.1.mlp.experts.5.gate_proj.weight",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_experts_are_the_same_as_single_ones(family: str, tmp_path: Path) -> None:
    single = load_model(save_tiny_model(tmp_path / "single", family))
    fused = save_tiny_model(tmp_path / "fused", family)
    (fused / "model.safetensors").unlink()
    tiny_model(tiny_config(family)).save_pretrained(fused, save_original_format=False)
    model = load_model(fused)
    stored = model.layers[1].mlp, single.layers[1].mlp
    assert all(isinstance(mlp, SparseMlp) for mlp in stored)
    assert torch.equal(stored[0].experts.gate_up, stored[1].experts.gate_up)
    assert torch.equal(stored[0].experts.down, stored[1].experts.down)
    assert model.num_bytes() == single.num_bytes()
    # Every parameter is counted: all are float32.
    assert model.num_bytes() == 4 * sum(
        p.numel() for p in tiny_model(tiny_config(family)).parameters()
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_expert_is_named(family: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, family)
    edit(folder / "model.safetensors", drop(GATE_NAMES[family]))
    assert_refused(folder, GATE_NAMES[family])


def test_an_expert_of_another_size_is_named(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "mixtral")
    name = GATE_NAMES["mixtral"]
    edit(folder / "model.safetensors", lambda tensors: tensors.update({name: torch.zeros(3, 96)}))
    assert_refused(folder, name, "[3, 96]", "[160, 96]")


def test_an_expert_too_many_is_named(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "qwen3_moe")
    name = GATE_NAMES["qwen3_moe"].replace(".5.", ".8.")
    edit(folder / "model.safetensors", lambda tensors: tensors.update({name: torch.zeros(40, 96)}))
    assert_refused(folder, name, "no place")


def test_experts_are_not_rounded_to_8_bits(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "mixtral")
    with pytest.raises(ConfigurationError, match=r"QUANTIZATION=fp8.*experts of Mixtral"):
        load_model(folder, quantization="fp8")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_does_not_depend_on_its_batch(family: str, tmp_path: Path) -> None:
    """Alone, or beside chunks and rows that crowd other experts: the same ids."""
    model = load_model(save_tiny_model(tmp_path, family))
    generator = torch.Generator().manual_seed(8)
    prompts = torch.randint(TINY_VOCAB_SIZE, (4, 30), generator=generator).tolist()

    alone = []
    for ids in prompts:
        run = PagedRun(model, CpuBackend())
        sequence = run.add(ids)
        run.step(chunks=[(sequence, 30)])
        greedy(run, [sequence], 8)
        alone.append(sequence.token_ids)

    run = PagedRun(model, CpuBackend())
    together = [run.add(ids) for ids in prompts]
    run.step(chunks=[(sequence, 7 + 5 * i) for i, sequence in enumerate(together)])
    run.step(chunks=[(sequence, 23 - 5 * i) for i, sequence in enumerate(together)])
    greedy(run, together, 8)
    assert [sequence.token_ids for sequence in together] == alone


@pytest.mark.parametrize("backend", [CpuBackend, DenseBackend])
def test_dead_tokens_choose_no_expert(backend: type) -> None:
    """Whatever they hold: they get zeros, and the others what they get without them."""
    generator = torch.Generator().manual_seed(9)
    x, logits = torch.randn(5, 16, generator=generator), torch.randn(5, 6, generator=generator)
    gate_up = torch.randn(6, 2 * 8, 16, generator=generator)
    down = torch.randn(6, 16, 8, generator=generator)
    slots = torch.tensor([-1, 3, 9, -1, 4])
    live = slots >= 0
    x[~live], logits[~live] = torch.nan, torch.nan
    options = {"top_k": 2, "renormalise": True}
    out = backend().experts(x, logits, gate_up, down, slots, **options)
    assert bool((out[~live] == 0).all())
    expected = DenseBackend().experts(x[live], logits[live], gate_up, down, slots[live], **options)
    torch.testing.assert_close(out[live], expected, rtol=1e-5, atol=1e-5)
