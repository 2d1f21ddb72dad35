"""Tiny random checkpoints of families that only transformers' code computes.

Each has another shape of what differs between models: where norms stand, biases, positions
(rotary, partial, interleaved, learned), kv heads, scaled or capped logits, parallel residuals.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.tiny_models import TINY_VOCAB_SIZE, save_tiny_tokenizer

_COMMON: dict[str, Any] = {
    "vocab_size": TINY_VOCAB_SIZE,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SHAPE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
FALLBACKS: dict[str, dict[str, Any]] = {
    "olmo2": _SHAPE,
    "granite": _SHAPE | {"logits_scaling": 3.0, "attention_multiplier": 0.3},
    "starcoder2": _SHAPE | {"sliding_window": 24},
    "cohere": _SHAPE | {"logit_scale": 0.5},
    "cohere2": _SHAPE | {"num_hidden_layers": 4, "sliding_window": 24, "head_dim": 32},
    "gpt_neox": _SHAPE,
    "phi": _SHAPE,
    "stablelm": _SHAPE,
    "opt": _SHAPE | {"ffn_dim": 160, "word_embed_proj_dim": 96},
    "gpt2": {"n_embd": 96, "n_layer": 2, "n_head": 6, "n_positions": 256},
    "gpt_bigcode": {"n_embd": 96, "n_layer": 2, "n_head": 6, "n_positions": 256},
    "persimmon": _SHAPE,
    "olmoe": _SHAPE | {"num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": _SHAPE
    | {
        "num_key_value_heads": 6,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}


@torch.no_grad()
def fallback_model(model_type: str, **overrides: Any) -> PreTrainedModel:
    """transformers' model, float32, eager attention, all parameters random."""
    config = AutoConfig.for_model(model_type, **(_COMMON | FALLBACKS[model_type] | overrides))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            std = 1.2 * parameter.shape[-1] ** -0.5
            parameter.normal_(0.0, std, generator=generator)
        else:  # norms and biases
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model


def save_fallback_model(folder: Path, model_type: str, **overrides: Any) -> PreTrainedModel:
    """Write a checkpoint with its tokenizer into `folder`; the model that was saved."""
    model = fallback_model(model_type, **overrides)
    model.save_pretrained(folder)
    save_tiny_tokenizer(folder)
    return model


def save_fallback_config(folder: Path, model_type: str, **overrides: Any) -> None:
    """Write the config.json alone of any model that transformers knows."""
    config = AutoConfig.for_model(model_type, **(_COMMON | _SHAPE | overrides))
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
    config.save_pretrained(folder)
