"""Which tiles a product of a few rows takes (`skinny_gemm`), as measured on an H200.

Entry points: `choose_config`, `tile_rows`.
"""

from typing import NamedTuple

import torch

from octavo_kernels.launch import cdiv, next_power_of_2

# More tiles of 64 outputs than these fill a card twice over: no need to split, and more stages
# than two programs on a multiprocessor can hold don't help.
_MANY_TILES = 200
_PROGRAMS = 132
_LEAST_SPLIT_K = 1536
_FEW_WEIGHTS = 1 << 23


class Config(NamedTuple):
    """Tile sizes: weight rows, K, parts of K; warps and pipeline stages."""

    tile_n: int = 64
    tile_k: int = 128
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 4


def tile_rows(num_rows: int) -> int:
    """TILE_M: how many rows of x a program takes."""
    return min(128, max(16, next_power_of_2(num_rows)))


def choose_config(
    num_rows: int, num_n: int, num_k: int, dtype: torch.dtype, *, gated: bool = False
) -> Config | None:
    """Tiles for `num_rows` rows of x and `num_n` outputs; None = the library's product is faster.

    Read off `tests/bench/results/skinny_gemm_h200.jsonl` (made by `tests.bench.tune_skinny_gemm`):
    within 3 % of the best of some 60 tiles a shape, for the shapes of 0.6B to 8B models.
    """
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


def _split(num_n: int, num_k: int) -> int:
    """So many parts of K that the programs fill a card, none shorter than four tiles of 128."""
    if num_k < _LEAST_SPLIT_K:
        return 1
    return max(1, min(_PROGRAMS // cdiv(num_n, 64), num_k // 512))
