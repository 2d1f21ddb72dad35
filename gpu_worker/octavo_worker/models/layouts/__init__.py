"""Layouts: under which names checkpoints store what the decoder names as Llama does.

The decoder knows one tensor a projection: `model.layers.0.self_attn.q_proj.weight`. A family
whose files name it otherwise, hold several of them as one, or number a head's dims otherwise says
so in a `Layout`; a family whose config.json has its own words has a small file here that
translates them. Must not know: files, decoders. Entry points: `Layout`, `LLAMA`.
"""

from octavo_worker.models.layouts.layout import LLAMA, Heads, Layout, fused

__all__ = ["LLAMA", "Heads", "Layout", "fused"]
