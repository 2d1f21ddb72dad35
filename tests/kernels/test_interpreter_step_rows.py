"""A decode step's two ends in Triton's interpreter."""

import pytest

from tests.kernels.step_rows_checks import check_step_rows

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("seed", range(4))
def test_step_rows(seed: int) -> None:
    check_step_rows(seed, "cpu")
