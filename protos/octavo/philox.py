"""Counter-based random numbers and the sampling rule, the same on every backend.

Spec (version 1). Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3",
SC11) with

    key     = (seed & 0xffffffff, seed >> 32)                       64-bit seed of the request
    counter = (token >> 2, position, sequence_index, round)

gives four 32-bit words; token `t` of the vocabulary takes word `t & 3`. `position` is the
index in the sequence (prompt included) of the token being drawn, `sequence_index` which of
the request's n sequences it is, `round` the number of rejected draws before. So a draw does
not depend on the batch, the worker or the vocabulary's sharding, and siblings differ.

    u = min((x + 0.5) * 2**-32, 1 - 2**-24)      float32, in (0, 1)
    e = -log1p(-u)                               a standard exponential
    drawn token = argmax over allowed t of  logit_t / temperature - log(e_t)

which draws from softmax(logit / temperature) over the allowed tokens (exponential race). The
first round allows all tokens. The drawn token t is accepted when the mass of the tokens that
are strictly likelier is < top_p, their count is < top_k (if top_k > 0) and p_t >= min_p * max p;
otherwise the next round allows only tokens strictly likelier than t. This equals sampling
from the filtered distribution: every round draws proportionally to p on a superset of it.

Must not know: services, torch. Entry points: `philox4x32`, `uniforms`, `exponentials`.
"""

import numpy as np
import numpy.typing as npt

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_ROUNDS = 10
MAX_UNIFORM = np.float32(1.0 - 2.0**-24)


def philox4x32(
    counter: tuple[int | npt.NDArray[np.uint64], int, int, int], key: tuple[int, int]
) -> tuple[npt.NDArray[np.uint64], ...]:
    """Four words in [0, 2**32), each with the shape of `counter[0]`."""
    c0, c1, c2, c3 = (np.atleast_1d(np.asarray(word, dtype=np.uint64)) for word in counter)
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = c0 * np.uint64(_M0)
        product1 = c2 * np.uint64(_M1)
        c0, c1, c2, c3 = (
            (product1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            product1 & np.uint64(_MASK),
            (product0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            product0 & np.uint64(_MASK),
        )
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return tuple(np.broadcast_arrays(c0, c1, c2, c3))


def words(
    seed: int, vocab_size: int, position: int, sequence_index: int, draw_round: int
) -> npt.NDArray[np.uint64]:
    """The 32-bit word of every token: [vocab_size], values in [0, 2**32)."""
    groups = np.arange((vocab_size + 3) // 4, dtype=np.uint64)
    key = (seed & _MASK, seed >> 32)
    lanes = philox4x32((groups, position, sequence_index, draw_round), key)
    return np.stack(lanes, axis=1).reshape(-1)[:vocab_size]


def uniforms(
    seed: int, vocab_size: int, position: int, sequence_index: int, draw_round: int
) -> npt.NDArray[np.float32]:
    """[vocab_size] float32 in (0, 1)."""
    raw = words(seed, vocab_size, position, sequence_index, draw_round).astype(np.float32)
    return np.minimum((raw + np.float32(0.5)) * np.float32(2.0**-32), MAX_UNIFORM)


def exponentials(
    seed: int, vocab_size: int, position: int, sequence_index: int, draw_round: int
) -> npt.NDArray[np.float32]:
    """[vocab_size] float32, standard exponential variables."""
    return -np.log1p(-uniforms(seed, vocab_size, position, sequence_index, draw_round))
