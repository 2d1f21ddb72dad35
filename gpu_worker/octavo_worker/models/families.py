"""The family table: what an architecture's name says that its config.json doesn't.

Defaults hold where a key is absent from config.json (null is not absent), and equal those of
transformers' configuration classes. A family is a row; what doesn't fit into one (another order
of tensors, another vocabulary of fields) is a file in `layouts`. Must not know: tensors, files.
Entry point: `family_of`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from octavo.errors import ConfigurationError
from octavo_worker.models.fields import Fields
from octavo_worker.models.layouts import LLAMA, Layout, chatglm, gemma, glm, phi3, qwen1
from octavo_worker.models.moe_config import MIXTRAL_NAMES, QWEN_NAMES, ExpertNames
from octavo_worker.models.per_layer import (
    Ropes,
    Windows,
    local_and_global_ropes,
    no_windows,
    rope_by_layer,
    rope_everywhere,
    windows_by_layer,
    windows_by_pattern,
    windows_everywhere,
    windows_if_used,
    windows_on_even_layers,
    windows_without_positions,
)
from octavo_worker.models.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class Family:
    """A row of the table. Bias flags: None = what the config's flag says, else fixed.

    `aliases`: other names of the architecture. `translate`: the fields, in the words of Llama's.
    `partial_rotary`: whether `partial_rotary_factor` may be below 1. `offset_norms`: norms store
    their weights minus 1. `scaled_embedding`: embeddings are multiplied by sqrt(hidden size).
    `experts`: how those of a mixture of experts are stored.
    """

    architecture: str
    model_type: str
    defaults: Fields
    aliases: tuple[str, ...] = ()
    layout: Layout = LLAMA
    translate: Callable[[Fields], Fields] = dict
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool = False
    offset_norms: bool = False
    sandwich_norms: bool = False
    scaled_embedding: bool = False
    partial_rotary: bool = False
    experts: ExpertNames | None = None
    windows: Callable[[Fields], Windows] = no_windows
    ropes: Callable[[Fields, RopeConfig], Ropes] = rope_everywhere


def _with_qkv_bias(fields: Fields) -> Fields:
    return {**fields, "attention_bias": fields.get("qkv_bias", True)}


_DEFAULTS: Fields = {
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "eos_token_id": None,
    "final_logit_softcapping": None,
    "head_dim": None,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32_768,
    "mlp_bias": False,
    "num_key_value_heads": None,
    "query_pre_attn_scalar": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
_QWEN_DEFAULTS: Fields = {
    **_DEFAULTS,
    "max_window_layers": 28,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "use_sliding_window": False,
}
_GLM_DEFAULTS: Fields = {
    **_DEFAULTS,
    "attention_bias": True,
    "eos_token_id": [151_329, 151_336, 151_338],
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-7,
}
_QWEN_MOE_DEFAULTS: Fields = {
    **_DEFAULTS,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": False,
    "sliding_window": 4096,
    "use_sliding_window": False,
}
_GEMMA_DEFAULTS: Fields = {
    **_DEFAULTS,
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "num_key_value_heads": 16,
    "tie_word_embeddings": True,
}
_GEMMA2_DEFAULTS: Fields = {
    **_GEMMA_DEFAULTS,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
}
FAMILIES = (
    Family(  # SmolLM and SmolLM2 too
        "LlamaForCausalLM",
        "llama",
        {**_DEFAULTS, "max_position_embeddings": 2048, "eos_token_id": 2},
    ),
    Family(
        "MistralForCausalLM",
        "mistral",
        {
            **_DEFAULTS,
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
        "MixtralForCausalLM",
        "mixtral",
        {
            **_DEFAULTS,
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
    Family(
        "SmolLM3ForCausalLM",
        "smollm3",
        {
            **_DEFAULTS,
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
    Family(  # Phi-4 and Phi-4-mini too
        "Phi3ForCausalLM",
        "phi3",
        {
            **_DEFAULTS,
            "eos_token_id": 32_000,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
        },
        layout=phi3.LAYOUT,
        translate=phi3.translate,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        partial_rotary=True,
        windows=windows_everywhere,
    ),
    Family(  # GLM-4-9B as transformers stores it
        "GlmForCausalLM",
        "glm",
        _GLM_DEFAULTS,
        layout=glm.LAYOUT,
        o_bias=False,
        mlp_bias=False,
        partial_rotary=True,
    ),
    Family(  # GLM-4-0414
        "Glm4ForCausalLM",
        "glm4",
        _GLM_DEFAULTS,
        layout=glm.LAYOUT,
        o_bias=False,
        mlp_bias=False,
        sandwich_norms=True,
        partial_rotary=True,
    ),
    Family(  # ChatGLM2, ChatGLM3 and GLM-4 as their authors store them
        "ChatGLMModel",
        "chatglm",
        {**_DEFAULTS, **chatglm.DEFAULTS, "eos_token_id": 2},
        aliases=("ChatGLMForConditionalGeneration",),
        layout=chatglm.LAYOUT,
        translate=chatglm.translate,
        o_bias=False,
        mlp_bias=False,
        partial_rotary=True,
    ),
    Family(  # the first Qwen
        "QWenLMHeadModel",
        "qwen",
        {**_DEFAULTS, **qwen1.DEFAULTS, "max_position_embeddings": 8192},
        layout=qwen1.LAYOUT,
        translate=qwen1.translate,
        qkv_bias=True,
        o_bias=False,
        mlp_bias=False,
        partial_rotary=True,
    ),
    Family(
        "GemmaForCausalLM",
        "gemma",
        _GEMMA_DEFAULTS,
        translate=gemma.translate,
        mlp_bias=False,
        offset_norms=True,
        scaled_embedding=True,
    ),
    Family(
        "Gemma2ForCausalLM",
        "gemma2",
        _GEMMA2_DEFAULTS,
        layout=gemma.SANDWICHED,
        translate=gemma.translate,
        mlp_bias=False,
        offset_norms=True,
        sandwich_norms=True,
        scaled_embedding=True,
        windows=windows_by_pattern,
    ),
    Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {
            **_GEMMA2_DEFAULTS,
            "final_logit_softcapping": None,
            "max_position_embeddings": 131_072,
            "rope_local_base_freq": 10_000.0,
            "rope_theta": 1_000_000.0,
            "sliding_window_pattern": 6,
        },
        layout=gemma.SANDWICHED,
        translate=gemma.translate_3,
        mlp_bias=False,
        qk_norm=True,
        offset_norms=True,
        sandwich_norms=True,
        scaled_embedding=True,
        windows=windows_by_pattern,
        ropes=local_and_global_ropes,
    ),
)


def find_family(fields: Fields) -> Family | None:
    """The family that config.json's `architectures` (else its `model_type`) names, if any."""
    architectures = fields.get("architectures") or []
    for family in FAMILIES:
        named = any(name in architectures for name in (family.architecture, *family.aliases))
        if named or (not architectures and family.model_type == fields.get("model_type")):
            return family
    return None


def family_of(fields: Fields) -> Family:
    """The family of config.json. Raises ConfigurationError that lists the supported ones."""
    family = find_family(fields)
    if family is not None:
        return family
    architectures = fields.get("architectures") or []
    named = ", ".join(map(str, architectures)) or f"of model_type {fields.get('model_type')!r}"
    supported = ", ".join(family.architecture for family in FAMILIES)
    raise ConfigurationError(f"architecture {named} isn't supported; supported: {supported}")
