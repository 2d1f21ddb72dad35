"""Layers in 8-bit floats with a scale a block: the numbers that transformers reads from them.

Whoever dequantises multiplies every weight by the scale of its block; the models' twin in
transformers holds these products.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, PreTrainedModel

from octavo.errors import ConfigurationError
from octavo_worker.footprint import footprint
from octavo_worker.models import load_model
from octavo_worker.models.fp8_linear import Fp8Linear
from octavo_worker.models.linear import DenseLinear
from octavo_worker.quant.block_scales import BlockScales
from octavo_worker.quant.fp8 import E4M3
from octavo_worker.slots import BadValuesError
from tests.fakes.thread_ranks import ThreadExchange, run_ranks
from tests.tiny_models import tiny_config, tiny_model
from tests.unit.gpu_worker.test_fp8_models import edit, logits_of, save, twin_logits

HEIGHT, WIDTH = 32, 16
DEEPSEEK: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [HEIGHT, WIDTH],
    "modules_to_not_convert": ["lm_head"],
}
WEIGHTS = {
    "num_bits": 8,
    "type": "float",
    "strategy": "block",
    "block_structure": [HEIGHT, WIDTH],
    "symmetric": True,
}
INPUTS = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": INPUTS}
    },
    "ignore": ["lm_head"],
}
ROWS = {
    "DeepSeek's, llama": (DEEPSEEK, "weight_scale_inv", "llama"),
    "DeepSeek's, one tensor for q, k and v": (DEEPSEEK, "weight_scale_inv", "phi3"),
    "DeepSeek's, experts": (DEEPSEEK, "weight_scale_inv", "qwen3_moe"),
    "compressed-tensors": (COMPRESSED, "weight_scale", "qwen2"),
}


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(e4m3 [N, K], scales, the products float32 [N, K]), block by block."""
    size, in_size = weight.shape
    values = torch.empty(size, in_size, dtype=E4M3)
    scales = torch.empty(-(-size // HEIGHT), -(-in_size // WIDTH))
    products = torch.empty(size, in_size)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = (
                slice(i * HEIGHT, (i + 1) * HEIGHT),
                slice(j * WIDTH, (j + 1) * WIDTH),
            )
            block = weight[place].float()
            scales[i, j] = block.abs().max() / 448
            values[place] = (block / scales[i, j]).to(E4M3)
            products[place] = values[place].float() * scales[i, j]
    return values, scales, products


def twin_in_blocks(family: str, suffix: str) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """transformers' model of the products, and its tensors as they are stored."""
    twin = tiny_model(tiny_config(family))
    stored: dict[str, Tensor] = {}
    for name, tensor in twin.state_dict().items():
        if tensor.ndim < 2 or name.startswith(("lm_head", "model.embed")) or "mlp.gate." in name:
            stored[name] = tensor.clone()
            continue
        for part, weight in _as_stored(name, tensor):
            values, scales, products = in_blocks(weight)
            stored[part] = values
            stored[f"{part.removesuffix('weight')}{suffix}"] = scales
            weight.copy_(products)
    return twin, stored


def _as_stored(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """A matrix under its name; experts, of which transformers holds one tensor, one by one."""
    if tensor.ndim == 2:
        return [(name, tensor)]
    module, _, last = name.rpartition(".")
    if last == "down_proj":
        return [(f"{module}.{i}.down_proj.weight", part) for i, part in enumerate(tensor)]
    parts: list[tuple[str, Tensor]] = []
    for i, expert in enumerate(tensor):
        gate, up = expert.chunk(2)
        parts += [(f"{module}.{i}.gate_proj.weight", gate), (f"{module}.{i}.up_proj.weight", up)]
    return parts


@pytest.mark.parametrize("row", ROWS)
def test_layers_equal_their_twin(
    row: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, suffix, family = ROWS[row]
    twin, stored = twin_in_blocks(family, suffix)
    assert any(value.dtype == E4M3 for value in stored.values())
    folder = save(tmp_path, stored, config, family)
    with caplog.at_level(logging.INFO):
        model = load_model(folder, dtype="float32")
    assert isinstance(model.layers[0].qkv, DenseLinear)
    assert "a scale a block of 32 x 16; computed in torch.float32" in caplog.text
    torch.testing.assert_close(logits_of(model), twin_logits(twin), rtol=1e-4, atol=1e-4)
    plain = tiny_model(tiny_config(family))
    assert not torch.allclose(twin_logits(twin), twin_logits(plain), rtol=1e-4, atol=1e-4)


def test_transformers_reads_the_same(tmp_path: Path) -> None:
    twin, stored = twin_in_blocks("llama", "weight_scale_inv")
    folder = save(tmp_path, stored, DEEPSEEK, "llama")
    read = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        quantization_config=FineGrainedFP8Config(
            dequantize=True, weight_block_size=(HEIGHT, WIDTH)
        ),
    )
    assert isinstance(read.model.layers[0].mlp.up_proj, nn.Linear)
    torch.testing.assert_close(twin_logits(read), twin_logits(twin), rtol=1e-4, atol=1e-4)


def test_two_ranks_take_their_parts(tmp_path: Path) -> None:
    """Blocks lie across the ranks' borders: each reads the whole layer's."""
    twin, stored = twin_in_blocks("llama", "weight_scale_inv")
    folder = save(tmp_path, stored, DEEPSEEK, "llama")

    def logits(exchange: ThreadExchange) -> Tensor:
        return logits_of(load_model(folder, dtype="float32", exchange=exchange))

    first, second = run_ranks(2, logits)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, twin_logits(twin), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(32, 16), (64, 48), (1, 1), (33, 17), (100, 200)])
def test_sizes_that_are_no_multiple_of_a_block(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values, scales, products = in_blocks(weight)
    blocks = BlockScales(HEIGHT, WIDTH, "weight_scale_inv")
    assert blocks.shape(shape) == scales.shape
    assert torch.equal(blocks.widened(values, scales), products)
    scales[-1, -1] = torch.nan
    with pytest.raises(BadValuesError, match="weight_scale_inv"):
        blocks.widened(values, scales)


def test_layers_may_be_rounded_again(tmp_path: Path) -> None:
    twin, stored = twin_in_blocks("llama", "weight_scale_inv")
    folder = save(tmp_path, stored, DEEPSEEK, "llama")
    model = load_model(folder, dtype="float32", quantization="fp8")
    assert isinstance(model.layers[0].qkv, Fp8Linear)
    error = logits_of(model) - twin_logits(twin)
    assert 1e-4 < float(error.norm() / twin_logits(twin).norm()) < 0.3


def test_the_plan_counts_what_is_kept(tmp_path: Path) -> None:
    _, stored = twin_in_blocks("llama", "weight_scale_inv")
    folder = save(tmp_path, stored, DEEPSEEK, "llama")
    kept = footprint(folder, dtype="bfloat16")
    assert kept.weight_format == "8-bit floats (e4m3), a scale a block of 32 x 16, as bfloat16"
    edit(folder, quantization_config=None)
    assert kept.weight_bytes == footprint(folder, dtype="bfloat16").weight_bytes


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "one size": (DEEPSEEK | {"weight_block_size": [128]}, "weight_block_size"),
    "no sizes": (DEEPSEEK | {"weight_block_size": [128, "x"]}, "weight_block_size"),
    "an empty block": (DEEPSEEK | {"weight_block_size": [0, 128]}, "weight_block_size"),
    "static": (DEEPSEEK | {"activation_scheme": "static"}, "activation_scheme"),
    "e5m2": (DEEPSEEK | {"fmt": "e5m2"}, "fmt"),
    "other blocks": (DEEPSEEK | {"weight_block_size": [16, 16]}, r"proj.weight_scale_inv is F32"),
    "scales of another name": (COMPRESSED, "F8_E4M3"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configurations_that_are_refused(case: str, tmp_path: Path) -> None:
    config, name = CONFIGS[case]
    _, stored = twin_in_blocks("llama", "weight_scale_inv")
    with pytest.raises(ConfigurationError, match=name):
        load_model(save(tmp_path, stored, config, "llama"), dtype="float32")


def test_scales_that_fit_no_layer_are_refused(tmp_path: Path) -> None:
    _, stored = twin_in_blocks("llama", "weight_scale_inv")
    module = "model.layers.1.mlp.down_proj"
    scales = stored[f"{module}.weight_scale_inv"]

    def refused(number: int, *, expected: str, **changed: Tensor | None) -> None:
        tensors = dict[str, Tensor | None](stored)
        tensors |= {f"{module}.{name}": value for name, value in changed.items()}
        kept = {name: value for name, value in tensors.items() if value is not None}
        with pytest.raises(ConfigurationError, match=expected):
            load_model(save(tmp_path / str(number), kept, DEEPSEEK, "llama"), dtype="float32")

    refused(0, weight_scale_inv=scales[:1], expected=f"{module}.weight_scale_inv is F32")
    refused(1, weight_scale_inv=scales.to(torch.int32), expected="need floats")
    refused(2, weight_scale_inv=scales * torch.nan, expected=f"{module}.weight has NaN")
    refused(3, weight=None, expected=f"{module}.weight, which no file holds")
    refused(4, weight=stored[f"{module}.weight"].float(), expected="is no matrix in F8_E4M3")
    refused(5, weight_scale_inv=None, expected=f"{module}.weight has the dtype F8_E4M3")
