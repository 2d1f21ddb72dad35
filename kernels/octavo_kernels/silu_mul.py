"""SwiGLU's elementwise part: out = silu(gate) * up, silu(x) = x / (1 + exp(-x)).

Shazeer, "GLU Variants Improve Transformer", 2020. `gate_up` [T, 2I] holds gate in the first I
columns, up in the last. silu is computed in float32, rounded to the input's dtype, then
multiplied: the roundings of transformers' MLP.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.launch import Launch, cdiv, next_power_of_2, offset64

_MAX_TILE = 1024


@triton.jit
def _silu_mul_kernel(out, gate_up, stride_in, width, TILE: tl.constexpr):
    token = tl.program_id(0)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < width
    row = gate_up + offset64(token, stride_in)
    gate = tl.load(row + column, mask=mask, other=0.0)
    up = tl.load(row + width + column, mask=mask, other=0.0)
    x = gate.to(tl.float32)
    silu = (x / (1.0 + tl.exp(-x))).to(gate.dtype)
    product = silu.to(tl.float32) * up.to(tl.float32)
    tl.store(out + offset64(token, width) + column, product.to(gate.dtype), mask=mask)


def silu_mul_launch(out: Tensor, gate_up: Tensor) -> Launch:
    num_tokens, width = out.shape
    tile = min(_MAX_TILE, next_power_of_2(width))
    return Launch(
        kernel=_silu_mul_kernel,
        grid=(num_tokens, cdiv(width, tile)),
        args=(out, gate_up, gate_up.stride(0), width),
        constants={"TILE": tile},
        num_warps=max(1, tile // 256),
    )


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate_up[:, :I]) * gate_up[:, I:]: [T, 2I] -> [T, I], same floating dtype.

    Rows may be strided; a row's elements are contiguous.
    """
    assert gate_up.ndim == 2, gate_up.shape
    assert gate_up.shape[1] % 2 == 0, gate_up.shape
    assert gate_up.stride(1) == 1, gate_up.stride()
    out = torch.empty(
        (gate_up.shape[0], gate_up.shape[1] // 2), dtype=gate_up.dtype, device=gate_up.device
    )
    if out.numel():
        silu_mul_launch(out, gate_up).run()
    return out


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate.float()).to(gate.dtype) * up
