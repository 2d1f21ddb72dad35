"""What products of few rows take for a weight: a matrix, 8-bit floats or 4-bit codes.

Must not know: products. Entry points: `Weight`, `size_of`, `operands`, `DENSE`, `E4M3`,
`W4`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from octavo_kernels import e4m3_weight, w4_codes
from octavo_kernels.e4m3_weight import E4m3Weight
from octavo_kernels.w4_weight import W4Weight

# All [N, K] in effect.
Weight = Tensor | E4m3Weight | W4Weight

DENSE = tl.constexpr(0)
E4M3 = tl.constexpr(1)
W4 = tl.constexpr(2)

_NOTHING = {"GROUP": 1, "RUNS_PER_GROUP": 1, "ONE": 0, "ASM": "", "SCALE": tl.float32}


@dataclass(frozen=True, slots=True)
class Operands:
    """A weight as kernels take it; `factors`: None where there are none."""

    values: Tensor
    factors: Tensor | None
    padded_n: int
    constants: dict[str, Any]


def size_of(weight: Weight) -> tuple[int, int]:
    """(N, K)."""
    if isinstance(weight, W4Weight):
        return weight.out_size, weight.in_size
    if isinstance(weight, E4m3Weight):
        num_n, num_words = weight.words.shape
        return num_n, 4 * num_words
    num_n, num_k = weight.shape
    return num_n, num_k


def operands(weight: Weight, dtype: torch.dtype) -> Operands:
    """`dtype`: x's, in which tensor cores compute."""
    # Both hold every code, and every float of 8 bits.
    code = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
    if isinstance(weight, W4Weight):
        own = w4_codes.constants(weight, code) | {"CODE": w4_codes.TL_FLOAT[code], "FORM": W4.value}
        return Operands(weight.words, weight.groups, weight.words.shape[1], own)
    if isinstance(weight, E4m3Weight):
        own = {"CODE": w4_codes.TL_FLOAT[code], "ASM": e4m3_weight.asm_of(code)}
        own = _NOTHING | own | {"FORM": E4M3.value}
        return Operands(weight.words, weight.scales, weight.words.shape[0], own)
    own = _NOTHING | {"CODE": tl.float32, "FORM": DENSE.value}
    return Operands(weight, None, weight.shape[0], own)
