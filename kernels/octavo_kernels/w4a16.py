"""Linear layers with 4-bit weights: y = x W^T, W[n, k] = scale[n, g] * (code[n, k] - zero[n, g]).

g = k // group_size. Frantar et al., "GPTQ", 2022, and Lin et al., "AWQ", 2023, store weights so.
`pack` brings codes into one layout, once; then `matmul` picks one of three ways by the number of
rows M (a table, see `_CROSSOVER`): multiply-adds without tensor cores, a small-batch product that
dequantises tiles in registers, or `dequantize` into scratch and a library product.

The layout. K is cut into tiles of 128, each into four runs of 32: one 32-bit word of a row holds
two neighbours from each run, nibble i + 4 h being column 32 i + 2 c + h of word c. So two integer
operations on a word give two neighbours of a run as 16-bit floats: `(word >> 4 i) & 0x000F000F`,
or-ed with the bits of 1024 (fp16; 128 in bf16), whose last mantissa bits then are the code. No
integer is converted. 1024 + zero is taken off as a 16-bit float, which is exact: codes and zeros
are small integers. Products accumulate in float32 and the scale multiplies the float32 sum of a
group. A tile of rows is one contiguous piece of memory.

Small batches: weights are the rows of the product (64 or more, what wgmma takes), x its columns.
K is split so that the programs fill the card; the last program of a tile to arrive adds the
splits' float32 sums up in their order, so the result doesn't depend on who came last.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from octavo_kernels.launch import Launch, cdiv, next_power_of_2, num_multiprocessors, offset64
from octavo_kernels.split_k import finish_split, partial_sums, splits

TILE_K = 128
_RUNS = 4  # of a tile, of 32 columns each
_RUN_K = TILE_K // _RUNS
_WORDS = TILE_K // 8  # of a row in a tile
_PAD_N = 128
_MAX_ZERO = 16  # what GPTQ's first convention stores as 15
_MAX_FUSED_ROWS = 256
_MAX_ROW_TILES = 2  # of M, in the product
_GEMV_TILE_N = 32
_GEMV_STAGES = 4
_GEMV_PROGRAMS_PER_SM = 8
_ONE = {torch.float16: 0x6400, torch.bfloat16: 0x4300}
# $0 = (float pair of ($1 & 0x000F000F | ONE, twice)) * 1.0 + $2: 0xEA is (a & b) | c; sm_80 has no
# packed bf16 addition.
_ASM = {
    torch.float16: """{
        .reg .b32 codes, unit;
        lop3.b32 codes, $1, 0x000F000F, 0x64006400, 0xEA;
        mov.b32 unit, 0x3C003C00;
        fma.rn.f16x2 $0, codes, unit, $2;
    }""",
    torch.bfloat16: """{
        .reg .b32 codes, unit;
        lop3.b32 codes, $1, 0x000F000F, 0x43004300, 0xEA;
        mov.b32 unit, 0x3F803F80;
        fma.rn.bf16x2 $0, codes, unit, $2;
    }""",
}


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


@dataclass(frozen=True, slots=True)
class W4Weight:
    """What `pack` made; all on one device. N', K': N and K padded to multiples of 128.

    words: int32 [K' / 128, N', 16]. groups: int32 [G', N'], the scale's 16 bits in the low half,
    the zero in the high one. arrivals: int32, zero but while a product runs: so one weight is
    used by one stream at a time.
    """

    words: Tensor
    groups: Tensor
    arrivals: Tensor
    out_size: int
    in_size: int
    group_size: int
    scale_dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.words.nbytes + self.groups.nbytes + self.arrivals.nbytes


def check_group_size(group_size: int, in_size: int) -> None:
    """Raises ValueError for groups that the kernels can't scale: a group is 32, 64, a multiple of
    128 or all of K, and K is a multiple of it."""
    fits = group_size in (32, 64) or group_size % TILE_K == 0 or group_size == in_size
    if group_size < 1 or not fits or in_size % group_size:
        raise ValueError(
            f"groups of {group_size} of {in_size} inputs: a group must be 32, 64, a multiple of "
            f"128 or all inputs, and divide them"
        )


def pack(codes: Tensor, scales: Tensor, zeros: Tensor, group_size: int) -> W4Weight:
    """codes: uint8 [N, K], 0 to 15; scales: [N, G] of a 16-bit float (or of float32 that one can
    hold); zeros: [N, G] of any dtype, whole numbers from 0 to 16; on one device.

    N and K are any; G = K / group_size. Raises ValueError for a group size (`check_group_size`)
    or values that this form can't hold.
    """
    out_size, in_size = codes.shape
    check_group_size(group_size, in_size)
    num_groups = in_size // group_size
    assert codes.dtype == torch.uint8, codes.dtype
    assert scales.shape == zeros.shape == (out_size, num_groups), (scales.shape, zeros.shape)
    if int(codes.max()) > 15:
        raise ValueError(f"a code is {int(codes.max())}: four bits hold 0 to 15")
    if not bool(((zeros >= 0) & (zeros <= _MAX_ZERO) & (zeros == zeros.round())).all()):
        raise ValueError("zeros must be whole numbers from 0 to 16")
    scales = _as_16_bits(scales)

    padded_n = cdiv(out_size, _PAD_N) * _PAD_N
    padded_k = cdiv(in_size, TILE_K) * TILE_K
    padded_groups = cdiv(padded_k, group_size)
    assert padded_n * padded_k < 2**34, (out_size, in_size)  # offsets of words take 32 bits
    all_codes = codes.new_zeros(padded_n, padded_k)
    all_codes[:out_size, :in_size] = codes
    runs = all_codes.view(padded_n, -1, _RUNS, _WORDS, 2)
    words = torch.zeros(padded_n, padded_k // TILE_K, _WORDS, dtype=torch.int32).to(codes.device)
    for run in range(_RUNS):
        for half in range(2):
            words |= runs[:, :, run, :, half].int() << (4 * run + 16 * half)

    bits = scales.view(torch.int16).int() & 0xFFFF | zeros.int() << 16
    groups = torch.zeros(padded_groups, padded_n, dtype=torch.int32, device=codes.device)
    groups[:num_groups, :out_size] = bits.t()
    num_tiles = padded_n // min(_GEMV_TILE_N, *(s.tile_n for s in _GEMM_SHAPES.values()))
    return W4Weight(
        words=words.transpose(0, 1).contiguous(),
        groups=groups,
        arrivals=torch.zeros(_MAX_ROW_TILES * num_tiles, dtype=torch.int32, device=codes.device),
        out_size=out_size,
        in_size=in_size,
        group_size=group_size,
        scale_dtype=scales.dtype,
    )


def _as_16_bits(scales: Tensor) -> Tensor:
    if scales.dtype in (torch.float16, torch.bfloat16):
        return scales
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(scales.to(dtype).to(scales.dtype), scales):
            return scales.to(dtype)
    raise ValueError(f"scales of {scales.dtype} that no 16-bit float holds: round them first")


@triton.jit
def _load_groups(groups, group, row, padded_n, SCALE: tl.constexpr):
    """(scale float32, zero int32) of a group's rows."""
    bits = tl.load(groups + group * padded_n + row)
    scale = bits.to(tl.int16).to(SCALE, bitcast=True).to(tl.float32)
    return scale, bits >> 16


@triton.jit
def _load_words(words, tile, row, padded_n):
    """[rows, 16] words: one contiguous piece of memory."""
    word = tl.arange(0, 16)
    return tl.load(words + tile * padded_n * 16 + row[:, None] * 16 + word[None, :])


@triton.jit
def _run_pairs(words, run, zero, ONE: tl.constexpr, CODE: tl.constexpr, ASM: tl.constexpr):
    """code - zero of a run: int32 [rows, 16], two neighbours of CODE, a 16-bit float, in each.

    ONE: the bits of the CODE whose last mantissa bit counts 1. The assembly is there because the
    compiler pairs floats of different words and then moves halves about, three times the work.
    """
    shifted = words >> (4 * run)
    if ASM == "":
        pairs = shifted & 0x000F000F | ONE | (ONE << 16)
        base = (zero + ONE).to(tl.int16).to(CODE, bitcast=True)[:, None]
        even = _low_half(pairs, CODE) - base
        odd = _low_half(pairs >> 16, CODE) - base
        low = even.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return odd.to(tl.int16, bitcast=True).to(tl.int32) << 16 | low
    else:
        minus_base = zero + (ONE | 0x8000)
        minus_base = (minus_base | minus_base << 16)[:, None]
        return tl.inline_asm_elementwise(
            ASM,  # pyright: ignore[reportArgumentType] - a constexpr string is one here
            "=r,r,r",
            [shifted, minus_base],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _low_half(pairs, CODE: tl.constexpr):
    return pairs.to(tl.int16).to(CODE, bitcast=True)


@triton.jit
def _whole_run(words, run, zero, ONE: tl.constexpr, CODE: tl.constexpr, ASM: tl.constexpr):
    """code - zero of a run: [rows, 32] of CODE."""
    pairs = _run_pairs(words, run, zero, ONE, CODE, ASM)
    return tl.interleave(_low_half(pairs, CODE), _low_half(pairs >> 16, CODE))


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
        tile_words = _load_words(words, tile, row, padded_n)
        part = tl.zeros([TILE_N, TILE_M], tl.float32)
        for run in tl.static_range(4):
            k = tile * 128 + run * 32
            if run % RUNS_PER_GROUP == 0:
                scale, zero = _load_groups(groups, k // GROUP, row, padded_n, SCALE)
            mask = (token < num_rows)[:, None]
            if not IS_WHOLE:
                mask = mask & (k + column < in_size)[None, :]
            x_run = tl.load(x_rows + (k + column)[None, :], mask=mask, other=0.0)
            codes = _whole_run(tile_words, run, zero, ONE, CODE, ASM).to(x_run.dtype)
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
        tile_words = _load_words(words, tile, row, padded_n)
        part = tl.zeros([M, TILE_N, 16], tl.float32)
        for run in tl.static_range(4):
            k = tile * 128 + run * 32
            if run % RUNS_PER_GROUP == 0:
                scale, zero = _load_groups(groups, k // GROUP, row, padded_n, SCALE)
            if IS_WHOLE:
                x_run = tl.load(x_rows + (k + column)[None, :])
            else:
                inside = (k + column < in_size)[None, :]
                x_run = tl.load(x_rows + (k + column)[None, :], mask=inside, other=0.0)
            x_pairs = tl.reshape(x_run.to(tl.float32), [M, 16, 2])
            x_even, x_odd = tl.split(x_pairs)
            pairs = _run_pairs(tile_words, run, zero, ONE, tl.float16, ASM)
            even = _low_half(pairs, tl.float16).to(tl.float32)
            odd = _low_half(pairs >> 16, tl.float16).to(tl.float32)
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
    tile_words = _load_words(words, tile, row, padded_n)
    for run in tl.static_range(4):
        k = tile * 128 + run * 32
        if run % RUNS_PER_GROUP == 0:
            scale, zero = _load_groups(groups, k // GROUP, row, padded_n, SCALE)
        weight = (
            _whole_run(tile_words, run, zero, ONE, tl.float16, ASM).to(tl.float32) * scale[:, None]
        )
        target = out + offset64(row, in_size)[:, None] + (k + column)[None, :]
        mask = (row < out_size)[:, None] & (k + column < in_size)[None, :]
        tl.store(target, weight.to(out.dtype.element_ty), mask=mask)


_TL = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def _constants(w: W4Weight, code: torch.dtype) -> dict[str, object]:
    """`code`: the 16-bit float that codes become."""
    return {
        "GROUP": w.group_size,
        "RUNS_PER_GROUP": min(w.group_size // _RUN_K, _RUNS) if w.group_size in (32, 64) else _RUNS,
        "ONE": _ONE[code],
        "ASM": "" if knobs.runtime.interpret else _ASM[code],
        "SCALE": _TL[w.scale_dtype],
    }


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
        constants=_constants(w, torch.float16)
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
        constants=_constants(w, code)
        | {
            "CODE": _TL[code],
            "TILE_M": tile_m,
            "TILE_N": shape.tile_n,
            "IS_WHOLE": w.in_size % TILE_K == 0,
        },
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )


def dequantize_launch(out: Tensor, w: W4Weight) -> Launch:
    num_tiles, padded_n = w.words.shape[:2]
    return Launch(
        kernel=_dequantize_kernel,
        grid=(num_tiles, padded_n // _PAD_N),
        args=(out, w.words, w.groups, w.out_size, w.in_size, padded_n),
        constants=_constants(w, torch.float16) | {"TILE_N": _PAD_N},
        num_warps=4,
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


def dequantize(w: W4Weight, dtype: torch.dtype) -> Tensor:
    """W [N, K]: (code - zero) * scale in float32, rounded once to `dtype`."""
    out = torch.empty((w.out_size, w.in_size), dtype=dtype, device=w.words.device)
    dequantize_launch(out, w).run()
    return out


def dequantize_reference(w: W4Weight, dtype: torch.dtype) -> Tensor:
    shifts = torch.arange(_RUNS, device=w.words.device)[:, None] * 4
    shifts = shifts + torch.arange(2, device=w.words.device)[None, :] * 16  # [run, half]
    words = w.words.transpose(0, 1)  # [N', tiles, 16]
    codes = words[:, :, None, :, None] >> shifts[:, None, :] & 15
    codes = codes.flatten(1)[: w.out_size, : w.in_size]
    groups = w.groups.t()[: w.out_size].repeat_interleave(w.group_size, dim=1)[:, : w.in_size]
    scales = groups.short().view(w.scale_dtype).float()
    return ((codes - (groups >> 16)).float() * scales).to(dtype)


def matmul_reference(x: Tensor, w: W4Weight) -> Tensor:
    return (x.float() @ dequantize_reference(w, torch.float32).t()).to(x.dtype)
