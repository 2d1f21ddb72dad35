"""Linear layers with 4-bit weights: y = x W^T, W as `w4_weight` describes it.

`matmul` picks one of two ways by the number of rows M (see `_MAX_GEMM_ROWS`): a small-batch
product that dequantises tiles in registers, or `dequantize` into scratch and a library product
(steps that only decode have their own: `skinny_gemm`). Products accumulate in float32 and the
scale multiplies the float32 sum of a group.

Small batches: weights are the rows of the product (64 or more, what wgmma takes), x its columns.
K is split so that the programs fill the card; the last program of a tile to arrive adds the
splits' float32 sums up in their order, so the result doesn't depend on who came last.
"""

from enum import Enum
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.launch import (
    Launch,
    cdiv,
    compute_capability,
    next_power_of_2,
    num_multiprocessors,
    offset64,
)
from octavo_kernels.skinny_products import w4_product
from octavo_kernels.split_k import finish_split, partial_sums, splits
from octavo_kernels.w4_codes import TL_FLOAT, constants
from octavo_kernels.w4_dequantize import dequantize, dequantize_reference
from octavo_kernels.w4_weight import MAX_ROW_TILES, TILE_K, W4Weight


class Way(Enum):
    """How `matmul` computes."""

    GEMM = "gemm"
    DEQUANTIZE = "dequantize"


# The most rows for which a product of tiles is the faster way. To measure it again: `octavo bench
# kernels` times both around it and says which wins.
_MAX_GEMM_ROWS = 256


class _Shape(NamedTuple):
    """Of the product's programs."""

    tile_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


# By the columns of the product's tile, M padded.
_GEMM_SHAPES = {
    16: _Shape(128, 4, 5, 3),
    32: _Shape(128, 4, 5, 3),
    64: _Shape(128, 8, 4, 2),
    128: _Shape(128, 8, 4, 1),
}
# Before Hopper all operands are in registers: fewer weights at once.
_AMPERE_SHAPES = _GEMM_SHAPES | {128: _Shape(64, 8, 4, 2)}
_MAX_FUSED_ROWS = MAX_ROW_TILES * max(_GEMM_SHAPES)


@triton.jit(do_not_specialize=["num_rows", "num_splits", "tiles_per_split"])
def _gemm_kernel(
    out,  # [M, N]
    partial,  # [splits, M, N] float32
    arrivals,
    x,  # [M, K]
    words,
    groups,
    num_rows,  # M
    out_size,
    in_size,
    stride_x,
    padded_n,
    num_tiles,  # of K
    num_splits,
    tiles_per_split,
    GROUP: tl.constexpr,
    RUNS_PER_GROUP: tl.constexpr,  # 1, 2, or 4: a tile lies in one group
    ONE: tl.constexpr,
    ASM: tl.constexpr,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    n_tile = tl.program_id(0)
    m_tile = tl.program_id(1)
    split = tl.program_id(2)
    row = n_tile * TILE_N + tl.arange(0, TILE_N)
    token = m_tile * TILE_M + tl.arange(0, TILE_M)
    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, num_tiles)
    zeros = tl.zeros([TILE_N, TILE_M], tl.float32)
    acc, _ = w4_product(
        *(zeros, zeros, words, groups, x, row, token, padded_n, num_rows, in_size, stride_x),
        *(0, first, last, False, 1),
        *(GROUP, RUNS_PER_GROUP, ONE, ASM, CODE, SCALE, STAGES, EVEN_K),
    )

    place = offset64(token, out_size)[None, :] + row[:, None]
    mask = (token < num_rows)[None, :] & (row < out_size)[:, None]
    arrival = m_tile * tl.num_programs(0) + n_tile
    split_stride = num_rows * out_size
    finish_split(out, partial, arrivals, acc, place, mask, split, num_splits, arrival, split_stride)


def gemm_launch(out: Tensor, x: Tensor, w: W4Weight) -> Launch:
    """M up to 256."""
    num_rows = x.shape[0]
    tile_m = min(max(next_power_of_2(num_rows), min(_GEMM_SHAPES)), max(_GEMM_SHAPES))
    shapes = _GEMM_SHAPES if compute_capability(x.device) >= 90 else _AMPERE_SHAPES
    shape = shapes[tile_m]
    num_tiles, padded_n = w.words.shape[:2]
    n_tiles, m_tiles = padded_n // shape.tile_n, cdiv(num_rows, tile_m)
    most = shape.programs_per_sm * num_multiprocessors(x.device)
    num_splits, per_split = splits(num_tiles, n_tiles * m_tiles, most)
    code = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float16
    return Launch(
        kernel=_gemm_kernel,
        grid=(n_tiles, m_tiles, num_splits),
        args=(
            *(out, partial_sums(out, num_splits), w.arrivals, x, w.words, w.groups, num_rows),
            *(w.out_size, w.in_size, x.stride(0), padded_n, num_tiles, num_splits, per_split),
        ),
        constants=constants(w, code)
        | {
            "CODE": TL_FLOAT[code],
            "TILE_M": tile_m,
            "TILE_N": shape.tile_n,
            "STAGES": shape.num_stages,
            "EVEN_K": w.in_size % TILE_K == 0,
        },
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )


def choose_way(num_rows: int) -> Way:
    """The fastest way for x of so many rows."""
    return Way.GEMM if num_rows <= _MAX_GEMM_ROWS else Way.DEQUANTIZE


def matmul(x: Tensor, w: W4Weight, *, way: Way | None = None) -> Tensor:
    """x W^T: [M, K] -> [M, N], of x's dtype: float16, bfloat16 (or float32, for tests).

    Rows may be strided; a row's elements are contiguous. `way`: other than `choose_way`'s. Makes
    no decision on values and leaves the stream alone: a graph can hold it.
    """
    num_rows, in_size = x.shape
    assert in_size == w.in_size, (x.shape, w.in_size)
    assert x.stride(1) == 1, x.stride()
    assert x.dtype in (torch.float16, torch.bfloat16, torch.float32), x.dtype
    way = choose_way(num_rows) if way is None else way
    if way is Way.DEQUANTIZE:
        return torch.nn.functional.linear(x, dequantize(w, x.dtype))
    assert num_rows <= _MAX_FUSED_ROWS, (num_rows, way)
    out = torch.empty((num_rows, w.out_size), dtype=x.dtype, device=x.device)
    if num_rows:
        gemm_launch(out, x, w).run()
    return out


def matmul_reference(x: Tensor, w: W4Weight) -> Tensor:
    return (x.float() @ dequantize_reference(w, torch.float32).t()).to(x.dtype)
