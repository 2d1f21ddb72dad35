"""Counter-based random numbers on the card: Philox4x32-10 and the exponentials of the sampler.

Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC11. With

    key     = (seed & 0xffffffff, seed >> 32)
    counter = (token >> 2, position, sequence_index, round)

token t of the vocabulary takes word x = t & 3 of the four, and

    u = min((x + 0.5) * 2**-32, 1 - 2**-24)      float32, in (0, 1)
    e = -log1p(-u)                               a standard exponential

So a draw depends on nothing but the request's seed and the place of the token drawn. Small e
decide the race, and the card's own logarithm is only absolutely accurate near 1: logarithms are
written out here (the argument reduction and polynomial of fdlibm's logf, error below 1 ulp),
which also gives the interpreter and the card the same numbers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_MAX_UNIFORM = 1.0 - 2.0**-24
_MASK = 0xFFFFFFFF


@triton.jit
def log32(x):
    """Natural logarithm of positive normal float32."""
    # x = 2**exponent * (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)); 0x3F3504F3 is sqrt(1/2).
    shifted = x.to(tl.int32, bitcast=True) - 0x3F3504F3
    exponent = (shifted >> 23).to(tl.float32)
    f = ((shifted & 0x007FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    # log(1 + f) = f - f**2 / 2 + s * (f**2 / 2 + R(s**2)), s = f / (2 + f)
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    remainder = z * (0.66666662693 + w * 0.28498786688) + w * (0.40000972152 + w * 0.24279078841)
    half_square = 0.5 * f * f
    low = s * (half_square + remainder) + exponent * 9.0580006145e-06
    return low - half_square + f + exponent * 6.9313812256e-01


@triton.jit
def exponential32(word):
    """Standard exponentials of 32-bit words, float32, accurate to the smallest."""
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355)
    # log1p(-u) = log(w) + r / w, where w = 1 - u was rounded by the exactly known r.
    w = 1.0 - u
    r = (1.0 - w) - u
    return -(log32(w) + r / w)


@triton.jit
def exponentials(seed, first_group, position, sequence_index, draw_round, GROUPS: tl.constexpr):
    """[4 * GROUPS] exponentials of the tokens from 4 * first_group on.

    seed: int64, the bits of the 64-bit seed; the others are scalars below 2**32.
    """
    group = (first_group + tl.arange(0, GROUPS)).to(tl.uint32)
    zero = tl.zeros([GROUPS], tl.uint32)
    x0, x1, x2, x3 = tl.philox(
        seed,
        group,
        zero + position.to(tl.uint32),
        zero + sequence_index.to(tl.uint32),
        zero + draw_round.to(tl.uint32),
    )
    word = tl.interleave(tl.interleave(x0, x2), tl.interleave(x1, x3))
    return exponential32(word)


def words_reference(
    seed: int, vocab_size: int, position: int, sequence_index: int, draw_round: int
) -> Tensor:
    """The 32-bit word of every token: int64 [vocab_size]."""
    c0 = torch.arange((vocab_size + 3) // 4, dtype=torch.int64)
    c1 = torch.full_like(c0, position & _MASK)
    c2 = torch.full_like(c0, sequence_index & _MASK)
    c3 = torch.full_like(c0, draw_round)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        # 64-bit products wrap to the right bit pattern; the mask undoes the sign extension.
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _MASK) ^ c1 ^ k0,
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return torch.stack((c0, c1, c2, c3), dim=1).flatten()[:vocab_size]


def exponentials_reference(
    seed: int, vocab_size: int, position: int, sequence_index: int, draw_round: int
) -> Tensor:
    """float32 [vocab_size]."""
    word = words_reference(seed, vocab_size, position, sequence_index, draw_round)
    u = ((word.float() + 0.5) * 2.0**-32).clamp(max=_MAX_UNIFORM)
    return -torch.log1p(-u)
