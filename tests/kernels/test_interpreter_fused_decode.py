"""The fused decode step in Triton's interpreter."""

from pathlib import Path

import pytest
import torch

from octavo_kernels import launch
from octavo_worker.backends.cpu import CpuBackend
from octavo_worker.models import Model, load_model
from tests.kernels.fused_checks import LaterStep, check_step, narrow
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.inference_mode()
def test_equals_the_separate_operations(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A small card: fewer programs to interpret.
    monkeypatch.setattr(launch, "_DEFAULT_NUM_SMS", 4)
    model = load_model(save_tiny_model(tmp_path, family, num_hidden_layers=1))
    assert isinstance(model, Model)
    check_step(LaterStep.of(model, CpuBackend(), prompts=([5, 6, 7] * 12, [3, 1])))


@pytest.mark.parametrize("form", ["e4m3", "w4"])
@torch.inference_mode()
def test_narrow_weights(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_DEFAULT_NUM_SMS", 4)
    shape = {"num_hidden_layers": 2, "hidden_size": 384, "intermediate_size": 256, "head_dim": 64}
    model = load_model(save_tiny_model(tmp_path, "llama", **shape))
    assert isinstance(model, Model)
    install = narrow(model, form)
    step = LaterStep.of(model, CpuBackend(), prompts=([5, 6, 7] * 4, [3, 1]))
    install()
    check_step(step)
