"""What is planned is what the worker has: weights and KV bytes of every kind of model."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import ConfigurationError
from octavo.settings import WorkerSettings
from octavo_worker.footprint import footprint
from octavo_worker.kv_cache import size_kv_cache
from octavo_worker.models import load_any_model
from octavo_worker.weights import SINGLE_NAME, Checkpoint
from tests.tiny_fallbacks import save_fallback_model
from tests.tiny_models import save_tiny_model
from tests.unit.gpu_worker.quantized_checkpoints import Recipe, save_quantized

NATIVE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("qwen2", {"tie_word_embeddings": True}),
    "norms of heads": ("qwen3", {}),
    "experts": ("mixtral", {}),
    "experts and a shared one": ("qwen2_moe", {}),
}


def assert_is_the_workers(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also what it logs; and with the weights gone."""
    planned = footprint(folder)
    model = load_any_model(folder, dtype=planned.kv_dtype)
    assert planned.weight_bytes == model.num_bytes()
    settings = WorkerSettings(num_kv_blocks=100)
    with caplog.at_level(logging.INFO):
        size = size_kv_cache(model.config, settings, torch.device("cpu"), 512)
    assert planned.kv_bytes_per_token == size.bytes_per_token
    per_block = 16 * planned.kv_bytes_per_token / 1024
    assert f"{per_block:.1f} KiB a block of 16" in caplog.text
    assert planned.max_model_len == model.config.max_model_len
    assert planned.num_heads == model.config.num_heads
    assert planned.num_kv_heads == model.config.num_kv_heads
    with Checkpoint(folder) as checkpoint:
        stored = sum(tensor.num_bytes for tensor in checkpoint.tensors.values())
    assert planned.stored_bytes == stored
    (folder / SINGLE_NAME).unlink()
    bare = footprint(folder)
    assert bare.stored_bytes == 0
    assert bare.weight_bytes == planned.weight_bytes


@pytest.mark.parametrize("name", NATIVE)
def test_native_models(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    family, overrides = NATIVE[name]
    folder = save_tiny_model(tmp_path, family, **overrides)
    assert footprint(folder).implementation == "native"
    assert_is_the_workers(folder, caplog)


@pytest.mark.parametrize("model_type", ["olmo2", "gpt2"])
def test_models_in_transformers_code(
    model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_fallback_model(tmp_path, model_type)
    assert footprint(tmp_path).implementation == "transformers"
    assert_is_the_workers(tmp_path, caplog)


def test_what_a_token_reads(tmp_path: Path) -> None:
    """All but the embedding, which is looked up; of experts those that it's sent to."""
    embedding, float32 = 384 * 96, 4
    plain = footprint(save_tiny_model(tmp_path / "plain"))
    assert plain.params_per_token == plain.weight_bytes // float32 - embedding
    assert plain.read_bytes == plain.read_bytes_of_one == plain.params_per_token * float32
    tied = footprint(save_tiny_model(tmp_path / "tied", tie_word_embeddings=True))
    assert tied.params_per_token == plain.params_per_token
    assert tied.weight_bytes == plain.weight_bytes - embedding * float32
    sparse = footprint(save_tiny_model(tmp_path / "sparse", "qwen3_moe"))
    idle = 2 * (8 - 3) * 3 * 96 * 40  # layers, experts, matrices
    assert sparse.params_per_token == sparse.weight_bytes // float32 - embedding - idle
    assert sparse.read_bytes - sparse.read_bytes_of_one == idle * float32


def test_dtypes_are_those_of_a_card(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, dtype=torch.bfloat16)
    stored, wide = footprint(folder), footprint(folder, dtype="float32")
    assert (stored.weight_format, stored.kv_dtype) == ("bfloat16", "bfloat16")
    assert (wide.weight_format, wide.kv_dtype) == ("float32", "float32")
    assert wide.weight_bytes == 2 * stored.weight_bytes
    assert wide.kv_bytes_per_token == 2 * stored.kv_bytes_per_token


def test_codes_of_four_bits_stay_packed(tmp_path: Path) -> None:
    save_quantized(tmp_path, Recipe("awq"))
    planned = footprint(tmp_path, dtype="bfloat16")
    assert "4" in planned.weight_format
    linears = 2 * (2 * 128 * 128 + 2 * 128 * 32 + 3 * 128 * 256)
    heads = 2 * 2 * 384 * 128
    groups = linears // 32
    packed = linears // 2 + groups * (2 + 0.5) + heads  # codes; scales and zeros
    assert planned.weight_bytes == pytest.approx(packed, rel=0.01)
    assert planned.copies_bytes == 2 * linears
    # With copies, many rows read what the plain model's would: heads aren't packed anyway.
    assert planned.read_bytes_with_copies == 2 * planned.params_per_token > 2 * planned.read_bytes
    wide = footprint(tmp_path, dtype="float32")
    assert wide.copies_bytes == 0
    assert wide.read_bytes_with_copies == wide.read_bytes
    # Arithmetic is that of the plain model.
    assert planned.params_per_token == pytest.approx(linears + 384 * 128, rel=0.01)


def test_layers_rounded_to_8_bit_floats(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, dtype=torch.bfloat16)
    planned = footprint(folder, quantization="fp8")
    model = load_any_model(folder, dtype="bfloat16", quantization="fp8")
    assert planned.weight_bytes == model.num_bytes()
    assert "e4m3" in planned.weight_format
    assert planned.params_per_token == footprint(folder).params_per_token


def test_caches_of_8_bit_floats(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, dtype=torch.bfloat16)
    planned = footprint(folder, kv_cache_dtype="fp8")
    settings = WorkerSettings(num_kv_blocks=100, kv_cache_dtype="fp8")
    model = load_any_model(folder, dtype="bfloat16")
    size = size_kv_cache(model.config, settings, torch.device("cpu"), 512)
    assert planned.kv_bytes_per_token == size.bytes_per_token
    assert planned.kv_bytes_per_token * 2 == footprint(folder).kv_bytes_per_token
    assert planned.kv_dtype == "float8_e4m3fn"


@pytest.mark.parametrize("name", ["quantization", "kv_cache_dtype"])
def test_models_in_transformers_code_have_no_8_bit_floats(name: str, tmp_path: Path) -> None:
    save_fallback_model(tmp_path, "olmo2")
    with pytest.raises(ConfigurationError, match=f"--{name.replace('_', '-')} fp8"):
        footprint(tmp_path, **{name: "fp8"})


def test_shapes_that_depend_on_values_are_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    save_fallback_model(tmp_path, "olmo2", rope_parameters=rope)
    with pytest.raises(ConfigurationError, match="can't be told without its weights"):
        footprint(tmp_path)


def test_a_length_beyond_the_models_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    assert footprint(folder, max_model_len=64).max_model_len == 64
    with pytest.raises(ConfigurationError, match="OCTAVO_MAX_MODEL_LEN=4096"):
        footprint(folder, max_model_len=4096)
