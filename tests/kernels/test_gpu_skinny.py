"""Products of a few rows on a card: odd shapes with any tiles, models' shapes with the chosen."""

from typing import Any

import pytest
import torch

from octavo_kernels.skinny_tiles import Config, choose_config
from tests.kernels import skinny_checks
from tests.kernels.cases import case_id, pairwise

pytestmark = pytest.mark.gpu

FACTORS = skinny_checks.FACTORS | {
    "dtype": (torch.bfloat16, torch.float32),
    "num_rows": (1, 3, 17, 40, 64, 100, 128),
    "tile_n": (64, 128),
}
NARROW = (
    FACTORS
    | skinny_checks.NARROW
    | {
        "num_rows": FACTORS["num_rows"],
        "num_n": (128, 256),
        "dtype": (torch.bfloat16, torch.float16, torch.float32),
    }
)
# (outputs, inputs, gated): of 8B and 0.6B models.
SHAPES = (
    (6144, 4096, False),
    (4096, 4096, False),
    (14_336, 4096, True),
    (4096, 14_336, False),
    (4096, 1024, False),
    (3072, 1024, True),
    (1024, 3072, False),
)


@pytest.mark.parametrize("case", pairwise(FACTORS, count=40), ids=case_id)
def test_any_tiles(case: dict[str, Any]) -> None:
    tile_k = 32 if case["dtype"] == torch.float32 else 64
    config = Config(case["tile_n"], tile_k, case["split_k"], 4, 2, case["joint"])
    skinny_checks.check_skinny_gemm(case, config, "cuda")
    skinny_checks.check_skinny_gemm_add(case, config, "cuda")


@pytest.mark.parametrize("case", pairwise(NARROW, count=40), ids=case_id)
def test_narrow_weights(case: dict[str, Any]) -> None:
    config = Config(case["tile_n"], 128, case["split_k"], 4, 3, case["joint"])
    skinny_checks.check_skinny_gemm(case, config, "cuda")
    skinny_checks.check_skinny_gemm_add(case, config, "cuda")


@pytest.mark.parametrize("num_rows", [1, 24, 64, 128])
@pytest.mark.parametrize(("form", "least_rows_without"), [("dense", 65), ("e4m3", 33), (128, 129)])
@pytest.mark.parametrize(("num_n", "num_k", "is_gated"), SHAPES)
def test_chosen_tiles(
    num_n: int,
    num_k: int,
    is_gated: bool,
    form: str | int,
    least_rows_without: int,
    num_rows: int,
) -> None:
    """Of so many rows and more a form may have none: the library's product is faster."""
    case = {
        "form": form,
        "num_rows": num_rows,
        "num_n": num_n,
        "num_k": num_k,
        "is_gated": is_gated,
        "has_bias": False,
        "has_norm": True,
        "dtype": torch.bfloat16,
    }
    weight = skinny_checks.weight_of(case, num_n * (1 + is_gated), "cuda")[0]
    config = choose_config(num_rows, weight, gated=is_gated)
    if config is None:
        assert num_rows >= least_rows_without
        return
    skinny_checks.check_skinny_gemm(case, config, "cuda")
    if not is_gated:
        skinny_checks.check_skinny_gemm_add(case, config, "cuda")
