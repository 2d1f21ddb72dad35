"""Tiny random checkpoints of every supported family, as transformers saves them.

`save_tiny_model` writes a complete folder: config, generation config, safetensors (sharded on
request), a byte-level tokenizer and a chat template. All weights are seeded; norms and biases
are random too, so that one which is forgotten changes the answer.
"""

import json
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

TINY_VOCAB_SIZE = 384
TINY_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TINY_EOS_TOKEN_IDS = (2,)
TINY_FAMILIES: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "glm": (GlmConfig, GlmForCausalLM),
    "glm4": (Glm4Config, Glm4ForCausalLM),
    "gemma": (GemmaConfig, GemmaForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM),
}
_GEMMA: dict[str, Any] = {
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 20,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention"],
}
_QWEN_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2_moe": _QWEN_EXPERTS | {"shared_expert_intermediate_size": 56},
    "qwen3_moe": _QWEN_EXPERTS,
    "mistral": {"sliding_window": None},
    "smollm3": {"num_hidden_layers": 4},  # the fourth has no positions
    "gemma": {"tie_word_embeddings": True},
    # Caps so low that they change most scores and logits.
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
    "gemma3_text": {
        **_GEMMA,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
}
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TOKENIZER_TEXT = (
    "the cat sat on the mat and the rain in Spain stays mainly in the plain\n"
    "system user assistant hello world, what is the capital of France? Paris.\n"
    "def add(left, right):\n    return left + right\n"
    "a language model reads a prompt, token by token, and writes the most likely answer\n"
)


def tiny_config(family: str = "llama", **overrides: Any) -> PretrainedConfig:
    """A 2-layer configuration: 6 query heads on 2 kv heads, head dim 16, 2,048 positions."""
    fields: dict[str, Any] = {
        "vocab_size": TINY_VOCAB_SIZE,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": TINY_EOS_TOKEN_IDS[0],
        "pad_token_id": 0,
    }
    config_class, _ = TINY_FAMILIES[family]
    # A copy: transformers completes the scaling's dictionary in place.
    return config_class(**deepcopy(fields | _FAMILY_DEFAULTS.get(family, {}) | overrides))


def tiny_model(config: PretrainedConfig, *, seed: int = 0) -> PreTrainedModel:
    """transformers' model of `config`, float32, eager attention, all parameters random."""
    _, model_class = TINY_FAMILIES[config.model_type]
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    randomise(model, seed=seed)
    return model


@torch.no_grad()
def randomise(model: PreTrainedModel, *, seed: int = 0) -> None:
    """Draw all parameters."""
    config = model.config
    generator = torch.Generator().manual_seed(seed)
    norms_around = 0.0 if config.model_type.startswith("gemma") else 1.0  # it stores weights - 1
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.normal_(norms_around, 0.2, generator=generator)
        elif name.endswith("bias"):
            parameter.normal_(0.0, 0.2, generator=generator)
        else:  # keeps activations near 1 and spreads the logits: few near-ties
            parameter.normal_(0.0, 1.2 * parameter.shape[-1] ** -0.5, generator=generator)


def save_tiny_model(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Write a tiny checkpoint with its tokenizer into `folder`; `overrides` go to its config."""
    model = tiny_model(tiny_config(family, **overrides), seed=seed).to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    save_tiny_tokenizer(folder)
    return folder


def save_tiny_tokenizer(folder: Path) -> Path:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder`."""
    endoftext, im_start, im_end = TINY_SPECIAL_TOKENS
    (folder / "tokenizer.json").write_text(_tokenizer_json(), encoding="utf-8")
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": im_start,
        "eos_token": im_end,
        "pad_token": endoftext,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE, encoding="utf-8")
    return folder


@lru_cache(maxsize=1)
def _tokenizer_json() -> str:
    """Byte-level BPE: 3 special tokens, the 256 bytes, merges up to the vocabulary's size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCAB_SIZE,
        min_frequency=1,
        special_tokens=list(TINY_SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TOKENIZER_TEXT], trainer)
    assert tokenizer.get_vocab_size() == TINY_VOCAB_SIZE
    return tokenizer.to_str()
