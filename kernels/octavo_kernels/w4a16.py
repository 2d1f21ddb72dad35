"""Linear layers with 4-bit weights: y = x W^T, W as `w4_weight` describes it.

`matmul` picks one of three ways by the number of rows M (a table, see `_CROSSOVER`): multiply-adds
without tensor cores, a small-batch product that dequantises tiles in registers, or `dequantize`
into scratch and a library product. Products accumulate in float32 and the scale multiplies the
float32 sum of a group.

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

from octavo_kernels.launch import Launch, cdiv, next_power_of_2, num_multiprocessors, offset64
from octavo_kernels.split_k import finish_split, partial_sums, splits
from octavo_kernels.w4_codes import (
    TL_FLOAT,
    constants,
    load_groups,
    load_words,
    low_half,
    run_pairs,
    whole_run,
)
from octavo_kernels.w4_dequantize import dequantize, dequantize_reference
from octavo_kernels.w4_weight import (
    MAX_ROW_TILES,
    MIN_TILE_N,
    TILE_K,
    W4Weight,
)

_GEMV_TILE_N = MIN_TILE_N
_GEMV_STAGES = 4
_GEMV_PROGRAMS_PER_SM = 8


class Way(Enum):
    """How `matmul` computes."""

    GEMV = "gemv"
    GEMM = "gemm"
    DEQUANTIZE = "dequantize"


# (the most rows, the way that is fastest up to them). To measure it again: `octavo bench kernels`
# times all three at the borders and says which wins.
_CROSSOVER = ((2, Way.GEMV), (192, Way.GEMM))


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
    IS_WHOLE: tl.constexpr,  # K is a multiple of 128
):
    n_tile = tl.program_id(0)
    m_tile = tl.program_id(1)
    split = tl.program_id(2)
    row = n_tile * TILE_N + tl.arange(0, TILE_N)
    token = m_tile * TILE_M + tl.arange(0, TILE_M)
    column = tl.arange(0, 32)
    x_rows = x + offset64(token, stride_x)[:, None]
    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, num_tiles)

    acc = tl.zeros([TILE_N, TILE_M], tl.float32)
    for tile in range(first, last):
        tile_words = load_words(words, tile, row, padded_n)
        part = tl.zeros([TILE_N, TILE_M], tl.float32)
        for run in tl.static_range(4):
            k = tile * 128 + run * 32
            if run % RUNS_PER_GROUP == 0:
                scale, zero = load_groups(groups, k // GROUP, row, padded_n, SCALE)
            mask = (token < num_rows)[:, None]
            if not IS_WHOLE:
                mask = mask & (k + column < in_size)[None, :]
            x_run = tl.load(x_rows + (k + column)[None, :], mask=mask, other=0.0)
            codes = whole_run(tile_words, run, zero, ONE, CODE, ASM).to(x_run.dtype)
            part = tl.dot(codes, tl.trans(x_run), part, input_precision="ieee")
            if (run + 1) % RUNS_PER_GROUP == 0:
                acc += part * scale[:, None]
                part = tl.zeros([TILE_N, TILE_M], tl.float32)

    place = offset64(token, out_size)[None, :] + row[:, None]
    mask = (token < num_rows)[None, :] & (row < out_size)[:, None]
    arrival = m_tile * tl.num_programs(0) + n_tile
    split_stride = num_rows * out_size
    finish_split(out, partial, arrivals, acc, place, mask, split, num_splits, arrival, split_stride)


@triton.jit(do_not_specialize=["num_splits", "tiles_per_split"])
def _gemv_kernel(
    out,  # [M, N]
    partial,  # [splits, M, N] float32
    arrivals,
    x,  # [M, K]
    words,
    groups,
    out_size,
    in_size,
    stride_x,
    padded_n,
    num_tiles,
    num_splits,
    tiles_per_split,
    GROUP: tl.constexpr,
    RUNS_PER_GROUP: tl.constexpr,
    ONE: tl.constexpr,
    ASM: tl.constexpr,
    SCALE: tl.constexpr,
    M: tl.constexpr,
    TILE_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    n_tile = tl.program_id(0)
    split = tl.program_id(1)
    row = n_tile * TILE_N + tl.arange(0, TILE_N)
    token = tl.arange(0, M)
    x_rows = x + offset64(token, stride_x)[:, None]
    column = tl.arange(0, 32)
    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, num_tiles)

    acc = tl.zeros([M, TILE_N, 16], tl.float32)
    # Only with the number of stages said here are loads without a tl.dot pipelined.
    for tile in tl.range(first, last, num_stages=NUM_STAGES):
        tile_words = load_words(words, tile, row, padded_n)
        part = tl.zeros([M, TILE_N, 16], tl.float32)
        for run in tl.static_range(4):
            k = tile * 128 + run * 32
            if run % RUNS_PER_GROUP == 0:
                scale, zero = load_groups(groups, k // GROUP, row, padded_n, SCALE)
            if IS_WHOLE:
                x_run = tl.load(x_rows + (k + column)[None, :])
            else:
                inside = (k + column < in_size)[None, :]
                x_run = tl.load(x_rows + (k + column)[None, :], mask=inside, other=0.0)
            x_pairs = tl.reshape(x_run.to(tl.float32), [M, 16, 2])
            x_even, x_odd = tl.split(x_pairs)
            pairs = run_pairs(tile_words, run, zero, ONE, tl.float16, ASM)
            even = low_half(pairs, tl.float16).to(tl.float32)
            odd = low_half(pairs >> 16, tl.float16).to(tl.float32)
            part += x_even[:, None, :] * even[None]
            part += x_odd[:, None, :] * odd[None]
            if (run + 1) % RUNS_PER_GROUP == 0:
                acc += part * scale[None, :, None]
                part = tl.zeros([M, TILE_N, 16], tl.float32)

    total = tl.sum(acc, axis=2)
    place = offset64(token, out_size)[:, None] + row[None, :]
    mask = (row < out_size)[None, :]
    finish_split(
        out, partial, arrivals, total, place, mask, split, num_splits, n_tile, M * out_size
    )


def gemv_launch(out: Tensor, x: Tensor, w: W4Weight) -> Launch:
    """M = 1 or 2."""
    num_tiles, padded_n = w.words.shape[:2]
    n_tiles = padded_n // _GEMV_TILE_N
    most = _GEMV_PROGRAMS_PER_SM * num_multiprocessors(x.device)
    num_splits, per_split = splits(num_tiles, n_tiles, most)
    return Launch(
        kernel=_gemv_kernel,
        grid=(n_tiles, num_splits),
        args=(
            *(out, partial_sums(out, num_splits), w.arrivals, x, w.words, w.groups),
            *(w.out_size, w.in_size, x.stride(0), padded_n, num_tiles, num_splits, per_split),
        ),
        constants=constants(w, torch.float16)
        | {
            "M": x.shape[0],
            "TILE_N": _GEMV_TILE_N,
            "NUM_STAGES": _GEMV_STAGES,
            "IS_WHOLE": w.in_size % TILE_K == 0,
        },
        num_warps=4,
        num_stages=4,
    )


def gemm_launch(out: Tensor, x: Tensor, w: W4Weight) -> Launch:
    """M up to 256."""
    num_rows = x.shape[0]
    tile_m = min(max(next_power_of_2(num_rows), min(_GEMM_SHAPES)), max(_GEMM_SHAPES))
    shape = _GEMM_SHAPES[tile_m]
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
            "IS_WHOLE": w.in_size % TILE_K == 0,
        },
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )


def choose_way(num_rows: int) -> Way:
    """The fastest way for x of so many rows."""
    return next((way for most, way in _CROSSOVER if num_rows <= most), Way.DEQUANTIZE)


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
    assert num_rows <= (2 if way is Way.GEMV else _MAX_FUSED_ROWS), (num_rows, way)
    out = torch.empty((num_rows, w.out_size), dtype=x.dtype, device=x.device)
    if num_rows:
        launch = gemv_launch if way is Way.GEMV else gemm_launch
        launch(out, x, w).run()
    return out


def matmul_reference(x: Tensor, w: W4Weight) -> Tensor:
    return (x.float() @ dequantize_reference(w, torch.float32).t()).to(x.dtype)
