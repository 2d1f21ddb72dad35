"""GEGLU's elementwise part: out = gelu(gate) * up, with GELU's approximation by tanh.

    gelu(x) = x / 2 (1 + tanh(u)) = x / (1 + exp(-2 u)),    u = sqrt(2 / pi) (x + 0.044715 x**3)

Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016; Shazeer, "GLU Variants Improve
Transformer", 2020. `gate_up` [T, 2I] holds gate in the first I columns, up in the last. gelu is
computed in float32, rounded to the input's dtype, then multiplied: the roundings of transformers'
MLP.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.launch import Launch, cdiv, next_power_of_2, offset64

_MAX_TILE = 1024
_TWO_ROOT_2_OVER_PI = tl.constexpr(2.0 * math.sqrt(2.0 / math.pi))


@triton.jit
def _gelu_mul_kernel(out, gate_up, stride_in, width, TILE: tl.constexpr):
    token = tl.program_id(0)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < width
    row = gate_up + offset64(token, stride_in)
    gate = tl.load(row + column, mask=mask, other=0.0)
    up = tl.load(row + width + column, mask=mask, other=0.0)
    x = gate.to(tl.float32)
    twice_u = _TWO_ROOT_2_OVER_PI * (x + 0.044715 * x * x * x)
    decay = tl.exp(-tl.abs(twice_u))  # never overflows, as exp(-2u) would for u < 0
    gelu = (x * tl.where(twice_u < 0, decay, 1.0) / (1.0 + decay)).to(gate.dtype)
    product = gelu.to(tl.float32) * up.to(tl.float32)
    tl.store(out + offset64(token, width) + column, product.to(gate.dtype), mask=mask)


def gelu_mul_launch(out: Tensor, gate_up: Tensor) -> Launch:
    num_tokens, width = out.shape
    tile = min(_MAX_TILE, next_power_of_2(width))
    return Launch(
        kernel=_gelu_mul_kernel,
        grid=(num_tokens, cdiv(width, tile)),
        args=(out, gate_up, gate_up.stride(0), width),
        constants={"TILE": tile},
        num_warps=max(1, tile // 256),
    )


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate_up[:, :I]) * gate_up[:, I:]: [T, 2I] -> [T, I], same floating dtype.

    Rows may be strided; a row's elements are contiguous.
    """
    assert gate_up.ndim == 2, gate_up.shape
    assert gate_up.shape[1] % 2 == 0, gate_up.shape
    assert gate_up.stride(1) == 1, gate_up.stride()
    out = torch.empty(
        (gate_up.shape[0], gate_up.shape[1] // 2), dtype=gate_up.dtype, device=gate_up.device
    )
    if out.numel():
        gelu_mul_launch(out, gate_up).run()
    return out


def gelu_mul_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gelu = torch.nn.functional.gelu(gate.float(), approximate="tanh")
    return gelu.to(gate.dtype) * up
