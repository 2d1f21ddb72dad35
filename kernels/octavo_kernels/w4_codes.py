"""Reading 4-bit weights in a kernel: words to pairs of 16-bit floats, groups to scale and zero.

The layout is that of `w4_weight`. 1024 + zero (128 in bf16) is taken off a code's float as a
16-bit float, which is exact: codes and zeros are small integers.

Must not know: products. Entry points: `load_words`, `load_groups`, `run_pairs`, `low_half`,
`whole_runs` (in kernels); `constants`, what these want to know of a weight.
"""

import torch
import triton
import triton.language as tl
from triton import knobs

from octavo_kernels.w4_weight import RUN_K, RUNS, W4Weight

_ONE = {torch.float16: 0x6400, torch.bfloat16: 0x4300}
# $0 = (float pair of ($1 & $3 | ONE, twice)) * $4 + $2: 0xEA is (a & b) | c; sm_80 has no packed
# bf16 addition.
_ASM = {
    torch.float16: """{
        .reg .b32 codes;
        lop3.b32 codes, $1, $3, 0x64006400, 0xEA;
        fma.rn.f16x2 $0, codes, $4, $2;
    }""",
    torch.bfloat16: """{
        .reg .b32 codes;
        lop3.b32 codes, $1, $3, 0x43004300, 0xEA;
        fma.rn.bf16x2 $0, codes, $4, $2;
    }""",
}
# torch's 16-bit floats as Triton's.
TL_FLOAT = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def load_groups(groups, group, row, padded_n, SCALE: tl.constexpr):
    """(scale float32, zero int32) of a group's rows."""
    bits = tl.load(groups + group * padded_n + row)
    scale = bits.to(tl.int16).to(SCALE, bitcast=True).to(tl.float32)
    return scale, bits >> 16


@triton.jit
def load_words(words, tile, row, padded_n):
    """[rows, 16] words: one contiguous piece of memory."""
    word = tl.arange(0, 16)
    return tl.load(words + tile * padded_n * 16 + row[:, None] * 16 + word[None, :])


@triton.jit
def run_pairs(
    words, run: tl.constexpr, zero, ONE: tl.constexpr, CODE: tl.constexpr, ASM: tl.constexpr
):
    """code - zero of a run: int32 [rows, 16], two neighbours of CODE, a 16-bit float, in each.

    ONE: the bits of the CODE whose last mantissa bit counts 1. The assembly is there because the
    compiler pairs floats of different words and then moves halves about, three times the work.
    """
    if ASM == "":
        pairs = (words >> (4 * run)) & 0x000F000F | ONE | (ONE << 16)
        base = (zero + ONE).to(tl.int16).to(CODE, bitcast=True)[:, None]
        even = low_half(pairs, CODE) - base
        odd = low_half(pairs >> 16, CODE) - base
        low = even.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return odd.to(tl.int16, bitcast=True).to(tl.int32) << 16 | low
    else:
        # Codes four bits further up fit into float16's mantissa, where they count 16 times: so two
        # runs want one shift. bfloat16 has no room for that.
        UP: tl.constexpr = run % 2 * (ONE // 0x6400)
        minus_base = (zero << (4 * UP)) + (ONE - 0x1000 * UP | 0x8000)
        unit = (0x3C00 if ONE == 0x6400 else 0x3F80) - 0x1000 * UP
        return tl.inline_asm_elementwise(
            ASM,  # pyright: ignore[reportArgumentType] - a constexpr string is one here
            "=r,r,r,r,r",
            [
                words >> (4 * (run - UP)),
                (minus_base | minus_base << 16)[:, None],
                0x000F000F * (1 + 15 * UP),
                unit | unit << 16,
            ],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def low_half(pairs, CODE: tl.constexpr):
    return pairs.to(tl.int16).to(CODE, bitcast=True)


@triton.jit
def whole_runs(
    words,
    zero,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    ONE: tl.constexpr,
    CODE: tl.constexpr,
    ASM: tl.constexpr,
):
    """code - zero of COUNT runs (1, 2 or 4), from FIRST on: [rows, 32 COUNT] of CODE."""
    if COUNT == 1:
        pairs = run_pairs(words, FIRST, zero, ONE, CODE, ASM)
        return tl.interleave(low_half(pairs, CODE), low_half(pairs >> 16, CODE))
    else:
        HALF: tl.constexpr = COUNT // 2
        left = whole_runs(words, zero, FIRST, HALF, ONE, CODE, ASM)
        right = whole_runs(words, zero, FIRST + HALF, HALF, ONE, CODE, ASM)
        return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), [words.shape[0], COUNT * 32])


def constants(w: W4Weight, code: torch.dtype) -> dict[str, object]:
    """Constants that kernels of `w` share; `code`: the 16-bit float that codes become."""
    return {
        "GROUP": w.group_size,
        "RUNS_PER_GROUP": min(w.group_size // RUN_K, RUNS) if w.group_size in (32, 64) else RUNS,
        "ONE": _ONE[code],
        "ASM": "" if knobs.runtime.interpret else _ASM[code],
        "SCALE": TL_FLOAT[w.scale_dtype],
    }
