"""GLM-4 as transformers stores it: gate and up are one tensor, rotated dims are interleaved."""

from octavo_worker.models.layouts.layout import Layout, fused

LAYOUT = Layout(
    modules=fused("mlp.gate_up_proj", "mlp.gate_proj", "mlp.up_proj"), is_interleaved=True
)
