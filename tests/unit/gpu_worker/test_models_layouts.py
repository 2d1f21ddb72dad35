"""Checkpoints in other layouts than Llama's: the same answers, and the same strictness."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from octavo.errors import ConfigurationError
from octavo_worker.backends.cpu import CpuBackend
from octavo_worker.models import FAMILIES, Family, ModelConfig, load_model
from octavo_worker.models.layout import Heads, Layout
from octavo_worker.slots import FusedSlot, Slot
from tests.original_layouts import save_chatglm, save_qwen1
from tests.tiny_models import save_tiny_model, tiny_config
from tests.unit.gpu_worker.checkpoint_files import assert_refused, drop, edit
from tests.unit.gpu_worker.dense_backend import PagedRun, greedy
from tests.unit.gpu_worker.test_models_forward import assert_equal, prompt

CASES: dict[str, Callable[[Path], PreTrainedModel]] = {
    "chatglm3": save_chatglm,
    "chatglm3 by its other name": lambda folder: save_chatglm(
        folder, architectures=["ChatGLMForConditionalGeneration"]
    ),
    "chatglm3 larger base": lambda folder: save_chatglm(
        folder, rope={"rope_theta": 500_000.0}, rope_ratio=50
    ),
    "chatglm2 positions drawn closer": lambda folder: save_chatglm(
        folder,
        rope={"rope_type": "linear", "factor": 16.0},
        rope_ratio=16,
        _name_or_path="THUDM/chatglm2-6b-32k",
    ),
    "qwen1": save_qwen1,
}


@pytest.mark.parametrize("name", CASES)
def test_original_layouts_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = CASES[name](tmp_path)
    run = PagedRun(load_model(tmp_path), CpuBackend())
    first, second = run.add(prompt(50, seed=1)), run.add(prompt(33, seed=2))
    run.step(chunks=[(first, 20), (second, 33)])
    run.step(chunks=[(first, 30)])
    greedy(run, [first, second], 12)
    assert_equal(reference, first, 50)
    assert_equal(reference, second, 33)


QKV = {
    "phi3": "model.layers.1.self_attn.qkv_proj.weight",
    "chatglm": "transformer.encoder.layers.1.self_attention.query_key_value.bias",
    "qwen": "transformer.h.1.attn.c_attn.weight",
}


def save(folder: Path, model_type: str) -> Path:
    """A tiny checkpoint of any family."""
    if model_type in ORIGINAL:
        ORIGINAL[model_type](folder)
        return folder
    return save_tiny_model(folder, model_type)


ORIGINAL: dict[str, Callable[[Path], PreTrainedModel]] = {
    "chatglm": save_chatglm,
    "qwen": save_qwen1,
}


@pytest.mark.parametrize("model_type", QKV)
def test_stored_tensors_are_named_as_in_the_file(model_type: str, tmp_path: Path) -> None:
    path, name = save(tmp_path, model_type) / "model.safetensors", QKV[model_type]
    edit(path, lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    assert_refused(tmp_path, name, "model.safetensors", "has the shape")
    edit(path, drop(name))
    assert_refused(tmp_path, "needs", name)
    save(tmp_path, model_type)
    edit(path, lambda tensors: tensors.update(odd=torch.zeros(1)))
    assert_refused(tmp_path, "no place", "odd")


def test_tied_heads_go_by_their_stored_names(tmp_path: Path) -> None:
    reference = save_qwen1(tmp_path, tie_word_embeddings=True)
    edit(tmp_path / "model.safetensors", drop("lm_head.weight"))
    model = load_model(tmp_path)
    assert model.lm_head is model.embed_tokens
    assert torch.equal(model.embed_tokens, reference.get_input_embeddings().weight)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_random_weights_of_every_family(family: Family, tmp_path: Path) -> None:
    """config.json is enough, and the decoder's own names serve for every layout."""
    if family.model_type in ORIGINAL:
        save(tmp_path, family.model_type)
        (tmp_path / "model.safetensors").unlink()
    else:
        config = tiny_config(family.model_type)
        config.architectures = [family.architecture]
        config.save_pretrained(tmp_path)
    model = load_model(tmp_path, load_format="random", seed=3)
    assert model.config.architecture == family.architecture
    run = PagedRun(model, CpuBackend())
    sequence = run.add(prompt(20, seed=1))
    run.step(chunks=[(sequence, 20)])
    logits = torch.stack(list(sequence.logits.values()))
    assert logits.isfinite().all()
    assert logits.std() > 0


CHATGLM3_6B: dict[str, Any] = {
    "_name_or_path": "THUDM/chatglm3-6b",
    "model_type": "chatglm",
    "architectures": ["ChatGLMModel"],
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False,
    "attention_softmax_in_fp32": True,
    "ffn_hidden_size": 13696,
    "fp32_residual_connection": False,
    "hidden_size": 4096,
    "kv_channels": 128,
    "layernorm_epsilon": 1e-05,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 32,
    "num_layers": 28,
    "original_rope": True,
    "padded_vocab_size": 65024,
    "post_layer_norm": True,
    "rmsnorm": True,
    "seq_length": 8192,
    "torch_dtype": "float16",
    "eos_token_id": 2,
}
QWEN_7B: dict[str, Any] = {
    "architectures": ["QWenLMHeadModel"],
    "model_type": "qwen",
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "kv_channels": 128,
    "layer_norm_epsilon": 1e-06,
    "max_position_embeddings": 32768,
    "no_bias": True,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rotary_emb_base": 10000,
    "rotary_pct": 1.0,
    "scale_attn_weights": True,
    "seq_length": 8192,
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
    "vocab_size": 151936,
}


def read(folder: Path, fields: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(fields))
    return ModelConfig.from_folder(folder)


def test_fields_of_chatglm(tmp_path: Path) -> None:
    config = read(tmp_path, CHATGLM3_6B)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (28, 32, 2)
    assert (config.hidden_size, config.intermediate_size) == (4096, 13696)
    assert (config.head_dim, config.rope.rotary_dim, config.rope.theta) == (128, 64, 10_000.0)
    assert (config.vocab_size, config.max_model_len) == (65024, 8192)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, False, False)
    assert config.rms_norm_eps == 1e-5
    assert config.eos_token_ids == (2,)


def test_rope_ratio_is_read_by_generation(tmp_path: Path) -> None:
    longer = CHATGLM3_6B | {"seq_length": 32768}
    third = read(tmp_path, longer | {"rope_ratio": 50})
    assert (third.rope.rope_type, third.rope.theta) == ("default", 500_000.0)
    of_second = {"_name_or_path": "THUDM/chatglm2-6b-32k", "rope_ratio": 16}
    second = read(tmp_path, longer | of_second)
    assert (second.rope.rope_type, second.rope.factor) == ("linear", 16.0)
    assert second.rope.theta == 10_000.0
    assert second.max_model_len == third.max_model_len == 32768


def test_fields_of_the_first_qwen(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN_7B)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (32, 32, 32)
    assert (config.hidden_size, config.intermediate_size) == (4096, 11008)
    assert (config.head_dim, config.rope.rotary_dim, config.rope.theta) == (128, 128, 10_000.0)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, False, False)
    assert config.rms_norm_eps == 1e-6


@pytest.mark.parametrize(
    ("flags", "longest"),
    [((True, True), 8192), ((True, False), 8192), ((False, True), 8192), ((False, False), 32768)],
)
def test_the_first_qwen_ends_where_its_positions_would_change(
    flags: tuple[bool, bool], longest: int, tmp_path: Path
) -> None:
    fields = {"use_dynamic_ntk": flags[0], "use_logn_attn": flags[1]}
    assert read(tmp_path, QWEN_7B | fields).max_model_len == longest


@pytest.mark.parametrize(
    ("fields", "change", "named"),
    [
        (CHATGLM3_6B, {"position_encoding_2d": True}, "first generation"),
        (CHATGLM3_6B, {"add_bias_linear": True}, "add_bias_linear=True"),
        (CHATGLM3_6B, {"rmsnorm": False}, "rmsnorm=False"),
        (CHATGLM3_6B, {"post_layer_norm": False}, "post_layer_norm=False"),
        (CHATGLM3_6B, {"multi_query_attention": False}, "multi_query_attention=False"),
        (
            CHATGLM3_6B,
            {"apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm=True",
        ),
        (CHATGLM3_6B, {"pre_seq_len": 128}, "pre_seq_len=128"),
        (CHATGLM3_6B, {"quantization_bit": 4}, "quantization_bit=4"),
        (CHATGLM3_6B, {"num_layers": None}, "num_layers=None"),
        (CHATGLM3_6B, {"padded_vocab_size": 0}, "padded_vocab_size=0"),
        (CHATGLM3_6B, {"rope_ratio": "50"}, "rope_ratio='50'"),
        (CHATGLM3_6B, {"layernorm_epsilon": 0}, "layernorm_epsilon=0"),
        (QWEN_7B, {"no_bias": False}, "no_bias=False"),
        (QWEN_7B, {"scale_attn_weights": False}, "scale_attn_weights=False"),
        (QWEN_7B, {"intermediate_size": 22017}, "intermediate_size=22017"),
        (QWEN_7B, {"seq_length": None}, "seq_length=None"),
        (QWEN_7B, {"use_logn_attn": "yes"}, "use_logn_attn='yes'"),
    ],
)
def test_what_the_authors_code_computes_otherwise_is_refused(
    fields: dict[str, Any], change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=rf"config\.json: .*{named}"):
        read(tmp_path, fields | change)


HEADS = Heads(q_size=16, kv_size=8, head_dim=8, rotary_dim=4)
Q, K, V = (f"model.layers.0.self_attn.{part}_proj" for part in "qkv")


def test_interleaved_pairs_are_brought_apart_in_q_and_k_alone() -> None:
    targets = {
        f"{Q}.bias": torch.empty(16),
        f"{K}.bias": torch.empty(8),
        f"{V}.bias": torch.empty(8),
    }
    places = Layout(is_interleaved=True).stored({k: Slot(v) for k, v in targets.items()}, HEADS)
    for name, target in targets.items():
        places[name].load(torch.arange(len(target)))
    head = [0, 2, 1, 3, 4, 5, 6, 7]
    assert targets[f"{Q}.bias"].tolist() == [*head, *(8 + row for row in head)]
    assert targets[f"{K}.bias"].tolist() == head
    assert targets[f"{V}.bias"].tolist() == list(range(8))


def test_a_shards_part_is_taken_after_reordering() -> None:
    target = torch.empty(8)
    slot = Slot(target, shape=(16,), take=lambda stored: stored[8:])
    places = Layout(is_interleaved=True).stored({f"{Q}.bias": slot}, HEADS)
    places[f"{Q}.bias"].load(torch.arange(16))
    assert target.tolist() == [8, 10, 9, 11, 12, 13, 14, 15]


def test_layers_that_pack_outputs_together_are_told_the_order() -> None:
    orders: list[torch.Tensor] = []
    stored = torch.arange(8).view(4, 2)
    slot = Slot(torch.empty(4, 2), out_axis=1, reorder=orders.append)
    place = Layout(is_interleaved=True).stored({f"{K}.qzeros": slot}, HEADS)[f"{K}.qzeros"]
    place.load(stored)
    assert torch.equal(slot.target, stored)
    assert [order.tolist() for order in orders] == [[0, 2, 1, 3, 4, 5, 6, 7]]


def test_fused_tensors_are_parted_along_their_outputs() -> None:
    first, second = torch.empty(2, 3), torch.empty(2, 5)
    place = FusedSlot((Slot(first, out_axis=1), Slot(second, out_axis=1)))
    assert place.shape == (2, 8)
    stored = torch.arange(16.0).view(2, 8)
    place.load(stored)
    assert torch.equal(torch.cat([first, second], dim=1), stored)


def test_what_has_no_outputs_is_the_same_for_all_parts() -> None:
    first, second = torch.empty(4), torch.empty(4)
    place = FusedSlot((Slot(first, out_axis=None), Slot(second, out_axis=None)))
    assert place.shape == (4,)
    place.load(torch.arange(4))
    assert first.tolist() == second.tolist() == [0, 1, 2, 3]
