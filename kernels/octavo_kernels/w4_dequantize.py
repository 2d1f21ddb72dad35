"""4-bit weights as a matrix: W[n, k] = (code[n, k] - zero[n, g]) * scale[n, g].

g = k // group_size; the layout is that of `w4_weight`. For products of many rows, which a library
does best with a plain matrix in scratch. Entry point: `dequantize`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.launch import Launch, offset64
from octavo_kernels.w4_codes import constants, load_groups, load_words, whole_runs
from octavo_kernels.w4_weight import RUNS, W4Weight

_TILE_N = 128  # what N' is a multiple of


@triton.jit
def _dequantize_kernel(
    out,  # [N, K]
    words,
    groups,
    out_size,
    in_size,
    padded_n,
    GROUP: tl.constexpr,
    RUNS_PER_GROUP: tl.constexpr,
    ONE: tl.constexpr,
    ASM: tl.constexpr,
    SCALE: tl.constexpr,
    TILE_N: tl.constexpr,
):
    tile = tl.program_id(0)
    row = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    column = tl.arange(0, 32)
    tile_words = load_words(words, tile, row, padded_n)
    for run in tl.static_range(4):
        k = tile * 128 + run * 32
        if run % RUNS_PER_GROUP == 0:
            scale, zero = load_groups(groups, k // GROUP, row, padded_n, SCALE)
        codes = whole_runs(tile_words, zero, run, 1, ONE, tl.float16, ASM)
        weight = codes.to(tl.float32) * scale[:, None]
        target = out + offset64(row, in_size)[:, None] + (k + column)[None, :]
        mask = (row < out_size)[:, None] & (k + column < in_size)[None, :]
        tl.store(target, weight.to(out.dtype.element_ty), mask=mask)


def dequantize_launch(out: Tensor, w: W4Weight) -> Launch:
    """out: [N, K] of any floating dtype."""
    num_tiles, padded_n = w.words.shape[:2]
    return Launch(
        kernel=_dequantize_kernel,
        grid=(num_tiles, padded_n // _TILE_N),
        args=(out, w.words, w.groups, w.out_size, w.in_size, padded_n),
        constants=constants(w, torch.float16) | {"TILE_N": _TILE_N},
        num_warps=4,
    )


def dequantize(w: W4Weight, dtype: torch.dtype) -> Tensor:
    """W [N, K]: (code - zero) * scale in float32, rounded once to `dtype`."""
    out = torch.empty((w.out_size, w.in_size), dtype=dtype, device=w.words.device)
    dequantize_launch(out, w).run()
    return out


def dequantize_reference(w: W4Weight, dtype: torch.dtype) -> Tensor:
    """W [N, K] of `dtype`: (code - zero) * scale in float32, rounded once."""
    shifts = torch.arange(RUNS, device=w.words.device)[:, None] * 4
    shifts = shifts + torch.arange(2, device=w.words.device)[None, :] * 16  # [run, half]
    words = w.words.transpose(0, 1)  # [N', tiles, 16]
    codes = words[:, :, None, :, None] >> shifts[:, None, :] & 15
    codes = codes.flatten(1)[: w.out_size, : w.in_size]
    groups = w.groups.t()[: w.out_size].repeat_interleave(w.group_size, dim=1)[:, : w.in_size]
    scales = groups.short().view(w.scale_dtype).float()
    return ((codes - (groups >> 16)).float() * scales).to(dtype)
