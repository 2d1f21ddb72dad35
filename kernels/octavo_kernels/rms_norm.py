"""RMSNorm, alone or fused with the residual addition before it.

    y = x / sqrt(mean(x**2) + eps) * weight

Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019. Sum and scaling are in float32;
the normalised value is rounded to the weight's dtype before it meets it, and x + residual to the
input's before it is normalised: the roundings of transformers' decoder layers. Weights have the
input's dtype, or float32 (Gemma's, which are stored minus 1).
One program per row, the whole row in registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.launch import Launch, next_power_of_2, offset64

_MAX_HIDDEN = 32_768


@triton.jit
def _rms_norm_kernel(
    out,
    sum_out,  # x + residual; not touched unless ADD_RESIDUAL
    x,
    residual,
    weight,
    stride_x,
    stride_residual,
    eps,
    ADD_RESIDUAL: tl.constexpr,
    HIDDEN: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.arange(0, TILE)
    mask = column < HIDDEN
    value = tl.load(x + offset64(row, stride_x) + column, mask=mask, other=0.0)
    dtype = value.dtype
    if ADD_RESIDUAL:
        other = tl.load(residual + offset64(row, stride_residual) + column, mask=mask, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(dtype)
        tl.store(sum_out + offset64(row, HIDDEN) + column, value, mask=mask)
    wide = value.to(tl.float32)
    mean_square = tl.sum(wide * wide, axis=0) / HIDDEN
    normalised = (wide * tl.rsqrt(mean_square + eps)).to(weight.dtype.element_ty)
    scale = tl.load(weight + column, mask=mask, other=0.0)
    result = (normalised.to(tl.float32) * scale.to(tl.float32)).to(dtype)
    tl.store(out + offset64(row, HIDDEN) + column, result, mask=mask)


def rms_norm_launch(
    out: Tensor,
    sum_out: Tensor | None,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
) -> Launch:
    """All of shape [T, hidden] (weight [hidden]); `residual` and `sum_out` together or neither."""
    num_rows, hidden = x.shape
    tile = next_power_of_2(hidden)
    return Launch(
        kernel=_rms_norm_kernel,
        grid=(num_rows,),
        args=(
            out,
            out if sum_out is None else sum_out,
            x,
            x if residual is None else residual,
            weight,
            x.stride(0),
            x.stride(0) if residual is None else residual.stride(0),
            eps,
        ),
        constants={"ADD_RESIDUAL": residual is not None, "HIDDEN": hidden, "TILE": tile},
        num_warps=min(16, max(1, tile // 512)),
    )


def _check(x: Tensor, weight: Tensor) -> None:
    assert x.ndim >= 2, x.shape
    assert weight.shape == x.shape[-1:], (weight.shape, x.shape)
    assert weight.dtype in (x.dtype, torch.float32), (weight.dtype, x.dtype)
    assert weight.is_contiguous()
    assert x.shape[-1] <= _MAX_HIDDEN, x.shape


def _rows(x: Tensor) -> Tensor:
    """[..., hidden] as [T, hidden] whose rows are contiguous (a copy only if they are not)."""
    x = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dim: x [..., hidden], weight [hidden] of x's dtype or float32."""
    _check(x, weight)
    rows = _rows(x)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        rms_norm_launch(out, None, rows, None, weight, eps).run()
    return out.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(RMSNorm(x + residual), x + residual), both [..., hidden]; the inputs are kept."""
    _check(x, weight)
    assert residual.shape == x.shape, (residual.shape, x.shape)
    assert residual.dtype == x.dtype, (residual.dtype, x.dtype)
    rows = _rows(x)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    sum_out = torch.empty_like(out)
    if out.numel():
        rms_norm_launch(out, sum_out, rows, _rows(residual), weight, eps).run()
    return out.view(x.shape), sum_out.view(x.shape)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normalised.to(weight.dtype) * weight).to(x.dtype)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm_reference(total, weight, eps), total
