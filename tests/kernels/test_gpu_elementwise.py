"""Norms, SwiGLU and rope with the cache write, on a card."""

from typing import Any

import pytest
import torch

from tests.kernels import elementwise_checks as checks
from tests.kernels.cases import case_id, elementwise_factors, pairwise, rope_factors

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FACTORS = elementwise_factors(DTYPES) | {"width": (1, 24, 127, 576, 3584, 4096, 14_336, 28_672)}
ELEMENTWISE = pairwise(FACTORS, count=60)


@pytest.mark.parametrize("case", ELEMENTWISE, ids=case_id)
def test_rms_norm(case: dict[str, Any]) -> None:
    checks.check_rms_norm(case, "cuda")


@pytest.mark.parametrize("case", ELEMENTWISE, ids=case_id)
def test_add_rms_norm(case: dict[str, Any]) -> None:
    checks.check_add_rms_norm(case, "cuda")


@pytest.mark.parametrize("case", ELEMENTWISE, ids=case_id)
def test_gated_mul(case: dict[str, Any]) -> None:
    checks.check_gated_mul(case, "cuda")


@pytest.mark.parametrize("case", pairwise(rope_factors(DTYPES), count=60), ids=case_id)
def test_rope_and_cache(case: dict[str, Any]) -> None:
    checks.check_rope_and_cache(case, "cuda")


def test_offsets_beyond_32_bits() -> None:
    checks.check_far_rows("cuda")


def test_empty_inputs_launch_nothing() -> None:
    checks.check_empty_rows("cuda")
