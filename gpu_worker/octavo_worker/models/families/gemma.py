"""Gemma: norms under names of their own, and config.json's words, by generation.

Gemma 2 and 3 norm what attention and MLP give, too (sandwich norms). Gemma 3's local layers have
positions of their own; config.json tells them inside `rope_parameters`, older files beside it.
"""

from collections.abc import Mapping
from typing import Any

from octavo_worker.models.families.family import DEFAULTS, Family
from octavo_worker.models.fields import Fields, require
from octavo_worker.models.layout import Layout
from octavo_worker.models.per_layer import local_and_global_ropes, windows_by_pattern

_SANDWICHED = Layout(
    modules={
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    }
)
_COMPUTED = {"use_bidirectional_attention": False}
_DEFAULTS: Fields = {
    **DEFAULTS,
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "num_key_value_heads": 16,
    "tie_word_embeddings": True,
}
_DEFAULTS_2: Fields = {
    **_DEFAULTS,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
}


def _translate(fields: Fields) -> Fields:
    """Gemma 1 and 2: another word for the activation."""
    if fields.get("use_bidirectional_attention") is not None:
        require(fields, _COMPUTED)
    activation = fields.get("hidden_activation") or fields["hidden_act"]
    # The first files of Gemma 1 say "gelu"; its weights were trained with the approximation.
    activation = "gelu_pytorch_tanh" if activation == "gelu" else activation
    return {**fields, "hidden_act": activation}


def _translate_3(fields: Fields) -> Fields:
    """Gemma 3: `rope_parameters` becomes that of global layers, `local_rope_parameters` the rest's.

    `max_position_embeddings` is the length after the scaling.
    """
    ropes = _mapping(fields.get("rope_parameters"))
    everywhere = {**_mapping(ropes.get("full_attention")), **_mapping(fields.get("rope_scaling"))}
    factor = everywhere.get("factor")
    if everywhere.get("rope_type", everywhere.get("type")) == "linear" and factor:
        original = fields["max_position_embeddings"] // factor
        everywhere.setdefault("original_max_position_embeddings", original)
    return {
        **_translate(fields),
        "attn_logit_softcapping": None,  # never applied, whatever stands there
        "rope_scaling": None,
        "rope_parameters": everywhere,
        "local_rope_parameters": _mapping(ropes.get("sliding_attention")),
    }


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


FAMILIES = (
    Family(
        "GemmaForCausalLM",
        "gemma",
        _DEFAULTS,
        translate=_translate,
        mlp_bias=False,
        offset_norms=True,
        scaled_embedding=True,
    ),
    Family(
        "Gemma2ForCausalLM",
        "gemma2",
        _DEFAULTS_2,
        layout=_SANDWICHED,
        translate=_translate,
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
            **_DEFAULTS_2,
            # What the models with a vision part leave out.
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "final_logit_softcapping": None,
            "max_position_embeddings": 131_072,
            "rope_local_base_freq": 10_000.0,
            "rope_theta": 1_000_000.0,
            "sliding_window_pattern": 6,
        },
        layout=_SANDWICHED,
        translate=_translate_3,
        mlp_bias=False,
        qk_norm=True,
        offset_norms=True,
        sandwich_norms=True,
        scaled_embedding=True,
        windows=windows_by_pattern,
        ropes=local_and_global_ropes,
    ),
)
