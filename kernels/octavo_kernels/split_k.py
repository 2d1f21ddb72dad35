"""Products whose inner dimension is split over programs, so that few outputs fill the card too.

Each split leaves its float32 sums; the last program of a tile to arrive adds them up in the
splits' order, so that the result doesn't depend on who came last. Used by `w4a16` and
`fp8_gemm`, whose weights own the counters of arrivals: zero but while a product runs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.launch import cdiv, offset64

_MIN_TILES_PER_SPLIT = 2


@triton.jit
def finish_split(
    out, partial, arrivals, total, place, mask, split, num_splits, arrival, split_stride
):
    """Stores a tile, or a split's sum of it; the last split to arrive adds them all up."""
    if num_splits == 1:
        tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(partial + offset64(split, split_stride) + place, total, mask=mask)
        # All threads' stores come before the one thread's atomic, which releases them.
        tl.debug_barrier()
        before = tl.atomic_add(arrivals + arrival, 1, sem="acq_rel", scope="gpu")
        if before == num_splits - 1:
            total = tl.zeros_like(total)
            source = partial + place
            for _ in range(num_splits):
                total += tl.load(source, mask=mask, other=0.0, cache_modifier=".cg")
                source += split_stride
            tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)
            tl.store(arrivals + arrival, 0)


def splits(num_tiles: int, num_programs: int, most: int) -> tuple[int, int]:
    """(splits of the inner dimension, tiles in one) that bring the programs near `most`; none is
    empty."""
    wanted = max(1, min(most // num_programs, num_tiles // _MIN_TILES_PER_SPLIT))
    per_split = cdiv(num_tiles, wanted)
    return cdiv(num_tiles, per_split), per_split


def partial_sums(out: Tensor, num_splits: int) -> Tensor:
    """Room for the splits' sums [splits, *out]; none where there is one split."""
    shape = (num_splits if num_splits > 1 else 0, *out.shape)
    return torch.empty(shape, dtype=torch.float32, device=out.device)
