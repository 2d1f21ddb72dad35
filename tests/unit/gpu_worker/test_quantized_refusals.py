"""Quantised checkpoints that are unclear, broken or of another kind are refused, by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import ConfigurationError
from octavo_worker.models import load_model
from octavo_worker.weights import SINGLE_NAME
from tests.unit.gpu_worker.checkpoint_files import assert_refused, drop, edit
from tests.unit.gpu_worker.quantized_checkpoints import (
    Recipe,
    edit_config,
    quantization_config,
    save_quantized,
)

GPTQ = Recipe("gptq")
AWQ = Recipe("awq")
PACKED = Recipe("compressed-tensors")
O_PROJ = "model.layers.0.self_attn.o_proj"
Change = Callable[[dict[str, torch.Tensor]], object]


def weights(**changes: Any) -> dict[str, Any]:
    """A change of compressed-tensors' inner object."""
    group = quantization_config(PACKED)["config_groups"]["group_0"]
    return {"config_groups": {"group_0": group | {"weights": group["weights"] | changes}}}


def group(**changes: Any) -> dict[str, Any]:
    return {
        "config_groups": {
            "group_0": quantization_config(PACKED)["config_groups"]["group_0"] | changes
        }
    }


FIELDS: dict[str, tuple[Recipe, dict[str, Any], str]] = {
    "no method": (GPTQ, {"quant_method": None}, "quantization_config.quant_method=absent"),
    "bitsandbytes": (GPTQ, {"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes'"),
    "aqlm": (GPTQ, {"quant_method": "aqlm"}, "supported: awq, compressed-tensors, "),
    "gptq 3 bits": (GPTQ, {"bits": 3}, "quantization_config.bits=3 isn't supported"),
    "gptq no bits": (GPTQ, {"bits": None}, "quantization_config.bits=absent"),
    "gptq bits as text": (GPTQ, {"bits": "4"}, "bits='4'"),
    "gptq group 48": (GPTQ, {"group_size": 48}, "group_size=48"),
    "gptq marlin": (GPTQ, {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
    "gptq formats that differ": (
        GPTQ,
        {"format": "gptq_v2"},
        "format='gptq_v2' contradicts checkpoint_format='gptq'",
    ),
    "gptq planar": (GPTQ, {"format": "gptq_p"}, "format='gptq_p'"),
    "gptq rotated": (GPTQ, {"rotation": "hadamard"}, "rotation='hadamard'"),
    "gptq marlin flag": (GPTQ, {"is_marlin_format": True}, "is_marlin_format=True"),
    "gptq head": (GPTQ, {"lm_head": True}, "lm_head=True"),
    "gptq act-order as text": (GPTQ, {"desc_act": "yes"}, "desc_act='yes'"),
    "gptq words": (GPTQ, {"pack_dtype": "int16"}, "pack_dtype='int16'"),
    "gptq other bits of some layers": (
        GPTQ,
        {"dynamic": {r"+:.*\.down_proj": {"bits": 8}}},
        "'bits': 8",
    ),
    "gptq no expression": (GPTQ, {"dynamic": {"-:(": {}}}, "'(' is no regular expression"),
    "gptq list of another format": (
        GPTQ,
        {"modules_to_not_convert": ["o_proj"]},
        "modules_to_not_convert",
    ),
    "awq 8 bits": (AWQ, {"bits": 8}, "quantization_config.bits=8"),
    "awq gemv": (AWQ, {"version": "gemv"}, "version='gemv'"),
    "awq gemv, newer": (AWQ, {"format": "gemv_fast"}, "format='gemv_fast'"),
    "awq marlin": (AWQ, {"version": "marlin"}, "version='marlin'"),
    "awq exllama": (AWQ, {"version": "exllama"}, "version='exllama'"),
    "awq llm-awq": (AWQ, {"backend": "llm-awq"}, "backend='llm-awq'"),
    "awq without zero points": (AWQ, {"zero_point": False}, "zero_point=False"),
    "awq names": (AWQ, {"modules_to_not_convert": "lm_head"}, "must be a list of names"),
    "packed 8 bits": (PACKED, weights(num_bits=8), "group_0.weights.num_bits=8"),
    "packed floats": (PACKED, weights(type="float"), "weights.type='float'"),
    "packed strategy": (PACKED, weights(strategy="tensor"), "weights.strategy='tensor'"),
    "packed group 256": (PACKED, weights(group_size=256), "weights.group_size=256"),
    "packed no symmetry": (PACKED, weights(symmetric=None), "weights.symmetric=absent"),
    "packed dynamic": (PACKED, weights(dynamic=True), "weights.dynamic=True"),
    "packed order": (PACKED, weights(actorder="random"), "weights.actorder='random'"),
    "packed activations": (
        PACKED,
        group(input_activations={"num_bits": 8}),
        "group_0.input_activations",
    ),
    "packed other format": (PACKED, {"format": "int-quantized"}, "format='int-quantized'"),
    "packed not compressed": (PACKED, {"quantization_status": "frozen"}, "status='frozen'"),
    "packed KV cache": (
        PACKED,
        {"kv_cache_scheme": {"num_bits": 8, "type": "int"}},
        "kv_cache_scheme.type",
    ),
    "packed sparse": (
        PACKED,
        {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config.format='sparse-24-bitmask'",
    ),
    "packed no groups": (PACKED, {"config_groups": {}}, "must be one group; they are: none"),
    "packed no expression": (PACKED, {"ignore": ["re:["]}, "'[' is no regular expression"),
}


@pytest.mark.parametrize("name", FIELDS)
def test_fields_are_refused_by_name(name: str, tmp_path: Path) -> None:
    recipe, changes, named = FIELDS[name]
    save_quantized(tmp_path, recipe, num_hidden_layers=1)
    edit_config(tmp_path, **changes)
    assert_refused(tmp_path, "config.json: quantization_config", named)


def test_two_groups_are_refused(tmp_path: Path) -> None:
    save_quantized(tmp_path, PACKED, num_hidden_layers=1)
    groups = quantization_config(PACKED)["config_groups"]
    edit_config(tmp_path, config_groups={**groups, "group_1": groups["group_0"]})
    assert_refused(tmp_path, "must be one group; they are: group_0, group_1")


def test_files_that_contradict_each_other(tmp_path: Path) -> None:
    save_quantized(tmp_path, GPTQ, num_hidden_layers=1)
    old = {"bits": 4, "group_size": 128, "desc_act": False, "sym": False}
    (tmp_path / "quantize_config.json").write_text(json.dumps(old))
    assert_refused(tmp_path, "group_size=32 contradicts quantize_config.json, where it is 128")


def test_file_name_that_leads_out_of_the_folder(tmp_path: Path) -> None:
    save_quantized(tmp_path, GPTQ, num_hidden_layers=1)
    old = {"bits": 4, "group_size": 32, "model_file_base_name": "../other"}
    (tmp_path / "quantize_config.json").write_text(json.dumps(old))
    (tmp_path / SINGLE_NAME).rename(tmp_path.parent / "other.safetensors")
    assert_refused(tmp_path, "'../other.safetensors'")


# --- what is stored isn't what is said ----------------------------------------------------------

DENSE = torch.zeros(128, 128)
STORED: dict[str, tuple[Recipe, Change, tuple[str, ...]]] = {
    "a layer that is not quantised": (
        AWQ,
        lambda t: [
            t.update({f"{O_PROJ}.weight": DENSE}),
            *(t.pop(f"{O_PROJ}.{name}") for name in ("qweight", "qzeros", "scales")),
        ],
        (f"{O_PROJ}.weight is not quantised", "unclear"),
    ),
    "a head that is quantised": (
        AWQ,
        lambda t: t.update({"lm_head.qweight": torch.zeros(128, 48, dtype=torch.int32)}),
        ("lm_head.qweight", "a quantised head isn't supported"),
    ),
    "no scales": (AWQ, drop(f"{O_PROJ}.scales"), (f"{O_PROJ}.scales",)),
    "no zero points": (GPTQ, drop(f"{O_PROJ}.qzeros"), (f"{O_PROJ}.qzeros",)),
    "no order": (GPTQ, drop(f"{O_PROJ}.g_idx"), (f"{O_PROJ}.g_idx",)),
    "no shape": (PACKED, drop(f"{O_PROJ}.weight_shape"), (f"{O_PROJ}.weight_shape",)),
    "both forms": (
        GPTQ,
        lambda t: t.update({f"{O_PROJ}.weight": DENSE}),
        (f"no place for the tensor {O_PROJ}.weight",),
    ),
    "other group size": (
        GPTQ,
        lambda t: t.update({f"{O_PROJ}.scales": t[f"{O_PROJ}.scales"][:2].clone()}),
        (f"{O_PROJ}.scales has the shape [2, 128]", "[4, 128]"),
    ),
    "words of another width": (
        GPTQ,
        lambda t: t.update({f"{O_PROJ}.qweight": t[f"{O_PROJ}.qweight"].to(torch.int64)}),
        (f"{O_PROJ}.qweight has the dtype I64", "I32"),
    ),
    "scales that are integers": (
        AWQ,
        lambda t: t.update({f"{O_PROJ}.scales": t[f"{O_PROJ}.scales"].to(torch.int32)}),
        (f"{O_PROJ}.scales has the dtype I32",),
    ),
    "zero points unasked for": (
        Recipe("compressed-tensors", symmetric=True),
        lambda t: t.update({f"{O_PROJ}.weight_zero_point": torch.zeros(16, 4, dtype=torch.int32)}),
        (f"no place for the tensor {O_PROJ}.weight_zero_point",),
    ),
    "an order unasked for": (
        PACKED,
        lambda t: t.update({f"{O_PROJ}.weight_g_idx": torch.zeros(128, dtype=torch.int32)}),
        (f"no place for the tensor {O_PROJ}.weight_g_idx",),
    ),
}


@pytest.mark.parametrize("name", STORED)
def test_headers_are_refused_before_anything_is_loaded(name: str, tmp_path: Path) -> None:
    recipe, change, named = STORED[name]
    save_quantized(tmp_path, recipe, num_hidden_layers=1)
    edit(tmp_path / SINGLE_NAME, change)
    assert_refused(tmp_path, SINGLE_NAME, *named)


def test_a_layer_that_is_left_out_but_packed(tmp_path: Path) -> None:
    save_quantized(tmp_path, AWQ, num_hidden_layers=1)
    edit_config(tmp_path, modules_to_not_convert=["o_proj"])
    assert_refused(tmp_path, SINGLE_NAME, f"{O_PROJ}.qweight", "leaves this layer out")


def test_a_size_that_the_format_cannot_hold(tmp_path: Path) -> None:
    save_quantized(tmp_path, Recipe("awq", group_size=32), num_hidden_layers=1)
    fields = json.loads((tmp_path / "config.json").read_text()) | {"intermediate_size": 250}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert_refused(tmp_path, "model.layers.0.mlp.gate_proj", "250 outputs are no multiple of 8")


# --- values that can't be right -----------------------------------------------------------------


def fill(name: str, value: float) -> Change:
    return lambda tensors: tensors[f"{O_PROJ}.{name}"].view(-1)[5:6].fill_(value)


VALUES: dict[str, tuple[Recipe, Change, str, str]] = {
    "gptq group too high": (
        Recipe("gptq", act_order=True),
        fill("g_idx", 4),
        "g_idx",
        "groups from 0 to 4; there are 0 to 3",
    ),
    "gptq group below 0": (Recipe("gptq", act_order=True), fill("g_idx", -1), "g_idx", "-1 to 3"),
    "gptq groups of other sizes": (
        Recipe("gptq", act_order=True),
        lambda t: t[f"{O_PROJ}.g_idx"].copy_((torch.arange(128) // 32).clamp(max=2)),
        "g_idx",
        "doesn't put 32 inputs into each group",
    ),
    "gptq order without act-order": (GPTQ, fill("g_idx", 3), "g_idx", "desc_act=false"),
    "gptq symmetric, other zero": (
        Recipe("gptq", symmetric=True),
        fill("qzeros", 0x77777767),
        "qzeros",
        "is checkpoint_format wrong?",
    ),
    "gptq 8 bits symmetric, other zero": (
        Recipe("gptq", bits=8, symmetric=True),
        fill("qzeros", 0x7F7F7F00),
        "qzeros",
        "other zero points than 128",
    ),
    "gptq scale": (GPTQ, fill("scales", float("nan")), "scales", "NaN or infinity"),
    "awq scale": (AWQ, fill("scales", float("inf")), "scales", "NaN or infinity"),
    "packed scale": (PACKED, fill("weight_scale", -float("inf")), "weight_scale", "infinity"),
    "packed order": (
        Recipe("compressed-tensors", act_order=True),
        fill("weight_g_idx", -1),
        "weight_g_idx",
        "groups from -1 to 3",
    ),
    "packed shape": (
        PACKED,
        lambda t: t[f"{O_PROJ}.weight_shape"].fill_(64),
        "weight_shape",
        "says [64, 64]; config.json asks for 128 inputs",
    ),
    "a bias": (
        GPTQ,
        lambda t: t.update({f"{O_PROJ}.bias": torch.full((128,), 0.5)}),
        "bias",
        "config.json has no bias there",
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_are_refused_naming_file_and_tensor(name: str, tmp_path: Path) -> None:
    recipe, change, tensor, why = VALUES[name]
    save_quantized(tmp_path, recipe, num_hidden_layers=1)
    edit(tmp_path / SINGLE_NAME, change)
    with pytest.raises(ConfigurationError) as caught:
        load_model(tmp_path)
    message = str(caught.value)
    assert f"{tmp_path / SINGLE_NAME}: tensor {O_PROJ}.{tensor} " in message
    assert why in message


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_zero_points_under_the_other_label(v2: bool, bits: int, tmp_path: Path) -> None:
    """Taken for what the label says, every weight would be off by a scale: gibberish."""
    recipe = Recipe("gptq", symmetric=True, v2=v2, bits=bits)
    save_quantized(tmp_path, recipe, num_hidden_layers=1)
    edit_config(tmp_path, checkpoint_format="gptq" if v2 else "gptq_v2")
    with pytest.raises(ConfigurationError, match=r"qzeros .*is checkpoint_format wrong\?"):
        load_model(tmp_path)
