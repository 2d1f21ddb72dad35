"""A pool's blocks as a small map: at most 512 cells, each the mix of its blocks.

A large pool is looked at through every n-th block, in slices between which the event loop
turns: a map costs the same, about a millisecond, however many blocks there are.

Must not know: workers, protos. Entry point: `draw_map`.
"""

import asyncio
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo_scheduler.block_pool import BlockPool, BlockState

MAX_CELLS = 512
# Blocks looked at for one map, and between two turns of the event loop (some 0.2 ms).
MAX_BLOCKS = 8192
_SLICE_BLOCKS = 2048
# A cell's share of a state is a hexadecimal digit.
_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)
_FULL = 15


class BlockMap(NamedTuple):
    """`cells`: state -> a digit per cell, its share of the cell in fifteenths, no digit 0 for a
    state that is there; what is left of a cell is free. `num_shared`: blocks with several
    holders, an estimate if not every block was looked at."""

    cells: dict[str, str]
    num_shared: int


async def draw_map(pool: BlockPool) -> BlockMap:
    """The pool as it is now; what changes between two slices may be seen before or after."""
    stride = -(-pool.num_usable // MAX_BLOCKS)
    pieces: list[npt.NDArray[np.uint8]] = []
    step = _SLICE_BLOCKS * stride
    for start in range(1, pool.num_blocks, step):
        if pieces:
            await asyncio.sleep(0)
        pieces.append(pool.states_of(slice(start, min(start + step, pool.num_blocks), stride)))
    states = np.concatenate(pieces)
    num_shared = int(np.count_nonzero(states == BlockState.SHARED))
    scale = pool.num_usable / states.size
    return BlockMap(_cells(states), round(num_shared * scale))


def _cells(states: npt.NDArray[np.uint8]) -> dict[str, str]:
    num_cells = min(MAX_CELLS, states.size)
    cell = np.arange(states.size) * num_cells // states.size
    num_states = len(BlockState)
    counts = np.bincount(cell * num_states + states, minlength=num_cells * num_states)
    counts = counts.reshape(num_cells, num_states)
    shares: Any = np.rint(counts * _FULL / counts.sum(axis=1, keepdims=True)).astype(int)
    shares = np.maximum(shares, counts > 0)
    return {
        state.name.lower(): _DIGITS[shares[:, state]].tobytes().decode()
        for state in BlockState
        if state is not BlockState.FREE
    }
