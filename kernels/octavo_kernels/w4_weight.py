"""4-bit weights in one layout: W[n, k] = scale[n, g] * (code[n, k] - zero[n, g]).

g = k // group_size. Frantar et al., "GPTQ", 2022, and Lin et al., "AWQ", 2023, store weights so.
`pack` brings codes into the layout, once; `w4_codes` reads it in kernels, `w4a16` multiplies.

The layout. K is cut into tiles of 128, each into four runs of 32: one 32-bit word of a row holds
two neighbours from each run, nibble i + 4 h being column 32 i + 2 c + h of word c. So two integer
operations on a word give two neighbours of a run as 16-bit floats: `(word >> 4 i) & 0x000F000F`,
or-ed with the bits of 1024 (fp16; 128 in bf16), whose last mantissa bits then are the code. No
integer is converted. A tile of rows is one contiguous piece of memory.

Must not know: kernels. Entry points: `pack`, `W4Weight`, `check_group_size`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo_kernels.launch import cdiv

TILE_K = 128
RUNS = 4  # of a tile, of 32 columns each
RUN_K = TILE_K // RUNS
_WORDS = TILE_K // 8  # of a row in a tile
_PAD_N = 128
_MAX_ZERO = 16  # what GPTQ's first convention stores as 15
# Of the products that share `arrivals`: the least rows of W in a tile, the most tiles of M.
MIN_TILE_N = 64
MAX_ROW_TILES = 2


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
    runs = all_codes.view(padded_n, -1, RUNS, _WORDS, 2)
    words = torch.zeros(padded_n, padded_k // TILE_K, _WORDS, dtype=torch.int32).to(codes.device)
    for run in range(RUNS):
        for half in range(2):
            words |= runs[:, :, run, :, half].int() << (4 * run + 16 * half)

    bits = scales.view(torch.int16).int() & 0xFFFF | zeros.int() << 16
    groups = torch.zeros(padded_groups, padded_n, dtype=torch.int32, device=codes.device)
    groups[:num_groups, :out_size] = bits.t()
    num_tiles = padded_n // MIN_TILE_N
    return W4Weight(
        words=words.transpose(0, 1).contiguous(),
        groups=groups,
        arrivals=torch.zeros(MAX_ROW_TILES * num_tiles, dtype=torch.int32, device=codes.device),
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
