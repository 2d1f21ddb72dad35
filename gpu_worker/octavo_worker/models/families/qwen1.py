"""Qwen of the first generation (`QWenLMHeadModel`): Qwen2's shape under GPT-2's names.

q, k and v are one tensor with a bias; `w2` is the gate, `w1` what it gates. `intermediate_size` is
that of both together. Its code (`auto_map`) is never run.

Past `seq_length` the authors' code draws positions closer by the sequence's length
(`use_dynamic_ntk`) and scales queries (`use_logn_attn`). Keys that sequences share can't depend on
the length of one: with either flag a sequence ends at `seq_length`; both change nothing before.
"""

from octavo.errors import ConfigurationError
from octavo_worker.models.families.family import DEFAULTS, Family
from octavo_worker.models.fields import Fields, count, flag, positive, require
from octavo_worker.models.layout import Layout, fused

_LAYOUT = Layout(
    layers="transformer.h",
    modules={
        "model.embed_tokens": "transformer.wte",
        "model.norm": "transformer.ln_f",
        "input_layernorm": "ln_1",
        **fused("attn.c_attn", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "self_attn.o_proj": "attn.c_proj",
        "post_attention_layernorm": "ln_2",
        "mlp.gate_proj": "mlp.w2",
        "mlp.up_proj": "mlp.w1",
        "mlp.down_proj": "mlp.c_proj",
    },
)
_DEFAULTS: Fields = {
    **DEFAULTS,
    "kv_channels": 128,
    "layer_norm_epsilon": 1e-6,
    "max_position_embeddings": 8192,
    "rotary_emb_base": 10_000,
    "rotary_pct": 1.0,
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
}
# Flags, with the value that is computed.
_COMPUTED: Fields = {"no_bias": True, "scale_attn_weights": True}


def _translate(fields: Fields) -> Fields:
    """In Llama's words. Raises ConfigurationError for what would be computed otherwise."""
    require(fields, _COMPUTED)
    inner = count(fields, "intermediate_size")
    if inner % 2:
        raise ConfigurationError(
            f"config.json: intermediate_size={inner} must be even: it counts both halves of the MLP"
        )
    return {
        **fields,
        "head_dim": count(fields, "kv_channels"),
        "intermediate_size": inner // 2,
        "max_position_embeddings": _max_position(fields),
        "partial_rotary_factor": positive(fields, "rotary_pct"),
        "rms_norm_eps": positive(fields, "layer_norm_epsilon"),
        "rope_theta": positive(fields, "rotary_emb_base"),
    }


def _max_position(fields: Fields) -> int:
    max_position, original = count(fields, "max_position_embeddings"), count(fields, "seq_length")
    is_stretched = any([flag(fields, "use_dynamic_ntk"), flag(fields, "use_logn_attn")])
    return min(max_position, original) if is_stretched else max_position


FAMILIES = (
    Family(
        "QWenLMHeadModel",
        "qwen",
        _DEFAULTS,
        layout=_LAYOUT,
        translate=_translate,
        qkv_bias=True,
        o_bias=False,
        mlp_bias=False,
        partial_rotary=True,
    ),
)
