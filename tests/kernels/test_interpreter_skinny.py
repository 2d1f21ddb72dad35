"""Products of a few rows in Triton's interpreter."""

from typing import Any

import pytest
import torch

from octavo_kernels.skinny_tiles import Config
from tests.kernels import skinny_checks
from tests.kernels.cases import case_id, pairwise

pytestmark = pytest.mark.interpreter

NARROW = skinny_checks.NARROW | {"dtype": (torch.float16, torch.float32)}
FACTORS = skinny_checks.FACTORS | {"dtype": (torch.float16, torch.float32)}


@pytest.mark.parametrize("case", pairwise(FACTORS, count=12), ids=case_id)
def test_skinny_gemm(case: dict[str, Any]) -> None:
    config = Config(64, 64, case["split_k"], 4, 2, case["joint"])
    skinny_checks.check_skinny_gemm(case, config, "cpu")
    skinny_checks.check_skinny_gemm_add(case, config, "cpu")


@pytest.mark.parametrize("case", pairwise(NARROW, count=10), ids=case_id)
def test_narrow_weights(case: dict[str, Any]) -> None:
    config = Config(64, 128, case["split_k"], 4, 2, case["joint"])
    skinny_checks.check_skinny_gemm(case, config, "cpu")
    skinny_checks.check_skinny_gemm_add(case, config, "cpu")
