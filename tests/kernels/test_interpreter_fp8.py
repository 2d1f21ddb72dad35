"""8-bit floats in Triton's interpreter.

It rounds to e4m3 wrongly, so rounding is tested with float16 in e4m3's place (same code); reading
e4m3 works.
"""

from typing import Any

import pytest
import torch

from tests.kernels import fp8_checks as checks
from tests.kernels.cases import case_id, pairwise

pytestmark = pytest.mark.interpreter


def test_quantize_rows() -> None:
    checks.check_quantize_rows("cpu", torch.float16)
    checks.check_arranged_rows("cpu", torch.float16)


@pytest.mark.parametrize("case", pairwise(checks.FACTORS, count=12), ids=case_id)
def test_fp8_gemm(case: dict[str, Any]) -> None:
    checks.check_fp8_gemm(case, "cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_attention_over_a_cache_of_8_bits(dtype: torch.dtype) -> None:
    checks.check_attention("cpu", dtype, 64)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size", "window"),
    [(torch.float16, 64, 16, None), (torch.float16, 96, 32, 20), (torch.float32, 64, 16, 17)],
    ids=str,
)
def test_lone_queries_over_a_cache_of_8_bits(
    dtype: torch.dtype, head_dim: int, block_size: int, window: int | None
) -> None:
    checks.check_lone_queries("cpu", dtype, head_dim, block_size, window)


def test_what_a_cache_of_8_bits_stores() -> None:
    checks.check_store("cpu", torch.float16)
