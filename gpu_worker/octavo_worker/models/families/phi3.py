"""Phi-3, Phi-3.5 and Phi-4: q, k and v are one stored tensor, gate and up another."""

from collections.abc import Mapping

from octavo_worker.models.families.family import DEFAULTS, Family
from octavo_worker.models.fields import Fields
from octavo_worker.models.layout import Layout, fused
from octavo_worker.models.per_layer import windows_everywhere

_LAYOUT = Layout(
    modules=fused("self_attn.qkv_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    | fused("mlp.gate_up_proj", "mlp.gate_proj", "mlp.up_proj"),
)


def _translate(fields: Fields) -> Fields:
    """Old files call the scaling "su", or "yarn", which it isn't."""
    scaling = fields.get("rope_scaling")
    if not isinstance(scaling, Mapping) or scaling.get("type") not in ("su", "yarn"):
        return fields
    return {**fields, "rope_scaling": {**scaling, "type": "longrope", "rope_type": "longrope"}}


FAMILIES = (
    Family(  # Phi-4 and Phi-4-mini too
        "Phi3ForCausalLM",
        "phi3",
        {
            **DEFAULTS,
            "eos_token_id": 32_000,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
        },
        layout=_LAYOUT,
        translate=_translate,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        partial_rotary=True,
        windows=windows_everywhere,
    ),
)
