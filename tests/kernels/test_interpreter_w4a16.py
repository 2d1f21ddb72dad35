"""Products with 4-bit weights, in Triton's interpreter."""

from typing import Any

import pytest
import torch

from tests.kernels import w4a16_checks as checks
from tests.kernels.cases import case_id, pairwise

pytestmark = pytest.mark.interpreter

# Not bfloat16: the interpreter computes it silently wrong.
FACTORS = checks.factors((torch.float16, torch.float32)) | {"num_rows": (1, 17)}
CASES = pairwise(FACTORS, count=10)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_every_way_is_the_formula(case: dict[str, Any]) -> None:
    checks.check_w4a16(case, "cpu")


def test_odd_sizes() -> None:
    checks.check_odd_sizes("cpu")


def test_columns_stay_in_their_places() -> None:
    checks.check_columns_alone("cpu")


def test_no_rows_launch_nothing() -> None:
    checks.check_no_rows("cpu")
