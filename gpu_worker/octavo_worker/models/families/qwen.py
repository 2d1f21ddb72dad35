"""Qwen 2, 2.5 and 3, with and without experts. The first Qwen is in `qwen1`."""

from octavo_worker.models.families.family import DEFAULTS, Family
from octavo_worker.models.fields import Fields
from octavo_worker.models.moe_config import QWEN_NAMES
from octavo_worker.models.per_layer import (
    windows_by_layer,
    windows_if_used,
    windows_on_even_layers,
)

_QWEN_DEFAULTS: Fields = {
    **DEFAULTS,
    "max_window_layers": 28,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "use_sliding_window": False,
}
_QWEN_MOE_DEFAULTS: Fields = {
    **DEFAULTS,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": False,
    "sliding_window": 4096,
    "use_sliding_window": False,
}


def _with_qkv_bias(fields: Fields) -> Fields:
    return {**fields, "attention_bias": fields.get("qkv_bias", True)}


FAMILIES = (
    Family(
        "Qwen2ForCausalLM",
        "qwen2",
        _QWEN_DEFAULTS,
        qkv_bias=True,
        o_bias=False,
        mlp_bias=False,
        windows=windows_by_layer,
    ),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        {**_QWEN_DEFAULTS, "head_dim": 128},
        mlp_bias=False,
        qk_norm=True,
        windows=windows_by_layer,
    ),
    Family(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        {
            **_QWEN_MOE_DEFAULTS,
            "max_window_layers": 28,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 4,
            "num_key_value_heads": 16,
            "num_local_experts": 60,
            "shared_expert_intermediate_size": 5632,
        },
        translate=_with_qkv_bias,
        o_bias=False,
        mlp_bias=False,
        windows=windows_on_even_layers,
        experts=QWEN_NAMES,
    ),
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {
            **_QWEN_MOE_DEFAULTS,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 4,
            "num_local_experts": 128,
        },
        mlp_bias=False,
        qk_norm=True,
        windows=windows_if_used,
        experts=QWEN_NAMES,
    ),
)
