"""Llama and those that are it but for a field: SmolLM, Mistral; Mixtral's experts."""

from octavo_worker.models.families.family import DEFAULTS, Family
from octavo_worker.models.moe_config import MIXTRAL_NAMES
from octavo_worker.models.per_layer import (
    rope_by_layer,
    windows_everywhere,
    windows_without_positions,
)

FAMILIES = (
    Family(  # SmolLM and SmolLM2 too
        "LlamaForCausalLM",
        "llama",
        {**DEFAULTS, "max_position_embeddings": 2048, "eos_token_id": 2},
    ),
    Family(
        "MistralForCausalLM",
        "mistral",
        {
            **DEFAULTS,
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "eos_token_id": 2,
        },
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        windows=windows_everywhere,
    ),
    Family(
        "MixtralForCausalLM",
        "mixtral",
        {
            **DEFAULTS,
            "decoder_sparse_step": 1,
            "eos_token_id": 2,
            "max_position_embeddings": 131_072,
            "mlp_only_layers": None,
            "norm_topk_prob": True,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "sliding_window": None,
        },
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        windows=windows_everywhere,
        experts=MIXTRAL_NAMES,
    ),
    Family(
        "SmolLM3ForCausalLM",
        "smollm3",
        {
            **DEFAULTS,
            "eos_token_id": 128_001,
            "no_rope_layer_interval": 4,
            "num_key_value_heads": 4,
            "rope_theta": 2_000_000.0,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
        },
        windows=windows_without_positions,
        ropes=rope_by_layer,
    ),
)
