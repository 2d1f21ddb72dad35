"""ChatGLM2, ChatGLM3 and GLM-4 as their authors store them (`ChatGLMModel`).

The model is GLM-4 (`glm`) under other names: q, k and v are one tensor, half of a head's dims is
rotated, in interleaved pairs. config.json has words of its own, and some flags under which the
authors' code computes something else; those are refused. Its code (`auto_map`) is never run.
"""

from typing import Any

from octavo.errors import ConfigurationError
from octavo_worker.models.families.family import DEFAULTS, Family
from octavo_worker.models.fields import Fields, count, flag, positive, require
from octavo_worker.models.layout import Layout, fused

_LAYOUT = Layout(
    layers="transformer.encoder.layers",
    modules={
        "model.embed_tokens": "transformer.embedding.word_embeddings",
        "model.norm": "transformer.encoder.final_layernorm",
        "lm_head": "transformer.output_layer",
        **fused(
            "self_attention.query_key_value",
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
        ),
        "self_attn.o_proj": "self_attention.dense",
        **fused("mlp.dense_h_to_4h", "mlp.gate_proj", "mlp.up_proj"),
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
    is_interleaved=True,
)
_DEFAULTS: Fields = {
    **DEFAULTS,
    "add_qkv_bias": False,
    "eos_token_id": 2,
    "kv_channels": 128,
    "layernorm_epsilon": 1e-5,
    "multi_query_attention": False,
    "multi_query_group_num": 1,
    "rope_ratio": 1,
    "seq_length": 2048,
}
# Flags, with the value that is computed.
_COMPUTED: Fields = {
    "add_bias_linear": False,
    "apply_residual_connection_post_layernorm": False,
    "multi_query_attention": True,
    "post_layer_norm": True,
    "rmsnorm": True,
}


def _translate(fields: Fields) -> Fields:
    """In Llama's words. Raises ConfigurationError for what would be computed otherwise."""
    if "position_encoding_2d" in fields:
        raise ConfigurationError(
            "config.json: position_encoding_2d: this is ChatGLM of the first generation, which "
            "isn't supported; ChatGLM2, ChatGLM3 and GLM-4 are"
        )
    require(fields, _COMPUTED)
    for name in ("pre_seq_len", "quantization_bit"):
        if fields.get(name):
            raise ConfigurationError(f"config.json: {name}={fields[name]!r} isn't supported")
    return {
        **fields,
        "attention_bias": flag(fields, "add_qkv_bias"),
        "head_dim": count(fields, "kv_channels"),
        "intermediate_size": count(fields, "ffn_hidden_size"),
        "max_position_embeddings": count(fields, "seq_length"),
        "num_hidden_layers": count(fields, "num_layers"),
        "num_key_value_heads": count(fields, "multi_query_group_num"),
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": positive(fields, "layernorm_epsilon"),
        "vocab_size": count(fields, "padded_vocab_size"),
        **_rope(fields),
    }


def _rope(fields: Fields) -> dict[str, Any]:
    """What `rope_ratio` means: a larger base, but positions drawn closer in ChatGLM2.

    The authors changed it from one generation to the next; `_name_or_path` alone tells which
    one a file is of.
    """
    ratio = positive(fields, "rope_ratio")
    if ratio == 1 or "chatglm2" not in str(fields.get("_name_or_path")).lower():
        return {"rope_theta": 10_000.0 * ratio}
    original = int(count(fields, "seq_length") / ratio)
    scaling = {
        "rope_type": "linear",
        "factor": ratio,
        "original_max_position_embeddings": original,
    }
    return {"rope_theta": 10_000.0, "rope_parameters": scaling}


FAMILIES = (
    Family(
        "ChatGLMModel",
        "chatglm",
        _DEFAULTS,
        aliases=("ChatGLMForConditionalGeneration",),
        layout=_LAYOUT,
        translate=_translate,
        o_bias=False,
        mlp_bias=False,
        partial_rotary=True,
    ),
)
