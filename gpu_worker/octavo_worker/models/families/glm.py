"""GLM-4 as transformers stores it: gate and up are one tensor, rotated dims are interleaved."""

from octavo_worker.models.families.family import DEFAULTS, Family
from octavo_worker.models.fields import Fields
from octavo_worker.models.layout import Layout, fused

_LAYOUT = Layout(
    modules=fused("mlp.gate_up_proj", "mlp.gate_proj", "mlp.up_proj"), is_interleaved=True
)
_DEFAULTS: Fields = {
    **DEFAULTS,
    "attention_bias": True,
    "eos_token_id": [151_329, 151_336, 151_338],
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-7,
}
FAMILIES = (
    Family(  # GLM-4-9B as transformers stores it
        "GlmForCausalLM",
        "glm",
        _DEFAULTS,
        layout=_LAYOUT,
        o_bias=False,
        mlp_bias=False,
        partial_rotary=True,
    ),
    Family(  # GLM-4-0414
        "Glm4ForCausalLM",
        "glm4",
        _DEFAULTS,
        layout=_LAYOUT,
        o_bias=False,
        mlp_bias=False,
        sandwich_norms=True,
        partial_rotary=True,
    ),
)
