"""The sampler and its random numbers, on a card: the host's draws, and the right distribution."""

from typing import Any

import pytest
import torch

from octavo_kernels.sample import sample, sample_reference
from tests.kernels import draws
from tests.kernels import sample_checks as checks
from tests.kernels.cases import (
    case_id,
    logits_of,
    pairwise,
    sample_factors,
    sampling_parameters,
)
from tests.kernels.distribution import chi_square, chi_square_limit, filtered_probabilities

pytestmark = pytest.mark.gpu

FACTORS = sample_factors() | {"vocab_size": (1, 5, 301, 4099, 49_152, 128_256)}
FILTERS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 40},
    {"min_p": 0.2},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "min_p": 0.02},
]


@pytest.mark.parametrize("case", pairwise(FACTORS, count=60), ids=case_id)
def test_sample(case: dict[str, Any]) -> None:
    checks.check_sample(case, "cuda", num_rows=7)


def test_mixed_rows_draw_what_the_host_draws() -> None:
    """256 rows of a real vocabulary, each with its own setting."""
    num_rows = 256
    logits = logits_of("normal", num_rows, 32_000, seed=25)
    parameters = sampling_parameters(num_rows, 1.0, 1.0, 0, 0.0, seed=26)
    row = torch.arange(num_rows)
    parameters["temperature"] = torch.tensor([0.0, 0.5, 0.8, 1.0, 2.0])[row % 5]
    parameters["top_p"] = torch.tensor([1.0, 0.95, 0.5])[row % 3]
    parameters["top_k"] = torch.tensor([0, 50, 1, 20], dtype=torch.int32)[row % 4]
    parameters["min_p"] = torch.tensor([0.0, 0.05])[row % 2]
    on_card = {name: value.cuda() for name, value in parameters.items()}
    tokens = sample(logits.cuda(), **on_card)
    assert tokens.tolist() == sample_reference(logits, **parameters).tolist()


def test_flat_draws_are_uniform() -> None:
    tokens = checks.draw_many(torch.zeros(1000), 200_000, "cuda")
    flat = torch.full((1000,), 1e-3)
    assert chi_square(tokens, flat) < chi_square_limit(1000)


@pytest.mark.parametrize("parts", [2, 5, 32])
def test_a_race_in_parts_has_one_winner(parts: int) -> None:
    checks.check_parts("cuda", vocab_size=128_256, parts=parts)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filtered_draws_have_the_filtered_distribution(filters: dict[str, Any]) -> None:
    settings = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0} | filters
    logits = torch.linspace(3.0, -3.0, 200)[torch.randperm(200)]
    tokens = checks.draw_many(logits, 200_000, "cuda", **settings)
    probabilities = filtered_probabilities(logits, **settings)
    limit = chi_square_limit(int((probabilities > 0).sum()))
    assert chi_square(tokens, probabilities) < limit


@pytest.mark.parametrize("filters", checks.FILTERS, ids=str)
def test_filters(filters: dict[str, Any]) -> None:
    checks.check_filters(filters, "cuda", num_rows=2000)


def test_bad_rows_are_marked_and_alone() -> None:
    checks.check_bad_rows("cuda")


def test_a_draw_does_not_depend_on_the_batch() -> None:
    checks.check_batch_invariance("cuda")


def test_exponentials_are_those_of_the_specification() -> None:
    draws.check_exponentials("cuda")


def test_exponentials_are_accurate_at_the_edges() -> None:
    draws.check_edges("cuda")


def test_offsets_beyond_32_bits() -> None:
    checks.check_far_logits("cuda")


def test_no_logits_launch_nothing() -> None:
    checks.check_no_logits("cuda")
