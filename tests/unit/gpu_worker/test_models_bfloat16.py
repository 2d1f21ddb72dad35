"""Every family in bfloat16, on the CPU and on a card: log-probabilities close to float32's.

float32 on the CPU equals transformers (`test_models_forward`, `test_models_layouts`).
"""

from pathlib import Path

import pytest
import torch

from octavo_worker.backends import Backend, choose_backend
from octavo_worker.backends.cpu import CpuBackend
from octavo_worker.models import FAMILIES, Family, Model, load_model
from tests.unit.gpu_worker.dense_backend import PagedRun
from tests.unit.gpu_worker.test_models_forward import prompt
from tests.unit.gpu_worker.test_models_layouts import save

# Mean over the vocabulary, for the median token: 0.02 is seen. Not for all tokens: where experts
# are chosen, a rounded score may choose another one.
TOLERANCE = 0.05


@torch.inference_mode()
def logprobs(model: Model, backend: Backend, num_prompt: int, num_decoded: int) -> torch.Tensor:
    """[tokens, V]: a prompt in two chunks, then decoded tokens that are given."""
    run = PagedRun(model, backend)
    sequence = run.add(prompt(num_prompt + num_decoded, seed=9))
    run.step(chunks=[(sequence, num_prompt // 2)])
    run.step(chunks=[(sequence, num_prompt - num_prompt // 2)])
    for _ in range(num_decoded):
        run.step(rows=[sequence])
    logits = torch.stack([sequence.logits[i] for i in range(sequence.num_computed)])
    return logits.log_softmax(-1).cpu()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_logprobs_are_close_to_float32(family: Family, device: str, tmp_path: Path) -> None:
    folder = save(tmp_path, family.model_type)
    expected = logprobs(load_model(folder), CpuBackend(), 40, 6)
    backend, chosen = choose_backend(device)
    model = load_model(folder, dtype="bfloat16", device=chosen)
    error = (logprobs(model, backend, 40, 6) - expected).abs()
    assert 0 < error.mean(-1).median() < TOLERANCE
