"""The sampler and its random numbers, in Triton's interpreter."""

from typing import Any

import pytest
import torch

from octavo_kernels import sample
from tests.kernels import draws
from tests.kernels import sample_checks as checks
from tests.kernels.cases import case_id, pairwise, sample_factors
from tests.kernels.distribution import chi_square, chi_square_limit

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("case", pairwise(sample_factors(), count=24), ids=case_id)
def test_sample(case: dict[str, Any]) -> None:
    checks.check_sample(case, "cpu", num_rows=3)


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_a_race_in_parts_has_one_winner(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "_MAX_TILE", 64)
    checks.check_parts("cpu", vocab_size=333, parts=parts)


@pytest.mark.parametrize("filters", checks.FILTERS, ids=str)
def test_filters(filters: dict[str, Any]) -> None:
    checks.check_filters(filters, "cpu", num_rows=50)


def test_bad_rows_are_marked_and_alone() -> None:
    checks.check_bad_rows("cpu")


def test_a_draw_does_not_depend_on_the_batch() -> None:
    checks.check_batch_invariance("cpu")


def test_exponentials_are_those_of_the_specification() -> None:
    draws.check_exponentials("cpu")


def test_exponentials_are_accurate_at_the_edges() -> None:
    draws.check_edges("cpu")


def test_flat_draws_are_uniform() -> None:
    tokens = checks.draw_many(torch.zeros(8), 160, "cpu")
    assert chi_square(tokens, torch.full((8,), 1 / 8)) < chi_square_limit(8)


def test_offsets_beyond_32_bits() -> None:
    checks.check_far_logits("cpu")


def test_no_logits_launch_nothing() -> None:
    checks.check_no_logits("cpu")
