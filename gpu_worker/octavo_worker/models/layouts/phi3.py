"""Phi-3, Phi-3.5 and Phi-4: q, k and v are one stored tensor, gate and up another."""

from collections.abc import Mapping

from octavo_worker.models.fields import Fields
from octavo_worker.models.layouts.layout import Layout, fused

LAYOUT = Layout(
    modules=fused("self_attn.qkv_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    | fused("mlp.gate_up_proj", "mlp.gate_proj", "mlp.up_proj"),
)


def translate(fields: Fields) -> Fields:
    """Old files call the scaling "su", or "yarn", which it isn't."""
    scaling = fields.get("rope_scaling")
    if not isinstance(scaling, Mapping) or scaling.get("type") not in ("su", "yarn"):
        return fields
    return {**fields, "rope_scaling": {**scaling, "type": "longrope", "rope_type": "longrope"}}
