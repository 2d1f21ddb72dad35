"""The inner loops of products of few rows: a weight as it is, in 8-bit floats, in 4-bit codes.

The weight's rows are the M side of the tensor cores' dot, tokens its N side. Narrow weights are
widened to 16-bit floats in registers, from which tensor cores read them. BOTH: rows `up_rows`
below those of n are multiplied, too, in the same loop: tokens are read once.

Must not know: where sums go. Entry points, in kernels: `product`, `w4_product`.
"""

import triton
import triton.language as tl

from octavo_kernels import e4m3_weight
from octavo_kernels.launch import offset64
from octavo_kernels.skinny_weight import E4M3, W4
from octavo_kernels.w4_codes import load_groups, load_words, whole_runs


@triton.jit
def product(
    weight,
    factors,
    x,
    n,
    m,
    num_n,
    num_m,
    num_k,
    padded_n,
    stride_x,
    up_rows,
    k_begin,
    k_end,
    FORM: tl.constexpr,
    BOTH: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    TILE_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    RUNS_PER_GROUP: tl.constexpr,
    ONE: tl.constexpr,
    ASM: tl.constexpr,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Two [TILE_N, TILE_M]: the products over [k_begin, k_end) of the rows n and, if BOTH, of
    n + up_rows."""
    acc = tl.zeros([TILE_N, TILE_M], tl.float32)
    up = tl.zeros([TILE_N, TILE_M], tl.float32)
    if FORM == W4:
        acc, up = w4_product(
            *(acc, up, weight, factors, x, n, m, padded_n, num_m, num_k, stride_x, up_rows),
            *(k_begin // 128, k_end // 128, BOTH, TILE_K // 128),
            *(GROUP, RUNS_PER_GROUP, ONE, ASM, CODE, SCALE, STAGES, True),
        )
    else:
        acc, up = _matrix_product(
            *(acc, up, weight, x, n, m, num_n, num_m, num_k, stride_x, up_rows, k_begin, k_end),
            *(4 if FORM == E4M3 else 1, BOTH, EVEN_N, TILE_K, STAGES, PRECISION, CODE, ASM),
        )
        if FORM == E4M3:
            acc *= tl.load(factors + n, mask=n < num_n, other=0.0)[:, None]
            if BOTH:
                up *= tl.load(factors + up_rows + n, mask=n < num_n, other=0.0)[:, None]
    return acc, up


@triton.jit
def _rows(
    at,
    is_row,
    PER_WORD: tl.constexpr,
    EVEN_N: tl.constexpr,
    CODE: tl.constexpr,
    ASM: tl.constexpr,
):
    """A tile of a weight: read once, so not kept in the cache for others."""
    if EVEN_N:
        tile = tl.load(at, eviction_policy="evict_first")
    else:
        tile = tl.load(at, mask=is_row[:, None], other=0, eviction_policy="evict_first")
    if PER_WORD == 4:
        tile = e4m3_weight.columns(tile, CODE, ASM)
    return tile


@triton.jit
def _matrix_product(
    acc,
    up,
    weight,  # [N, K], or int32 [N, K / 4], `e4m3_weight`'s, without the outputs' scales
    x,
    n,
    m,
    num_n,
    num_m,
    num_k,
    stride_x,
    up_rows,
    k_begin,
    k_end,
    PER_WORD: tl.constexpr,  # inputs: 1 or 4
    BOTH: tl.constexpr,
    EVEN_N: tl.constexpr,
    TILE_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    CODE: tl.constexpr,
    ASM: tl.constexpr,
):
    k = tl.arange(0, TILE_K)
    word = tl.arange(0, TILE_K // PER_WORD)
    rows = weight + offset64(n, num_k // PER_WORD)[:, None] + word[None, :]
    rows_below = rows + offset64(up_rows, num_k // PER_WORD)
    x_rows = x + m[None, :] * stride_x + k[:, None]
    for start in tl.range(k_begin, k_end, TILE_K, num_stages=STAGES):
        w = _rows(rows + start // PER_WORD, n < num_n, PER_WORD, EVEN_N, CODE, ASM)
        value = tl.load(x_rows + start, mask=(m < num_m)[None, :], other=0.0)
        acc = tl.dot(w.to(value.dtype), value, acc, input_precision=PRECISION)
        if BOTH:
            w = _rows(rows_below + start // PER_WORD, n < num_n, PER_WORD, EVEN_N, CODE, ASM)
            up = tl.dot(w.to(value.dtype), value, up, input_precision=PRECISION)
    return acc, up


@triton.jit
def _codes(
    words,
    zero,
    PART: tl.constexpr,
    RUNS: tl.constexpr,
    ONE: tl.constexpr,
    CODE: tl.constexpr,
    ASM: tl.constexpr,
):
    """code - zero of a group's part of a tile: [rows, 32 RUNS] of CODE."""
    return whole_runs(words, zero, PART * RUNS, RUNS, ONE, CODE, ASM)


@triton.jit
def w4_product(
    acc,
    up,
    words,
    groups,
    x,
    n,
    m,
    padded_n,
    num_m,
    num_k,
    stride_x,
    up_rows,
    first,
    last,
    BOTH: tl.constexpr,
    TILES: tl.constexpr,
    GROUP: tl.constexpr,
    RUNS_PER_GROUP: tl.constexpr,  # 1, 2, or 4: a tile lies in one group
    ONE: tl.constexpr,
    ASM: tl.constexpr,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,  # K is a multiple of 128
):
    """acc, and if BOTH up, plus the product over the tiles [first, last) of 128 inputs.

    A scale multiplies the float32 sum of its group. TILES: in one round of the loop.
    """
    WIDTH: tl.constexpr = RUNS_PER_GROUP * 32
    column = tl.arange(0, WIDTH)
    x_rows = x + offset64(m, stride_x)[:, None]
    for begin in tl.range(first, last, TILES, num_stages=STAGES):
        for other in tl.static_range(TILES):
            tile = begin + other
            tile_words = load_words(words, tile, n, padded_n)
            words_below = tile_words
            if BOTH:
                words_below = load_words(words, tile, n + up_rows, padded_n)
            for part in tl.static_range(4 // RUNS_PER_GROUP):
                k = tile * 128 + part * WIDTH
                mask = (m < num_m)[:, None]
                if not EVEN_K:
                    mask = mask & (k + column < num_k)[None, :]
                value = tl.load(x_rows + (k + column)[None, :], mask=mask, other=0.0)
                scale, zero = load_groups(groups, k // GROUP, n, padded_n, SCALE)
                codes = _codes(tile_words, zero, part, RUNS_PER_GROUP, ONE, CODE, ASM)
                total = tl.dot(codes.to(value.dtype), tl.trans(value), input_precision="ieee")
                acc += total * scale[:, None]
                if BOTH:
                    scale, zero = load_groups(groups, k // GROUP, n + up_rows, padded_n, SCALE)
                    codes = _codes(words_below, zero, part, RUNS_PER_GROUP, ONE, CODE, ASM)
                    total = tl.dot(codes.to(value.dtype), tl.trans(value), input_precision="ieee")
                    up += total * scale[:, None]
    return acc, up
