"""Checkpoints quantised by the public definition of each format, and their dequantised twins.

Written with numpy and plain loops from the formats' definitions; shares nothing with the reader.

N outputs, K inputs, G groups; codes [N, K], scales and zeros [N, G], group_of [K].
"""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers import PreTrainedModel

from tests.tiny_models import tiny_config, tiny_model

Array = NDArray[Any]

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
LINEARS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("qkv_proj", "gate_up_proj"),
)
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@dataclass(frozen=True)
class Quantized:
    """One layer: W[n, k] = scales[n, g] * (codes[n, k] - zeros[n, g]), g = group_of[k]."""

    codes: Array
    scales: Array
    zeros: Array
    group_of: Array

    @property
    def weight(self) -> torch.Tensor:
        """float32 [N, K], by the formula."""
        centred = self.codes.astype(np.float32) - self.zeros.astype(np.float32)[:, self.group_of]
        return torch.from_numpy(centred * self.scales.astype(np.float32)[:, self.group_of])


@dataclass(frozen=True)
class Recipe:
    """How to quantise: what a row of the tests is."""

    method: str
    bits: int = 4
    group_size: int = 32
    symmetric: bool = False
    act_order: bool = False
    same_order: bool = True
    v2: bool = False
    writer: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)


def round_to_nearest(weight: Array, group_of: Array, bits: int, symmetric: bool) -> Quantized:
    """Codes by min and max of each group; scales rounded to float16 first, as stored."""
    highest = (1 << bits) - 1
    num_groups = int(group_of.max()) + 1
    scales = np.zeros((len(weight), num_groups), np.float16)
    zeros = np.zeros((len(weight), num_groups), np.int64)
    for group in range(num_groups):
        part = weight[:, group_of == group]
        if symmetric:
            scales[:, group] = 2 * np.abs(part).max(1) / highest
            zeros[:, group] = (highest + 1) // 2
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scales[:, group] = (high - low) / highest
            zeros[:, group] = np.rint(-low / scales[:, group].astype(np.float32))
    zeros = zeros.clip(0, highest)
    wide = scales.astype(np.float32)[:, group_of]
    codes = np.rint(weight / wide + zeros[:, group_of]).clip(0, highest).astype(np.int64)
    return Quantized(codes, scales, zeros, group_of)


def pack_rows(values: Array, bits: int, columns: tuple[int, ...] | None = None) -> Array:
    """uint32 [R, C / per word]: place i of a word, from the low end, is column `columns[i]`."""
    per_word = 32 // bits
    columns = columns or tuple(range(per_word))
    words = np.zeros((values.shape[0], -(-values.shape[1] // per_word)), np.uint32)
    for word in range(words.shape[1]):
        for place, column in enumerate(columns):
            if word * per_word + column < values.shape[1]:
                value = values[:, word * per_word + column].astype(np.uint32)
                words[:, word] |= value << np.uint32(place * bits)
    return words


def _int32(words: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(words).view(np.int32).copy())


def gptq_tensors(layer: Quantized, recipe: Recipe) -> dict[str, torch.Tensor]:
    bits, zeros = recipe.bits, layer.zeros.T
    if recipe.v2:
        words = pack_rows(zeros, bits)
    elif recipe.writer:  # these take 1 off whole words
        ones = sum(1 << shift for shift in range(0, 32, bits))
        words = (pack_rows(zeros, bits).astype(np.int64) - ones).astype(np.uint32)
    else:
        words = pack_rows((zeros - 1) & ((1 << bits) - 1), bits)
    return {
        "qweight": _int32(pack_rows(layer.codes, bits).T),
        "qzeros": _int32(words),
        "scales": torch.from_numpy(layer.scales.T.copy()),
        "g_idx": torch.from_numpy(layer.group_of.astype(np.int32)),
    }


def awq_tensors(layer: Quantized, recipe: Recipe) -> dict[str, torch.Tensor]:
    return {
        "qweight": _int32(pack_rows(layer.codes.T, 4, AWQ_COLUMNS)),
        "qzeros": _int32(pack_rows(layer.zeros.T, 4, AWQ_COLUMNS)),
        "scales": torch.from_numpy(layer.scales.T.copy()),
    }


def compressed_tensors(layer: Quantized, recipe: Recipe) -> dict[str, torch.Tensor]:
    tensors = {
        "weight_packed": _int32(pack_rows(layer.codes, 4)),
        "weight_scale": torch.from_numpy(layer.scales.copy()),
        "weight_shape": torch.tensor(layer.codes.shape),
    }
    if not recipe.symmetric:
        tensors["weight_zero_point"] = _int32(pack_rows(layer.zeros.T, 4).T)
    if recipe.act_order:
        tensors["weight_g_idx"] = torch.from_numpy(layer.group_of.astype(np.int32))
    return tensors


TENSORS: dict[str, Callable[[Quantized, Recipe], dict[str, torch.Tensor]]] = {
    "gptq": gptq_tensors,
    "awq": awq_tensors,
    "compressed-tensors": compressed_tensors,
}


def quantization_config(recipe: Recipe) -> dict[str, Any]:
    """As the format's own tools write it."""
    fields: dict[str, Any] = {"quant_method": recipe.method}
    if recipe.method == "gptq":
        fields |= {
            "bits": recipe.bits,
            "group_size": recipe.group_size,
            "sym": recipe.symmetric,
            "desc_act": recipe.act_order,
            "checkpoint_format": "gptq_v2" if recipe.v2 else "gptq",
            "true_sequential": True,
            "damp_percent": 0.1,
            "lm_head": False,
        }
        if recipe.writer == "autoround":
            fields |= {"autoround_version": "0.15.1", "provider": "auto-round"}
        elif recipe.writer:
            fields["meta"] = {"quantizer": [f"{recipe.writer}:1.4.1"]}
    elif recipe.method == "awq":
        fields |= {
            "bits": 4,
            "group_size": recipe.group_size,
            "version": "gemm",
            "zero_point": True,
            "modules_to_not_convert": None,
        }
    else:
        weights = {
            "num_bits": 4,
            "type": "int",
            "symmetric": recipe.symmetric,
            "strategy": "channel" if recipe.group_size == -1 else "group",
            "group_size": None if recipe.group_size == -1 else recipe.group_size,
            "actorder": "group" if recipe.act_order else None,
            "dynamic": False,
            "block_structure": None,
            "observer": "minmax",
        }
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
        fields |= {
            "config_groups": {"group_0": group | {"output_activations": None}},
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "global_compression_ratio": 1.9,
            "kv_cache_scheme": None,
            "ignore": ["lm_head"],
        }
    return fields | dict(recipe.config)


def group_of_inputs(num_inputs: int, recipe: Recipe, seed: int) -> Array:
    width = num_inputs if recipe.group_size == -1 else recipe.group_size
    groups = list(np.arange(num_inputs) // width)
    if recipe.act_order:
        random.Random(seed).shuffle(groups)
    return np.array(groups)


def quantize(
    weight: torch.Tensor, recipe: Recipe, *, seed: int = 0
) -> tuple[Quantized, dict[str, torch.Tensor]]:
    """A layer and its stored tensors by suffix."""
    values = weight.numpy().copy()
    if not recipe.symmetric:
        values[0::5] = np.abs(values[0::5])  # zero point 0
        values[1::5] = -np.abs(values[1::5])  # the highest zero point
    group_of = group_of_inputs(values.shape[1], recipe, seed if not recipe.same_order else 0)
    layer = round_to_nearest(values, group_of, recipe.bits, recipe.symmetric)
    return layer, TENSORS[recipe.method](layer, recipe)


@dataclass(frozen=True)
class Saved:
    """A checkpoint's folder, transformers' model with the dequantised weights, the layers."""

    folder: Path
    twin: PreTrainedModel
    layers: dict[str, Quantized]


@torch.no_grad()
def save_quantized(
    folder: Path,
    recipe: Recipe,
    family: str = "llama",
    *,
    leave_out: Callable[[str], bool] = lambda _name: False,
    **overrides: Any,
) -> Saved:
    """Quantise a tiny model's linear layers into `folder`; `leave_out` stay as they are."""
    config = tiny_config(family, **(SHAPE | overrides))
    twin = tiny_model(config)
    tensors: dict[str, torch.Tensor] = {}
    layers: dict[str, Quantized] = {}
    for name, parameter in twin.named_parameters():
        module = name.removesuffix(".weight")
        if module.rsplit(".", 1)[-1] not in LINEARS or name == module or leave_out(module):
            tensors[name] = parameter.detach().clone()
            continue
        seed = len(layers)
        layers[module], stored = quantize(parameter.detach(), recipe, seed=seed)
        parameter.copy_(layers[module].weight)
        tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in stored.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = config.to_dict() | {
        "architectures": [type(twin).__name__],
        "quantization_config": quantization_config(recipe),
    }
    (folder / "config.json").write_text(json.dumps(fields))
    return Saved(folder, twin, layers)


def edit_config(folder: Path, **changes: Any) -> None:
    """Change fields of quantization_config."""
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    fields["quantization_config"] |= changes
    path.write_text(json.dumps(fields))
