"""Products of 8-bit floats (e4m3): y = (x8 W8^T) * x_scale * w_scale, a scale a row of each.

x8 = x / x_scale rounded to e4m3, x_scale = max|x row| / 448: "dynamic" scales of activations, as
in Micikevicius et al., "FP8 Formats for Deep Learning", 2022, but one a token, so that no token
changes another's numbers. Weights bring a scale an output.

Tensor cores sum products of e4m3 with fewer bits than float32 has, so their sums are added to a
float32 total every 128 inputs. Weights are the rows of the product (64 or more, what wgmma
takes) and K is split (`split_k`): for the small batches for which libraries' kernels are slow.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.e4m3_weight import arrange_inputs
from octavo_kernels.launch import Launch, cdiv, next_power_of_2, num_multiprocessors, offset64
from octavo_kernels.split_k import finish_split, partial_sums, splits

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
_LEAST_MAX = 1e-12  # a row of zeros is zeros times any scale
_TILE_K = 128
_QUANTIZE_TILE = 4096


class _Shape(NamedTuple):
    """Of the product's programs."""

    tile_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


# By the columns of the product's tile, M padded.
_SHAPES = {
    16: _Shape(128, 4, 5, 2),
    32: _Shape(128, 4, 5, 2),
    64: _Shape(128, 4, 4, 2),
    128: _Shape(128, 8, 4, 1),
}


@triton.jit
def _quantize_rows_kernel(
    out,  # [M, K]
    scales,  # [M] float32
    x,
    width,
    stride_x,
    LARGEST: tl.constexpr,
    LEAST_MAX: tl.constexpr,
    TILE: tl.constexpr,
    ARRANGED: tl.constexpr,
):
    row = tl.program_id(0)
    source = x + offset64(row, stride_x)
    largest = tl.zeros([TILE], tl.float32)
    for start in range(0, width, TILE):
        column = start + tl.arange(0, TILE)
        values = tl.load(source + column, mask=column < width, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(values))
    scale = tl.maximum(tl.max(largest, axis=0), LEAST_MAX) / LARGEST
    tl.store(scales + row, scale)
    for start in range(0, width, TILE):
        column = start + tl.arange(0, TILE)
        values = tl.load(source + column, mask=column < width, other=0.0)
        if ARRANGED:
            values = arrange_inputs(values)
        values = values.to(tl.float32)
        rounded = tl.clamp(
            tl.div_rn(values, scale), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL
        ).to(out.dtype.element_ty)
        tl.store(out + offset64(row, width) + column, rounded, mask=column < width)


def quantize_rows_launch(
    out: Tensor, scales: Tensor, x: Tensor, *, arranged: bool = False
) -> Launch:
    tile = min(_QUANTIZE_TILE, next_power_of_2(x.shape[1]))
    limits = {"LARGEST": E4M3_MAX, "LEAST_MAX": _LEAST_MAX}
    return Launch(
        kernel=_quantize_rows_kernel,
        grid=(x.shape[0],),
        args=(out, scales, x, x.shape[1], x.stride(0)),
        constants=limits | {"TILE": tile, "ARRANGED": arranged},
        num_warps=max(1, tile // 512),
    )


def quantize_rows(
    x: Tensor, dtype: torch.dtype = E4M3, *, arranged: bool = False
) -> tuple[Tensor, Tensor]:
    """(x / scale rounded to e4m3 [M, K], scale float32 [M]) of x [M, K], rows may be strided.

    `dtype`: another one for the rounded values, for tests where there is no e4m3. `arranged`: in
    the order of `e4m3_weight.arrange`.
    """
    assert x.stride(1) == 1, x.stride()
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    if x.shape[0]:
        quantize_rows_launch(out, scales, x, arranged=arranged).run()
    return out, scales


def quantize_rows_reference(x: Tensor, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    values = x.float()
    scales = values.abs().amax(dim=1).clamp(min=_LEAST_MAX) / E4M3_MAX
    return (values / scales[:, None]).clamp(-E4M3_MAX, E4M3_MAX).to(dtype), scales


@triton.jit(do_not_specialize=["num_rows", "num_splits", "tiles_per_split"])
def _fp8_gemm_kernel(
    out,  # [M, N]
    partial,  # [splits, M, N] float32
    arrivals,
    x,  # [M, K]
    x_scales,  # [M]
    weight,  # [N, K]
    w_scales,  # [N]
    num_rows,  # M
    out_size,
    in_size,
    num_tiles,  # of K
    num_splits,
    tiles_per_split,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    IS_WHOLE: tl.constexpr,  # N and K are multiples of their tiles
):
    n_tile = tl.program_id(0)
    m_tile = tl.program_id(1)
    split = tl.program_id(2)
    row = n_tile * TILE_N + tl.arange(0, TILE_N)
    token = m_tile * TILE_M + tl.arange(0, TILE_M)
    column = tl.arange(0, TILE_K)
    is_row, is_token = row < out_size, token < num_rows
    w_rows = weight + offset64(row, in_size)[:, None]
    x_rows = x + offset64(token, in_size)[:, None]
    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, num_tiles)

    acc = tl.zeros([TILE_N, TILE_M], tl.float32)
    for tile in range(first, last):
        k = tile * TILE_K + column
        if IS_WHOLE:
            w_tile = tl.load(w_rows + k[None, :])
            x_tile = tl.load(x_rows + k[None, :], mask=is_token[:, None], other=0.0)
        else:
            inside = (k < in_size)[None, :]
            w_tile = tl.load(w_rows + k[None, :], mask=is_row[:, None] & inside, other=0.0)
            x_tile = tl.load(x_rows + k[None, :], mask=is_token[:, None] & inside, other=0.0)
        acc = tl.dot(w_tile, tl.trans(x_tile), acc, max_num_imprecise_acc=TILE_K)

    w_scale = tl.load(w_scales + row, mask=is_row, other=0.0)
    x_scale = tl.load(x_scales + token, mask=is_token, other=0.0)
    total = acc * w_scale[:, None] * x_scale[None, :]
    place = offset64(token, out_size)[None, :] + row[:, None]
    mask = is_token[None, :] & is_row[:, None]
    arrival = m_tile * tl.num_programs(0) + n_tile
    split_stride = num_rows * out_size
    finish_split(
        out, partial, arrivals, total, place, mask, split, num_splits, arrival, split_stride
    )


def new_arrivals(out_size: int, device: torch.device) -> Tensor:
    """Counters for products with weights of so many outputs; a weight's own, zero between them."""
    num_tiles = cdiv(out_size, min(shape.tile_n for shape in _SHAPES.values()))
    return torch.zeros(num_tiles, dtype=torch.int32, device=device)


def fp8_gemm_launch(
    out: Tensor, x: Tensor, x_scales: Tensor, weight: Tensor, w_scales: Tensor, arrivals: Tensor
) -> Launch:
    (num_rows, in_size), out_size = x.shape, weight.shape[0]
    tile_m = min(max(next_power_of_2(num_rows), min(_SHAPES)), max(_SHAPES))
    shape = _SHAPES[tile_m]
    n_tiles, m_tiles = cdiv(out_size, shape.tile_n), cdiv(num_rows, tile_m)
    num_tiles = cdiv(in_size, _TILE_K)
    # Arrivals are counted for one tile of M.
    most = shape.programs_per_sm * num_multiprocessors(x.device) if m_tiles == 1 else 0
    num_splits, per_split = splits(num_tiles, n_tiles * m_tiles, most)
    return Launch(
        kernel=_fp8_gemm_kernel,
        grid=(n_tiles, m_tiles, num_splits),
        args=(
            *(out, partial_sums(out, num_splits), arrivals, x, x_scales, weight, w_scales),
            *(num_rows, out_size, in_size, num_tiles, num_splits, per_split),
        ),
        constants={
            "TILE_M": tile_m,
            "TILE_N": shape.tile_n,
            "TILE_K": _TILE_K,
            "IS_WHOLE": out_size % shape.tile_n == 0 and in_size % _TILE_K == 0,
        },
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )


def fp8_gemm(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    w_scales: Tensor,
    arrivals: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """[M, N] of `dtype`. x: e4m3 [M, K]; weight: e4m3 [N, K], contiguous; scales float32, [M] and
    [N]; arrivals: the weight's, from `new_arrivals`."""
    assert x.dtype == weight.dtype, (x.dtype, weight.dtype)
    assert x.shape[1] == weight.shape[1], (x.shape, weight.shape)
    assert x.is_contiguous(), x.stride()
    assert weight.is_contiguous(), weight.stride()
    assert x_scales.shape == x.shape[:1], (x_scales.shape, x.shape)
    assert w_scales.shape == weight.shape[:1], (w_scales.shape, weight.shape)
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=dtype, device=x.device)
    if x.shape[0]:
        fp8_gemm_launch(out, x, x_scales, weight, w_scales, arrivals).run()
    return out


def fp8_gemm_reference(
    x: Tensor, x_scales: Tensor, weight: Tensor, w_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    return (x.float() @ weight.float().t() * x_scales[:, None] * w_scales).to(dtype)
