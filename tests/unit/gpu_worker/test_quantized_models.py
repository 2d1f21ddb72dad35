"""Quantised checkpoints equal their dequantised twins: matrices exactly, logits in float32.

One row for every option of every format that is read; the twin is transformers' model.
"""

import json
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo_worker.backends.cpu import CpuBackend
from octavo_worker.models import Model, load_model
from octavo_worker.models.decoder import EMBED_NAME, HEAD_NAME
from octavo_worker.models.linear import DenseLinear
from octavo_worker.models.quant_linear import PlainPiece, QuantLinear
from octavo_worker.weights import SINGLE_NAME
from tests.tiny_models import TINY_VOCAB_SIZE
from tests.unit.gpu_worker.checkpoint_files import edit
from tests.unit.gpu_worker.dense_backend import PagedRun
from tests.unit.gpu_worker.quantized_checkpoints import Recipe, Saved, edit_config, save_quantized

TOLERANCE = 1e-3  # of the logits' norm; far less is seen


def gptq(**options: Any) -> Recipe:
    return Recipe("gptq", **options)


def awq(**options: Any) -> Recipe:
    return Recipe("awq", **options)


def packed(**options: Any) -> Recipe:
    return Recipe("compressed-tensors", **options)


ROWS: dict[str, tuple[Recipe, str, dict[str, Any]]] = {
    **{
        f"gptq {bits} bits, group {group}": (gptq(bits=bits, group_size=group), "llama", {})
        for bits in (4, 8)
        for group in (32, 64, 128, -1)
    },
    "gptq symmetric": (gptq(symmetric=True), "llama", {}),
    "gptq symmetric v2": (gptq(symmetric=True, v2=True), "llama", {}),
    "gptq 8 bits symmetric": (gptq(bits=8, symmetric=True), "llama", {}),
    "gptq v2": (gptq(v2=True), "llama", {}),
    "gptq 8 bits v2": (gptq(bits=8, v2=True), "llama", {}),
    "gptq by GPTQModel": (gptq(writer="gptqmodel"), "llama", {}),
    "gptq 8 bits by GPTQModel": (gptq(bits=8, writer="gptqmodel"), "llama", {}),
    "gptq by AutoRound": (gptq(writer="autoround"), "llama", {}),
    "gptq v2 by GPTQModel": (gptq(v2=True, writer="gptqmodel"), "llama", {}),
    "gptq act-order": (gptq(act_order=True), "llama", {}),
    "gptq act-order, other orders": (gptq(act_order=True, same_order=False), "llama", {}),
    "gptq act-order, one group": (gptq(act_order=True, group_size=-1), "llama", {}),
    "gptq 8 bits act-order": (gptq(bits=8, act_order=True), "llama", {}),
    "gptq short last group": (gptq(group_size=64), "llama", {"intermediate_size": 160}),
    "gptq qwen2": (gptq(), "qwen2", {}),
    "gptq tied": (gptq(), "llama", {"tie_word_embeddings": True}),
    **{f"awq group {group}": (awq(group_size=group), "llama", {}) for group in (32, 64, 128, -1)},
    "awq qwen2": (awq(), "qwen2", {}),
    "awq tied": (awq(), "qwen2", {"tie_word_embeddings": True}),
    **{
        f"compressed-tensors group {group}": (packed(group_size=group), "llama", {})
        for group in (32, 64, 128, -1)
    },
    "compressed-tensors symmetric": (packed(symmetric=True), "llama", {}),
    "compressed-tensors channel, symmetric": (
        packed(group_size=-1, symmetric=True),
        "llama",
        {"intermediate_size": 252},  # words of which the last isn't full
    ),
    "compressed-tensors act-order": (packed(act_order=True, same_order=False), "llama", {}),
    "compressed-tensors qwen2": (packed(), "qwen2", {}),
    "compressed-tensors tied": (packed(), "llama", {"tie_word_embeddings": True}),
}


@torch.inference_mode()
def logits_of(model: Model) -> torch.Tensor:
    run = PagedRun(model, CpuBackend())
    run.kv_caches = [(k, v.to(k.dtype)) for k, v in run.kv_caches]
    sequence = run.add([(17 * i + 3) % TINY_VOCAB_SIZE for i in range(40)])
    run.step(chunks=[(sequence, 24)])
    run.step(chunks=[(sequence, 16)])
    return torch.stack([sequence.logits[i] for i in range(40)])


@torch.inference_mode()
def assert_equals_twin(saved: Saved, model: Model) -> None:
    ids = torch.tensor([[(17 * i + 3) % TINY_VOCAB_SIZE for i in range(40)]])
    expected = saved.twin(ids).logits[0]
    error = (logits_of(model) - expected).norm() / expected.norm()
    assert error < TOLERANCE


def assert_matrices_equal(saved: Saved, model: Model) -> None:
    """Every layer's matrix is the formula's, bit for bit."""
    named = dict(saved.twin.named_parameters())
    for layer in model.layers:
        fused = (
            (layer.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            (layer.o, ("self_attn.o_proj",)),
            (layer.mlp.gate_up, ("mlp.gate_proj", "mlp.up_proj")),
            (layer.mlp.down, ("mlp.down_proj",)),
        )
        for linear, parts in fused:
            weights = [named[f"{layer.prefix}.{part}.weight"].detach() for part in parts]
            got = linear.weight if isinstance(linear, DenseLinear) else linear.pieces[0].weight
            assert torch.equal(got, torch.cat(weights))


@pytest.mark.parametrize("name", ROWS)
def test_every_option_equals_its_dequantised_twin(name: str, tmp_path: Path) -> None:
    recipe, family, overrides = ROWS[name]
    saved = save_quantized(tmp_path, recipe, family, **overrides)
    model = load_model(tmp_path)
    assert isinstance(model.layers[0].qkv, QuantLinear)
    assert_matrices_equal(saved, model)
    assert_equals_twin(saved, model)
    if recipe.symmetric:
        return
    stored = torch.cat([torch.tensor(layer.zeros).flatten() for layer in saved.layers.values()])
    assert (int(stored.min()), int(stored.max())) == (0, (1 << recipe.bits) - 1)


@pytest.mark.parametrize("recipe", [gptq(act_order=True), awq(), packed()], ids=lambda r: r.method)
@pytest.mark.parametrize("family", ["phi3", "glm4"])
def test_fused_and_interleaved_layers(recipe: Recipe, family: str, tmp_path: Path) -> None:
    """One packed tensor for several layers; outputs that are packed in another order."""
    saved = save_quantized(tmp_path, recipe, family)
    model = load_model(tmp_path)
    assert isinstance(model.layers[0].qkv, QuantLinear)
    assert_equals_twin(saved, model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_matrices_are_rounded_once_to_the_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    saved = save_quantized(tmp_path, gptq(act_order=True))
    model = load_model(tmp_path, dtype=dtype)
    piece = model.layers[0].o.pieces[0]
    assert isinstance(piece, PlainPiece)
    expected = saved.layers["model.layers.0.self_attn.o_proj"].weight.to(dtype)
    assert torch.equal(piece.weight, expected)


# --- layers that stay as they are ---------------------------------------------------------------

LISTS: dict[str, tuple[Recipe, str]] = {
    "awq, a name": (awq(config={"modules_to_not_convert": ["down_proj"]}), "down_proj"),
    "awq, a part of a name": (awq(config={"modules_to_not_convert": ["layers.1."]}), "layers.1."),
    "gptq, dynamic": (gptq(config={"dynamic": {r"-:.*\.down_proj": {}}}), "down_proj"),
    "gptq, modules in a block": (
        gptq(
            config={
                "modules_in_block_to_quantize": [
                    ["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"],
                    ["mlp.up_proj", "mlp.gate_proj"],
                    ["mlp.down_proj"],
                ]
            }
        ),
        "o_proj",
    ),
    "compressed-tensors, full names": (
        packed(config={"ignore": ["lm_head", "model.layers.0.mlp.gate_proj"]}),
        "layers.0.mlp.gate_proj",
    ),
    "compressed-tensors, an expression": (
        packed(config={"ignore": ["lm_head", "re:.*self_attn.[kv]_proj"]}),
        "self_attn.",
    ),
}


@pytest.mark.parametrize("name", LISTS)
def test_layers_that_are_left_out_stay_as_they_are(name: str, tmp_path: Path) -> None:
    recipe, text = LISTS[name]

    def leave_out(module: str) -> bool:
        if name.endswith("an expression"):
            return module.endswith(("k_proj", "v_proj"))  # a part of a fused layer
        return text in module

    saved = save_quantized(tmp_path, recipe, leave_out=leave_out)
    model = load_model(tmp_path)
    assert 0 < len(saved.layers) < 14
    assert_matrices_equal(saved, model)
    assert_equals_twin(saved, model)


# --- heads, biases, files -----------------------------------------------------------------------


def test_a_tied_head_is_held_once(tmp_path: Path) -> None:
    save_quantized(tmp_path, awq(), tie_word_embeddings=True)
    model = load_model(tmp_path)
    assert model.lm_head is model.embed_tokens
    matrices = sum(piece.weight.numel() for layer in model.layers for piece in pieces_of(layer))
    norms = 5 * model.config.hidden_size
    assert model.num_bytes() == 4 * (matrices + norms + model.embed_tokens.numel())


def pieces_of(layer: Any) -> list[PlainPiece]:
    linears = (layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down)
    return [piece for linear in linears for piece in linear.pieces]


def test_a_tied_head_stored_as_a_copy_is_tied(tmp_path: Path) -> None:
    saved = save_quantized(tmp_path, gptq(), tie_word_embeddings=True)
    edit(tmp_path / SINGLE_NAME, lambda t: t.update({HEAD_NAME: t[EMBED_NAME].clone()}))
    model = load_model(tmp_path)
    assert model.lm_head is model.embed_tokens
    assert_equals_twin(saved, model)


def test_biases_of_zeros_count_as_none(tmp_path: Path) -> None:
    """AutoGPTQ stores a bias for each layer, whether the model has one or not."""
    saved = save_quantized(tmp_path, gptq())

    def add(tensors: dict[str, torch.Tensor]) -> None:
        for module, layer in saved.layers.items():
            tensors[f"{module}.bias"] = torch.zeros(len(layer.codes), dtype=torch.float16)

    edit(tmp_path / SINGLE_NAME, add)
    assert_equals_twin(saved, load_model(tmp_path))


@pytest.mark.parametrize("base_name", ["gptq_model-4bit-32g", "model"])
def test_old_folders_say_it_in_a_file_of_their_own(base_name: str, tmp_path: Path) -> None:
    """config.json says nothing, quantize_config.json all, even what the file is called."""
    saved = save_quantized(tmp_path, gptq(act_order=True))
    fields = json.loads((tmp_path / "config.json").read_text())
    old = fields.pop("quantization_config")
    del old["quant_method"], old["checkpoint_format"], old["lm_head"]
    old |= {"model_name_or_path": None, "model_file_base_name": base_name, "static_groups": False}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "quantize_config.json").write_text(json.dumps(old))
    (tmp_path / SINGLE_NAME).rename(tmp_path / f"{base_name}.safetensors")
    assert_equals_twin(saved, load_model(tmp_path))


def test_the_format_may_stand_in_one_of_two_fields(tmp_path: Path) -> None:
    saved = save_quantized(tmp_path, gptq(v2=True))
    edit_config(tmp_path, checkpoint_format=None, format="gptq_v2")
    assert_equals_twin(saved, load_model(tmp_path))


def test_the_writer_may_stand_in_the_other_file(tmp_path: Path) -> None:
    saved = save_quantized(tmp_path, gptq(writer="gptqmodel"))
    edit_config(tmp_path, meta=None)
    old = {"bits": 4, "group_size": 32, "meta": {"quantizer": "gptqmodel:1.0.9"}}
    (tmp_path / "quantize_config.json").write_text(json.dumps(old))
    assert_equals_twin(saved, load_model(tmp_path))


def test_the_log_says_what_was_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_quantized(tmp_path, gptq(act_order=True, group_size=64))
    with caplog.at_level(logging.INFO):
        load_model(tmp_path)
    said = "GPTQ, 4 bits, groups of 64, asymmetric, act-order, zero points each minus 1"
    assert f"quantised: {said}; computed with float32 matrices" in caplog.messages


def test_what_was_loaded_is_let_go_layer_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a model never lies in memory twice."""
    save_quantized(tmp_path, gptq())
    finish, num_finished = QuantLinear.finish, 0

    def watched(linear: QuantLinear) -> None:
        nonlocal num_finished
        loaded = [weakref.ref(slot.target) for _, slot in linear.slots()]
        finish(linear)
        assert [reference() for reference in loaded] == [None] * len(loaded)
        num_finished += 1

    monkeypatch.setattr(QuantLinear, "finish", watched)
    load_model(tmp_path)
    assert num_finished == 8


@pytest.mark.parametrize(
    ("dtype", "is_finite"),
    [("float16", False), ("bfloat16", True), ("auto", True)],
)
def test_activations_beyond_float16(dtype: str, is_finite: bool, tmp_path: Path) -> None:
    """No format's float16 scales may make a bfloat16 model compute in float16."""
    save_quantized(tmp_path, gptq())

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("gate_proj", "up_proj"):
            tensors[f"model.layers.0.mlp.{part}.scales"] *= 300

    edit(tmp_path / SINGLE_NAME, widen)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "bfloat16"}))
    assert bool(logits_of(load_model(tmp_path, dtype=dtype)).isfinite().all()) == is_finite


# --- random weights -----------------------------------------------------------------------------

RANDOM = {
    "gptq": gptq(),
    "gptq 8 bits": gptq(bits=8, v2=True),
    "gptq act-order": gptq(act_order=True, symmetric=True),
    "awq": awq(group_size=128),
    "compressed-tensors": packed(),
    "compressed-tensors act-order": packed(act_order=True, symmetric=True),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_weights_are_as_wide_as_the_configuration_says(name: str, tmp_path: Path) -> None:
    """So that a benchmark computes with sane values, in the form of a real checkpoint."""
    save_quantized(tmp_path, RANDOM[name])
    (tmp_path / SINGLE_NAME).unlink()
    model = load_model(tmp_path, load_format="random", seed=3)
    for layer in model.layers:
        assert isinstance(layer.qkv, QuantLinear)
        assert len(layer.qkv.pieces) == 1
        for piece in pieces_of(layer):
            assert piece.weight.std().item() == pytest.approx(0.02, rel=0.1)
            assert abs(piece.weight.mean().item()) < 0.05 * 0.02
    logits = logits_of(model)
    assert bool(logits.isfinite().all())
    again = load_model(tmp_path, load_format="random", seed=3)
    assert torch.equal(logits_of(again), logits)
    other = load_model(tmp_path, load_format="random", seed=4)
    assert not torch.equal(logits_of(other), logits)


def test_scales_of_bfloat16_are_read(tmp_path: Path) -> None:
    """llm-compressor keeps the model's dtype for its scales."""
    saved = save_quantized(tmp_path, packed(symmetric=True))
    tensors = load_file(tmp_path / SINGLE_NAME)
    name = "model.layers.0.self_attn.o_proj"
    tensors[f"{name}.weight_scale"] = tensors[f"{name}.weight_scale"].bfloat16()
    save_file(tensors, tmp_path / SINGLE_NAME, metadata={"format": "pt"})
    layer = saved.layers[name]
    scales = tensors[f"{name}.weight_scale"].float()[:, torch.tensor(layer.group_of)]
    expected = (torch.tensor(layer.codes).float() - 8) * scales
    assert torch.equal(load_model(tmp_path).layers[0].o.pieces[0].weight, expected)


# --- checkpoints that public tools wrote --------------------------------------------------------

PUBLIC = Path(__file__).with_name("public_checkpoints")


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("packed-symmetric", 1e-5),
        ("packed-asymmetric", 1e-5),
        # These logits were computed in bfloat16.
        ("gptq-asymmetric", 1e-2),
        ("gptq-8-bits", 1e-2),
        ("awq", 1e-2),
    ],
)
def test_public_quantisers_get_their_own_logits(name: str, tolerance: float) -> None:
    model = load_model(PUBLIC / name)
    expected = load_file(PUBLIC / name / "expected.safetensors")
    run = PagedRun(model, CpuBackend())
    sequence = run.add(expected["input_ids"].tolist())
    with torch.inference_mode():
        run.step(chunks=[(sequence, len(sequence.token_ids))])
    logits = torch.stack(list(sequence.logits.values()))
    assert (logits - expected["logits"]).norm() < tolerance * expected["logits"].norm()
