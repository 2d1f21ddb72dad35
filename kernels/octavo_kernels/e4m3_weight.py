"""8-bit floats (e4m3) as products of few rows read them: words that become pairs of 16-bit floats.

Of every 16 inputs, bytes 0 and 2 of word j are the inputs 2 j and 2 j + 1, bytes 1 and 3 are
8 + 2 j and 9 + 2 j: so a few integer operations on a word and one multiplication give two
neighbours as 16-bit floats, where tensor cores want them. A product whose x is arranged alike
(`arrange_inputs`) may read the weight as the matrix that it is.

Must not know: products. Entry points: `arrange`, `E4m3Weight`; in kernels `arrange_inputs`
and `columns`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from octavo_kernels.w4_codes import low_half

GROUP = 16  # of inputs
# $0 = the pair in the high bytes of both halves of $1. Moved to the right, e4m3's bits are those of
# a 16-bit float whose exponent counts from elsewhere; a multiplication puts that right, subnormal
# numbers too. 0xEA is (a & b) | c.
_ASM = {
    torch.bfloat16: """{
        .reg .b32 sign, rest, unit;
        and.b32 sign, $1, 0x80008000;
        shr.u32 rest, $1, 4;
        lop3.b32 rest, rest, 0x07F007F0, sign, 0xEA;
        mov.b32 unit, 0x7B807B80;
        mul.rn.bf16x2 $0, rest, unit;
    }""",
    torch.float16: """{
        .reg .b32 sign, rest, unit;
        and.b32 sign, $1, 0x80008000;
        shr.u32 rest, $1, 1;
        lop3.b32 rest, rest, 0x3F803F80, sign, 0xEA;
        mov.b32 unit, 0x5C005C00;
        mul.rn.f16x2 $0, rest, unit;
    }""",
}


class E4m3Weight(NamedTuple):
    """W[n, k] = value[n, k] * scales[n]; words: int32 [N, K / 4], arranged; scales: float32."""

    words: Tensor
    scales: Tensor

    @classmethod
    def of(cls, arranged: Tensor, scales: Tensor) -> "E4m3Weight":
        """arranged: e4m3 [N, K], from `arrange`; no copy is made."""
        return cls(arranged.view(torch.int32), scales)


def arrange(values: Tensor) -> Tensor:
    """The inputs of values [N, K], K a multiple of 16, in the order above."""
    return values.unflatten(1, (-1, 2, 4, 2)).permute(0, 1, 3, 4, 2).flatten(1).contiguous()


@triton.jit
def arrange_inputs(values):
    """`arrange`, of a row's piece [T]; T a multiple of 16."""
    NUM: tl.constexpr = values.shape[0]
    groups = tl.reshape(values, [NUM // 16, 2, 4, 2])
    return tl.reshape(tl.permute(groups, (0, 2, 3, 1)), [NUM])


@triton.jit
def _pairs(words, CODE: tl.constexpr, ASM: tl.constexpr):
    """int32, two neighbours of CODE in each: the floats in the high bytes of both halves."""
    if ASM == "":
        unit = 256.0
        bits = (words >> 1) & 0x3F803F80
        if tl.bfloat16 == CODE:
            unit = 2.0**120
            bits = (words >> 4) & 0x07F007F0
        bits |= words & -0x7FFF8000
        even = low_half(bits, CODE) * unit
        odd = low_half(bits >> 16, CODE) * unit
        low = even.to(CODE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return odd.to(CODE).to(tl.int16, bitcast=True).to(tl.int32) << 16 | low
    else:
        return tl.inline_asm_elementwise(
            ASM,  # pyright: ignore[reportArgumentType] - a constexpr string is one here
            "=r,r",
            [words],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _eights(words, CODE: tl.constexpr, ASM: tl.constexpr):
    """[rows, W / 4, 8]: of every four words the floats in the high bytes."""
    pairs = _pairs(words, CODE, ASM)
    floats = tl.interleave(low_half(pairs, CODE), low_half(pairs >> 16, CODE))
    return tl.reshape(floats, [words.shape[0], words.shape[1] // 4, 8])


@triton.jit
def columns(words, CODE: tl.constexpr, ASM: tl.constexpr):
    """[rows, 4 W] of CODE, inputs in their own order; words: [rows, W]."""
    both = tl.join(_eights(words << 8, CODE, ASM), _eights(words, CODE, ASM))
    return tl.reshape(tl.permute(both, (0, 1, 3, 2)), [words.shape[0], 4 * words.shape[1]])


def asm_of(code: torch.dtype) -> str:
    """What `_pairs` computes with, for floats of `code`; nothing in the interpreter."""
    return "" if knobs.runtime.interpret else _ASM[code]
