"""Layers in 8-bit floats: the numbers of e4m3's definition, whatever format they came from.

The twin is transformers' model with linear layers that round as the definition says: e4m3 values
are listed from their bits here, and rounding looks for the nearest.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from octavo.errors import ConfigurationError
from octavo_worker.backends.cpu import CpuBackend
from octavo_worker.models import Model, load_model
from octavo_worker.models.fp8_linear import Fp8Linear
from octavo_worker.quant.fp8 import E4M3, exact_product, quantize_rows
from octavo_worker.weights import SINGLE_NAME
from tests.tiny_models import TINY_VOCAB_SIZE, tiny_config, tiny_model
from tests.unit.gpu_worker.dense_backend import PagedRun

TOLERANCE = 1e-3  # of the logits' norm


def _e4m3_value(bits: int) -> float:
    """Sign, 4 bits of exponent (bias 7), 3 of mantissa; 0x7F is NaN, there is no infinity."""
    exponent, mantissa = bits >> 3 & 15, bits & 7
    value = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -value if bits & 128 else value


VALUES = torch.tensor([_e4m3_value(bits) for bits in range(127)])


def nearest(x: Tensor) -> Tensor:
    """Of two values as near, the one whose last bit is 0; beyond 448: 448."""
    upper = torch.searchsorted(VALUES, x.abs().clamp(max=448.0).contiguous())
    lower = (upper - 1).clamp(min=0)
    up, down = VALUES[upper] - x.abs(), x.abs() - VALUES[lower]
    takes_lower = (down < up) | ((down == up) & (lower % 2 == 0))
    return torch.where(takes_lower, VALUES[lower], VALUES[upper]).clamp(max=448.0) * x.sign()


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """(values of e4m3, scale) a row."""
    scale = x.abs().amax(dim=1, keepdim=True) / 448
    return nearest(x / scale), scale


class TwinLinear(nn.Module):
    """y = (x8 W8ᵀ) * scales, all numbers as float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        values, scale = rounded(x.flatten(0, -2))
        y = values @ self.weight.t() * scale
        y = y if self.bias is None else y + self.bias
        return y.view(*x.shape[:-1], -1)


Split = Callable[[Tensor], tuple[Tensor, Tensor]]  # weight -> (e4m3 values, stored scale)


def per_channel(weight: Tensor) -> tuple[Tensor, Tensor]:
    return rounded(weight)


def per_tensor(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = (weight.abs().max() / 448).reshape(1)
    return nearest(weight / scale), scale


def scalar(weight: Tensor) -> tuple[Tensor, Tensor]:
    values, scale = per_tensor(weight)
    return values, scale[0]


def compressed(strategy: str, **group: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    groups = {"targets": ["Linear"], "weights": weights, "input_activations": inputs} | group
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": groups},
        "ignore": ["lm_head"],
    }


AUTO_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
STATIC = AUTO_FP8 | {"activation_scheme": "static", "ignored_layers": ["lm_head"]}
ROWS: dict[str, tuple[Split, dict[str, Any], str]] = {
    "compressed-tensors, channel": (per_channel, compressed("channel"), "llama"),
    "compressed-tensors, tensor": (per_tensor, compressed("tensor"), "qwen2"),
    "AutoFP8, dynamic": (scalar, AUTO_FP8, "llama"),
    "AutoFP8, static": (scalar, STATIC, "qwen3"),
    "fused layers, channel": (per_channel, compressed("channel"), "phi3"),
    "fused layers, tensor": (per_tensor, compressed("tensor"), "phi3"),
}


def quantized_twin(split: Split, family: str) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """The twin in float32, and its tensors as they are stored."""
    twin = tiny_model(tiny_config(family))
    stored = {name: tensor.clone() for name, tensor in twin.state_dict().items()}
    for name, module in list(twin.named_modules()):
        if not isinstance(module, nn.Linear) or name == "lm_head":
            continue
        weight = module.weight.detach().float()
        values, scale = split(weight)
        stored[f"{name}.weight"] = values.to(E4M3)
        stored[f"{name}.weight_scale"] = scale
        bias = None if module.bias is None else module.bias.detach()
        twin.set_submodule(name, TwinLinear(values * scale, bias))
    return twin, stored


def save(folder: Path, stored: dict[str, Tensor], config: dict[str, Any], family: str) -> Path:
    tiny_config(family).save_pretrained(folder)
    save_file({name: value.contiguous() for name, value in stored.items()}, folder / SINGLE_NAME)
    edit(folder, quantization_config=config, architectures=[_architecture(family)])
    return folder


def edit(folder: Path, **fields: Any) -> None:
    """Change fields of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _architecture(family: str) -> str:
    return type(tiny_model(tiny_config(family))).__name__


@torch.inference_mode()
def logits_of(model: Model) -> Tensor:
    run = PagedRun(model, CpuBackend())
    sequence = run.add(_tokens())
    run.step(chunks=[(sequence, 24)])
    run.step(chunks=[(sequence, 16)])
    return torch.stack([sequence.logits[i] for i in range(40)])


@torch.inference_mode()
def twin_logits(twin: PreTrainedModel) -> Tensor:
    return twin(torch.tensor([_tokens()])).logits[0].float()


def _tokens() -> list[int]:
    return [(17 * i + 3) % TINY_VOCAB_SIZE for i in range(40)]


def _assert_equal(actual: Tensor, expected: Tensor) -> None:
    assert float((actual - expected).norm() / expected.norm()) < TOLERANCE


def test_rounding_is_the_definitions() -> None:
    x = torch.randn(2000, generator=torch.Generator().manual_seed(0)) * 50
    ties = (VALUES[1:] + VALUES[:-1]) / 2
    for values in (x, ties, -ties, VALUES):
        assert torch.equal(nearest(values), values.to(E4M3).float())
    huge = torch.tensor([[1e30, -1e30, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0], [1e-30, 0.0, 0.0, 0.0]])
    codes, scales = quantize_rows(huge)
    assert codes[0].float().tolist() == [448.0, -448.0, 0.0, 0.0]
    assert not bool(codes.float().isnan().any())
    assert bool((scales > 0).all())


def test_a_token_never_changes_anothers_numbers() -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    weight, scales = quantize_rows(torch.randn(24, 64, generator=torch.Generator().manual_seed(2)))
    x[3] = torch.nan
    x[4] *= 1e6
    y = exact_product(x, weight, scales)
    assert bool(y[3].isnan().all())
    for row in (0, 1, 2, 4):
        torch.testing.assert_close(y[row], exact_product(x[row : row + 1], weight, scales)[0])


@pytest.mark.parametrize("row", ROWS)
def test_stored_layers_equal_their_twin(row: str, tmp_path: Path) -> None:
    split, config, family = ROWS[row]
    twin, stored = quantized_twin(split, family)
    if config.get("activation_scheme") == "static":
        names = [name for name in stored if name.endswith(".weight_scale")]
        stored |= {name.replace("weight_", "input_"): torch.tensor(0.5) for name in names}
    model = load_model(save(tmp_path, stored, config, family), dtype="float32")
    assert isinstance(model.layers[0].qkv, Fp8Linear)
    _assert_equal(logits_of(model), twin_logits(twin))


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_layers_rounded_at_load_equal_their_twin(family: str, tmp_path: Path) -> None:
    plain = tiny_model(tiny_config(family))
    plain.save_pretrained(tmp_path)
    twin, _ = quantized_twin(per_channel, family)
    model = load_model(tmp_path, dtype="float32", quantization="fp8")
    logits = logits_of(model)
    _assert_equal(logits, twin_logits(twin))
    full = load_model(tmp_path, dtype="float32")
    assert model.num_bytes() < 0.6 * full.num_bytes()
    # Rounding shows, and is small.
    reference = logits_of(full)
    error = float((logits - reference).norm() / reference.norm())
    assert 1e-3 < error < 0.3


def test_layers_that_are_left_out_stay_as_they_are(tmp_path: Path) -> None:
    twin, stored = quantized_twin(per_channel, "llama")
    plain = tiny_model(tiny_config("llama"))
    for name, weight in plain.state_dict().items():
        if "layers.1.mlp" in name:
            stored.pop(name.replace(".weight", ".weight_scale"))
            stored[name] = weight
            twin.set_submodule(
                name.removesuffix(".weight"), plain.get_submodule(name.removesuffix(".weight"))
            )
    config = compressed("channel") | {"ignore": ["lm_head", "re:.*layers\\.1\\.mlp.*"]}
    model = load_model(save(tmp_path, stored, config, "llama"), dtype="float32")
    _assert_equal(logits_of(model), twin_logits(twin))


@pytest.mark.parametrize("quantization", ["auto", "fp8"])
def test_random_weights_have_the_wanted_size(quantization: str, tmp_path: Path) -> None:
    tiny_config("llama", initializer_range=0.02).save_pretrained(tmp_path)
    edit(tmp_path, architectures=["LlamaForCausalLM"])
    if quantization == "auto":
        edit(tmp_path, quantization_config=AUTO_FP8)
    model = load_model(tmp_path, dtype="float32", load_format="random", quantization=quantization)
    layer = model.layers[0].qkv
    weight = layer(torch.eye(96)).t()
    assert isinstance(layer, Fp8Linear)
    assert 0.01 < float(weight.std()) < 0.04


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "scheme": (AUTO_FP8 | {"activation_scheme": "none"}, "activation_scheme"),
    "groups": (compressed("group"), "strategy"),
    "weights only": (compressed("channel", input_activations=None), "num_bits"),
    "part of a fused layer": (compressed("channel") | {"ignore": ["re:.*q_proj"]}, "q_proj"),
    "stored otherwise": (compressed("channel") | {"ignore": ["re:.*o_proj"]}, "o_proj.weight"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_named(case: str, tmp_path: Path) -> None:
    config, name = REFUSED[case]
    _, stored = quantized_twin(per_channel, "llama")
    with pytest.raises(ConfigurationError, match=name.replace("[", r"\[")):
        load_model(save(tmp_path, stored, config, "llama"), dtype="float32")


def test_scales_that_are_no_scales_are_refused(tmp_path: Path) -> None:
    _, stored = quantized_twin(per_channel, "llama")
    name = "model.layers.0.self_attn.o_proj.weight_scale"
    stored[name][3] = torch.nan
    with pytest.raises(ConfigurationError, match=f"{name} holds NaN"):
        load_model(save(tmp_path / "nan", stored, compressed("channel"), "llama"))
    stored[name] = torch.ones(7, 1)
    with pytest.raises(ConfigurationError, match=rf"{name} has the shape \[7, 1\]"):
        load_model(save(tmp_path / "shape", stored, compressed("channel"), "llama"))
    del stored[name]
    with pytest.raises(ConfigurationError, match=name):
        load_model(save(tmp_path / "absent", stored, compressed("channel"), "llama"))


def test_what_is_quantised_is_not_rounded_again(tmp_path: Path) -> None:
    _, stored = quantized_twin(per_channel, "llama")
    folder = save(tmp_path, stored, compressed("channel"), "llama")
    load_model(folder, quantization="fp8")
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    edit(folder, quantization_config=awq)
    with pytest.raises(ConfigurationError, match="OCTAVO_QUANTIZATION=fp8"):
        load_model(folder, quantization="fp8")
