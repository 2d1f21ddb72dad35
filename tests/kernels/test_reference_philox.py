"""The references of the sampler's random numbers are those of the shared specification."""

import numpy as np
import pytest
import torch

from octavo import philox as spec
from octavo_kernels.philox import exponentials_reference, words_reference

PLACES = [
    (0, 7, 0, 0, 0),
    (0x0123_4567_89AB_CDEF, 128, 4095, 3, 1),
    (2**63 + 5, 49_152, 2**32 - 1, 127, 16),
    (2**64 - 1, 3, 1, 0, 0),
]


def _signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


@pytest.mark.parametrize("place", PLACES)
def test_words(place: tuple[int, ...]) -> None:
    seed, *rest = place
    expected = spec.words(seed, *rest)
    assert np.array_equal(words_reference(_signed(seed), *rest).numpy(), expected)


@pytest.mark.parametrize("place", PLACES)
def test_exponentials(place: tuple[int, ...]) -> None:
    seed, *rest = place
    expected = torch.from_numpy(spec.exponentials(seed, *rest))
    torch.testing.assert_close(
        exponentials_reference(_signed(seed), *rest), expected, rtol=3e-7, atol=0.0
    )
