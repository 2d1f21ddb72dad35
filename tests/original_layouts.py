"""Tiny checkpoints in the layouts of ChatGLM2/3 and of the first Qwen, and their oracles.

transformers has no class for them, but for the same models under other names: Glm and Qwen2. A
checkpoint here is such a model's, its tensors renamed and joined and its configuration in the
authors' words. Each writer returns the oracle.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from tests.tiny_models import tiny_config, tiny_model

# As released checkpoints have it: code that must never be run.
AUTO_MAP = {"AutoConfig": "configuration.Config", "AutoModelForCausalLM": "modeling.Model"}
_CODE = "raise AssertionError('the folder\\'s code was run')\n"


def save_chatglm(folder: Path, *, rope: Mapping[str, Any] = {}, **fields: Any) -> PreTrainedModel:
    """ChatGLM3 with 6 heads in 2 groups; `fields` go to its config.json, `rope` to the oracle's."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5, **rope}
    reference = tiny_model(tiny_config("glm", rms_norm_eps=1e-5, rope_parameters=rope))
    config = reference.config
    tensors: dict[str, torch.Tensor] = {}
    state = reference.state_dict()
    for index in range(config.num_hidden_layers):
        ours, theirs = f"model.layers.{index}", f"transformer.encoder.layers.{index}"
        for kind in ("weight", "bias"):
            tensors[f"{theirs}.self_attention.query_key_value.{kind}"] = torch.cat(
                [state.pop(f"{ours}.self_attn.{part}_proj.{kind}") for part in "qkv"]
            )
        for our_name, their_name in {
            "self_attn.o_proj": "self_attention.dense",
            "mlp.gate_up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
            "input_layernorm": "input_layernorm",
            "post_attention_layernorm": "post_attention_layernorm",
        }.items():
            tensors[f"{theirs}.{their_name}.weight"] = state.pop(f"{ours}.{our_name}.weight")
    tensors |= {
        "transformer.embedding.word_embeddings.weight": state.pop("model.embed_tokens.weight"),
        "transformer.encoder.final_layernorm.weight": state.pop("model.norm.weight"),
        "transformer.output_layer.weight": state.pop("lm_head.weight"),
        "transformer.rotary_pos_emb.inv_freq": torch.ones(4),
    }
    assert not state
    described = {
        "architectures": ["ChatGLMModel"],
        "model_type": "chatglm",
        "auto_map": AUTO_MAP,
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "apply_query_key_layer_scaling": True,
        "apply_residual_connection_post_layernorm": False,
        "eos_token_id": 2,
        "ffn_hidden_size": config.intermediate_size,
        "fp32_residual_connection": False,
        "hidden_size": config.hidden_size,
        "kv_channels": config.head_dim,
        "layernorm_epsilon": config.rms_norm_eps,
        "multi_query_attention": True,
        "multi_query_group_num": config.num_key_value_heads,
        "num_attention_heads": config.num_attention_heads,
        "num_layers": config.num_hidden_layers,
        "original_rope": True,
        "padded_vocab_size": config.vocab_size,
        "post_layer_norm": True,
        "pre_seq_len": None,
        "quantization_bit": 0,
        "rmsnorm": True,
        "seq_length": config.max_position_embeddings,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    _write(folder, described | fields, tensors)
    return reference


def save_qwen1(folder: Path, **fields: Any) -> PreTrainedModel:
    """Qwen with 6 heads; `fields` go to its config.json."""
    reference = tiny_model(tiny_config("qwen2", num_key_value_heads=6, rope_theta=10_000.0))
    config = reference.config
    tensors: dict[str, torch.Tensor] = {}
    state = reference.state_dict()
    for index in range(config.num_hidden_layers):
        ours, theirs = f"model.layers.{index}", f"transformer.h.{index}"
        for kind in ("weight", "bias"):
            tensors[f"{theirs}.attn.c_attn.{kind}"] = torch.cat(
                [state.pop(f"{ours}.self_attn.{part}_proj.{kind}") for part in "qkv"]
            )
        for our_name, their_name in {
            "self_attn.o_proj": "attn.c_proj",
            "mlp.up_proj": "mlp.w1",
            "mlp.gate_proj": "mlp.w2",
            "mlp.down_proj": "mlp.c_proj",
            "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2",
        }.items():
            tensors[f"{theirs}.{their_name}.weight"] = state.pop(f"{ours}.{our_name}.weight")
    tensors |= {
        "transformer.wte.weight": state.pop("model.embed_tokens.weight"),
        "transformer.ln_f.weight": state.pop("model.norm.weight"),
        "lm_head.weight": state.pop("lm_head.weight"),
        "transformer.rotary_emb.inv_freq": torch.ones(8),
    }
    assert not state
    described = {
        "architectures": ["QWenLMHeadModel"],
        "model_type": "qwen",
        "auto_map": AUTO_MAP,
        "bf16": False,
        "emb_dropout_prob": 0.0,
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": 2 * config.intermediate_size,
        "kv_channels": 16,
        "layer_norm_epsilon": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "no_bias": True,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "onnx_safe": None,
        "rotary_emb_base": 10_000,
        "rotary_pct": 1.0,
        "scale_attn_weights": True,
        "seq_length": 128,
        "tie_word_embeddings": False,
        "use_dynamic_ntk": True,
        "use_flash_attn": "auto",
        "use_logn_attn": True,
        "vocab_size": config.vocab_size,
    }
    _write(folder, described | fields, tensors)
    return reference


def _write(folder: Path, fields: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    (folder / "config.json").write_text(json.dumps(fields))
    for name in ("configuration.py", "modeling.py"):
        (folder / name).write_text(_CODE)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
