"""A decode step's two ends on a card."""

import pytest

from tests.kernels.step_rows_checks import check_step_rows

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seed", range(40))
def test_step_rows(seed: int) -> None:
    check_step_rows(seed, "cuda")
