"""Which tiles a product of a few rows takes (`skinny_gemm`), as measured on an H200.

Entry points: `choose_config`, `tile_rows`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from octavo_kernels.launch import cdiv, next_power_of_2
from octavo_kernels.skinny_weight import Weight, size_of
from octavo_kernels.w4_weight import W4Weight

# More tiles of 64 outputs than these fill a card twice over: no need to split, and more stages
# than two programs on a multiprocessor can hold don't help.
_MANY_TILES = 200
_PROGRAMS = 132
_SHARED_BYTES = 224 << 10  # of a multiprocessor
_LEAST_SPLIT_K = 1536
_FEW_WEIGHTS = 1 << 23


class Config(NamedTuple):
    """Tile sizes: weight rows, K, parts of K; warps and pipeline stages; gate and up together?"""

    tile_n: int = 64
    tile_k: int = 128
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 4
    joint: bool = False


def tile_rows(num_rows: int) -> int:
    """TILE_M: how many rows of x a program takes."""
    return min(128, max(16, next_power_of_2(num_rows)))


def choose_config(num_rows: int, weight: Weight, *, gated: bool = False) -> Config | None:
    """Tiles for `num_rows` rows of x; None = another product is faster, or there are no tiles.

    Read off `tests/bench/results/skinny_gemm_h200.jsonl` (made by `tests.bench.tune_skinny_gemm`):
    within 3 % of the best of some 60 tiles a shape, for the shapes of 0.6B to 8B models.
    """
    num_n, num_k = size_of(weight)
    num_n = num_n // 2 if gated else num_n
    if isinstance(weight, Tensor):
        return _dense(num_rows, num_n, num_k, weight.dtype, gated=gated)
    return _narrow(num_rows, num_n, num_k, weight, gated=gated)


def _dense(
    num_rows: int, num_n: int, num_k: int, dtype: torch.dtype, *, gated: bool
) -> Config | None:
    tile_k = next((size for size in (128, 64, 32) if num_k % size == 0), 0)
    num_weights = num_n * num_k * (2 if gated else 1)
    if not tile_k or num_rows > 128 or (num_rows > 64 and num_weights < _FEW_WEIGHTS):
        return None
    tile_m = tile_rows(num_rows)
    if dtype.itemsize > 2:
        return Config(64, 32, _split(num_n, num_k), 4, 2)
    if cdiv(num_n, 64) < _MANY_TILES:
        return Config(64, tile_k, _split(num_n, num_k), 4, 6 if tile_m < 128 else 4)
    if tile_m == 128:
        return Config(128, min(tile_k, 64), 1, 8, 6)
    return Config(128 if tile_m == 64 else 64, tile_k, 1, 4, 4)


def _narrow(num_rows: int, num_n: int, num_k: int, weight: Weight, *, gated: bool) -> Config | None:
    """8-bit floats and 4-bit codes: less to read, so more programs share a multiprocessor."""
    is_w4, tile_m = isinstance(weight, W4Weight), tile_rows(num_rows)
    is_wide = cdiv(num_n, 64) >= _MANY_TILES
    most_rows = 128 if is_w4 else 32 if is_wide else 64
    if num_k % 128 or num_rows > most_rows or (is_w4 and gated and num_n % 64):
        return None
    tile_n = 128 if is_w4 and (tile_m == 128 or (is_wide and tile_m == 16)) else 64
    if num_n % tile_n:
        tile_n = 64
    num_tiles = cdiv(num_n, tile_n)
    if is_wide:
        split = 2 if tile_n == 128 and tile_m == 16 else 1
    else:
        programs = _PROGRAMS * {16: 3, 32: 3, 64: 2, 128: 1}[tile_m]
        split = max(1, min(programs // num_tiles, num_k // (512 if is_w4 else 1024)))
    joint = gated and is_wide and tile_m < 128
    # As many stages as the programs on one multiprocessor have room for together.
    stage_bytes = 128 * (tile_n * (2 if joint else 1) // (2 if is_w4 else 1) + 2 * tile_m)
    shared = _SHARED_BYTES // min(3, cdiv(num_tiles * split, _PROGRAMS))
    stages = min(8, max(3, shared // stage_bytes))
    return Config(tile_n, 128, split, 8 if tile_m == tile_n == 128 else 4, stages, joint)


def _split(num_n: int, num_k: int) -> int:
    """So many parts of K that the programs fill a card, none shorter than four tiles of 128."""
    if num_k < _LEAST_SPLIT_K:
        return 1
    return max(1, min(_PROGRAMS // cdiv(num_n, 64), num_k // 512))
