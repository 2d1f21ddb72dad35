"""The fused decode step on a card."""

from pathlib import Path

import pytest
import torch

from octavo_worker.backends import choose_backend
from octavo_worker.backends.fused_decode import FusedDecode
from octavo_worker.models import Model, load_model
from octavo_worker.models.mlp import GatedMlp
from octavo_worker.models.quant_linear import MOST_ROWS_OF_CODES, QuantLinear
from tests.kernels.fused_checks import LaterStep, check_step, narrow
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.gpu

PROMPTS = ([5, 6, 7] * 30, [3, 1], [9] * 16, [4, 8, 2] * 50)
NUM_REPLAYS = 10_000


def _step(folder: Path, family: str, dtype: str, **overrides: int) -> LaterStep:
    backend, device = choose_backend("cuda")
    model = load_model(save_tiny_model(folder, family, **overrides), dtype=dtype, device=device)
    with torch.inference_mode():
        return LaterStep.of(model, backend, PROMPTS)


@pytest.mark.parametrize("pdl", [False, True], ids=["plain", "pdl"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-4), ("float16", 2e-2), ("bfloat16", 6e-2)]
)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_equals_the_separate_operations(
    family: str, dtype: str, tolerance: float, pdl: bool, tmp_path: Path
) -> None:
    step = _step(tmp_path, family, dtype)
    with torch.inference_mode():
        check_step(step, pdl=pdl, tolerance=tolerance)


@pytest.mark.parametrize("pdl", [False, True], ids=["plain", "pdl"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-4), ("float16", 2e-2), ("bfloat16", 8e-2)]
)
@pytest.mark.parametrize("form", ["e4m3", "w4"])
def test_narrow_weights(form: str, dtype: str, tolerance: float, pdl: bool, tmp_path: Path) -> None:
    backend, device = choose_backend("cuda")
    shape = {"hidden_size": 384, "intermediate_size": 256, "head_dim": 64}
    model = load_model(save_tiny_model(tmp_path, "llama", **shape), dtype=dtype, device=device)
    assert isinstance(model, Model)
    with torch.inference_mode():
        for layer in model.layers:
            layer.input_norm.mul_(3.0)
        install = narrow(model, form)
        step = LaterStep.of(model, backend, PROMPTS)
        install()
        check_step(step, pdl=pdl, tolerance=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 2e-2), ("bfloat16", 8e-2)])
def test_copies_beside_codes(dtype: str, tolerance: float, tmp_path: Path) -> None:
    """In a step of more rows than read codes; products large enough for tiles of a matrix too."""
    backend, device = choose_backend("cuda")
    shape = {"hidden_size": 1152, "intermediate_size": 4096, "head_dim": 64}
    model = load_model(save_tiny_model(tmp_path, "llama", **shape), dtype=dtype, device=device)
    with torch.inference_mode():
        install = narrow(model, "w4")
        step = LaterStep.of(model, backend, [[3, 1, row] for row in range(MOST_ROWS_OF_CODES)])
        install()
        for layer in model.layers:
            assert isinstance(layer.mlp, GatedMlp)
            for linear in (layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down):
                assert isinstance(linear, QuantLinear)
                linear.keep_matrices(model.config.dtype)
        check_step(step, tolerance=tolerance)


def test_early_starts_change_no_bit(tmp_path: Path) -> None:
    """Captured and replayed, with and without programmatic dependent launch."""
    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4}
    step = _step(tmp_path, "qwen3", "bfloat16", **shape)
    with torch.inference_mode():
        assert _num_different(step) == 0


def _num_different(step: LaterStep) -> int:
    """Logits of `NUM_REPLAYS` replays with early starts that aren't those without."""
    caches = [(k.clone(), v.clone()) for k, v in step.before]
    plain, early = (FusedDecode.of(step.model, pdl=pdl) for pdl in (False, True))
    assert plain is not None
    assert early is not None
    expected = plain.logits(plain.forward(step.inputs, caches))
    early.logits(early.forward(step.inputs, caches))
    num_different = torch.zeros((), dtype=torch.int64, device=expected.device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = early.logits(early.forward(step.inputs, caches))
        num_different += (logits != expected).sum()
    for _ in range(NUM_REPLAYS):
        graph.replay()
    return int(num_different)
