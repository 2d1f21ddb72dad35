"""The elementwise part of gated MLPs: out = act(gate) * up, act = SiLU (SwiGLU) or GELU (GEGLU).

    silu(x) = x / (1 + exp(-x))
    gelu(x) = x / 2 (1 + tanh(u)) = x / (1 + exp(-2 u)),    u = sqrt(2 / pi) (x + 0.044715 x**3)

Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016 (GELU approximated by tanh); Shazeer, "GLU
Variants Improve Transformer", 2020. `gate_up` [T, 2I] holds gate in the first I columns, up in the
last. act is computed in float32, rounded to the input's dtype, then multiplied: the roundings of
transformers' MLP.
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
def _gated_mul_kernel(out, gate_up, stride_in, width, IS_GELU: tl.constexpr, TILE: tl.constexpr):
    token = tl.program_id(0)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < width
    row = gate_up + offset64(token, stride_in)
    gate = tl.load(row + column, mask=mask, other=0.0)
    up = tl.load(row + width + column, mask=mask, other=0.0)
    x = gate.to(tl.float32)
    if IS_GELU:
        twice_u = _TWO_ROOT_2_OVER_PI * (x + 0.044715 * x * x * x)
        decay = tl.exp(-tl.abs(twice_u))  # never overflows, as exp(-2u) would for u < 0
        act = x * tl.where(twice_u < 0, decay, 1.0) / (1.0 + decay)
    else:
        act = x / (1.0 + tl.exp(-x))
    product = act.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out + offset64(token, width) + column, product.to(gate.dtype), mask=mask)


def gated_mul_launch(out: Tensor, gate_up: Tensor, *, is_gelu: bool) -> Launch:
    num_tokens, width = out.shape
    tile = min(_MAX_TILE, next_power_of_2(width))
    return Launch(
        kernel=_gated_mul_kernel,
        grid=(num_tokens, cdiv(width, tile)),
        args=(out, gate_up, gate_up.stride(0), width),
        constants={"IS_GELU": is_gelu, "TILE": tile},
        num_warps=max(1, tile // 256),
    )


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate_up[:, :I]) * gate_up[:, I:]: [T, 2I] -> [T, I], same floating dtype.

    Rows may be strided; a row's elements are contiguous.
    """
    return _gated_mul(gate_up, is_gelu=False)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate_up[:, :I]) * gate_up[:, I:]; as `silu_mul`."""
    return _gated_mul(gate_up, is_gelu=True)


def _gated_mul(gate_up: Tensor, *, is_gelu: bool) -> Tensor:
    assert gate_up.ndim == 2, gate_up.shape
    assert gate_up.shape[1] % 2 == 0, gate_up.shape
    assert gate_up.stride(1) == 1, gate_up.stride()
    out = torch.empty(
        (gate_up.shape[0], gate_up.shape[1] // 2), dtype=gate_up.dtype, device=gate_up.device
    )
    if out.numel():
        gated_mul_launch(out, gate_up, is_gelu=is_gelu).run()
    return out


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate.float()).to(gate.dtype) * up


def gelu_mul_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gelu = torch.nn.functional.gelu(gate.float(), approximate="tanh")
    return gelu.to(gate.dtype) * up
