"""Cases of the mixture of experts; see `cases`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.kernels.cases import normal, strided_rows


def moe_factors(dtypes: Sequence[torch.dtype]) -> dict[str, Sequence[Any]]:
    """Few and many experts; widths that tiles and blocks divide, and such that they don't."""
    return {
        "experts": ((8, 2), (128, 8), (60, 4), (4, 4), (3, 1)),  # (of a layer, of a token)
        "num_tokens": (1, 7, 40),
        "skew": ("even", "one", "few"),
        "tile": (16, 64),
        "widths": ((64, 64), (24, 40), (96, 72)),  # (hidden, intermediate)
        "renormalise": (False, True),
        "dtype": dtypes,
    }


def moe_tensors(case: Mapping[str, Any], device: str) -> dict[str, Tensor]:
    """The arguments of a mixture of experts: every fourth token is dead, from the first on if
    there are several, and holds NaN.

    "one": all tokens choose the same experts; "few": all but a few experts are never chosen,
    and these hold NaN.
    """
    (num_experts, top_k), num_tokens, dtype = case["experts"], case["num_tokens"], case["dtype"]
    hidden, inner_size = case["widths"]

    def random(*shape: int, seed: int, dtype: torch.dtype = dtype) -> Tensor:
        return normal(*shape, dtype=dtype, device=device, seed=seed)

    x = random(num_tokens, hidden, seed=40)
    logits = random(num_tokens, num_experts, seed=41) * 2
    gate_up = random(num_experts, 2 * inner_size, hidden, seed=42) * hidden**-0.5
    down = random(num_experts, hidden, inner_size, seed=43) * inner_size**-0.5
    if case["skew"] == "one":
        logits[:] = logits[:1]
    if case["skew"] == "few":
        unused = torch.arange(num_experts, device=device) % 3 != 0
        unused &= torch.arange(num_experts, device=device) > 2 * top_k
        logits[:, unused] = -torch.inf
        gate_up[unused] = torch.nan
        down[unused] = torch.nan
    slots = torch.arange(num_tokens, device=device)
    if num_tokens > 1:
        slots[::4] = -1
        x[::4] = torch.nan
        logits[::4] = torch.nan
    return {
        "x": strided_rows(x),
        "router_logits": logits,
        "gate_up": gate_up,
        "down": down,
        "slot_mapping": slots,
    }
