"""Reads memory as fast as a card can: what memory-bound kernels are held against.

Every program takes the largest number of one contiguous tile; next to nothing is written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.launch import Launch

TILE = 8192


@triton.jit
def _read_kernel(out, x, TILE: tl.constexpr):
    tile = tl.program_id(0)
    values = tl.load(x + tile.to(tl.int64) * TILE + tl.arange(0, TILE))
    tl.store(out + tile, tl.max(values, axis=0))


def read_probe_launch(out: Tensor, x: Tensor) -> Launch:
    return Launch(
        kernel=_read_kernel,
        grid=(out.shape[0],),
        args=(out, x),
        constants={"TILE": TILE},
        num_warps=8,
    )


def read_probe(x: Tensor) -> Tensor:
    """The largest number of each tile of 8,192: x int32 [n * 8192], contiguous -> [n]."""
    assert x.dtype == torch.int32, x.dtype
    assert x.is_contiguous(), x.stride()
    assert x.numel() % TILE == 0, x.shape
    out = torch.empty(x.numel() // TILE, dtype=x.dtype, device=x.device)
    read_probe_launch(out, x).run()
    return out


def read_probe_reference(x: Tensor) -> Tensor:
    return x.view(-1, TILE).amax(1)
