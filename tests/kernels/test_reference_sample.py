"""The sampler's reference draws from the filtered distribution, which a sort defines."""

import pytest
import torch

from octavo_kernels.sample import sample_reference
from tests.kernels.cases import sampling_parameters
from tests.kernels.distribution import chi_square, chi_square_limit, filtered_probabilities
from tests.kernels.sample_checks import FILTERS


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_distribution(filters: dict) -> None:
    num_draws, vocab_size = 1500, 12
    logits = torch.linspace(1.5, -1.5, vocab_size)
    parameters = sampling_parameters(num_draws, **filters, seed=23)
    tokens = sample_reference(logits.expand(num_draws, -1), **parameters)
    probabilities = filtered_probabilities(logits, **filters)
    assert chi_square(tokens, probabilities) < chi_square_limit(int((probabilities > 0).sum()))


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    parameters = sampling_parameters(1, 0.0, 1.0, 0, 0.0, seed=24)
    assert sample_reference(logits, **parameters).tolist() == [1]
