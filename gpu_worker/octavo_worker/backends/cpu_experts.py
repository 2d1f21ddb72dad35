"""The mixture of experts in plain torch: expert by expert, only those that a token chose.

Must not know: models. Entry point: `experts`. Shapes as in `backends.base.Backend.experts`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def experts(
    x: Tensor,
    router_logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    slot_mapping: Tensor,
    *,
    top_k: int,
    renormalise: bool,
) -> Tensor:
    """See `Backend.experts`. Each expert's part is rounded to x's dtype, their sum is fp32's."""
    weights, chosen = router_logits.softmax(dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    is_dead = (slot_mapping < 0)[:, None]
    chosen = chosen.masked_fill(is_dead, -1)
    parts = x.new_zeros(x.shape[0], top_k, x.shape[1])
    for expert in chosen.unique().tolist():
        if expert < 0:
            continue
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[tokens], gate_up[expert]).chunk(2, dim=-1)
        part = F.linear(F.silu(gate) * up, down[expert])
        parts[tokens, places] = (part * weights[tokens, places, None]).to(x.dtype)
    return parts.sum(dim=1, dtype=torch.float32).to(x.dtype)
