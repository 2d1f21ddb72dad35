"""What the sampler must fulfil, on whatever device: the draws of its reference.

What draws of a distribution look like: `distribution`.
"""

from typing import Any

import torch
from torch import Tensor

from octavo_kernels.sample import sample, sample_reference
from tests.kernels.cases import (
    far_apart,
    logits_of,
    poisoned_outputs,
    sampling_parameters,
    strided_rows,
)
from tests.kernels.distribution import filtered_probabilities

FILTERS: list[dict[str, Any]] = [
    {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 0, "min_p": 0.0},
    {"temperature": 1.5, "top_p": 1.0, "top_k": 5, "min_p": 0.0},
    {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.2},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 6, "min_p": 0.1},
]


def check_sample(case: dict[str, Any], device: str, num_rows: int) -> None:
    filters = {name: case[name] for name in ("temperature", "top_p", "top_k", "min_p")}
    logits = logits_of(case["shape"], num_rows, case["vocab_size"], seed=16)
    parameters = sampling_parameters(num_rows, **filters, seed=17)
    on_device = {name: value.to(device) for name, value in parameters.items()}
    with poisoned_outputs():
        tokens = sample(strided_rows(logits.to(device)), **on_device)
    assert tokens.tolist() == sample_reference(logits, **parameters).tolist()


def check_parts(device: str, *, vocab_size: int, parts: int) -> None:
    """Rows of every kind, each row's first race cut into `parts`."""
    logits = logits_of("normal", 7, vocab_size, seed=18) * 3
    logits[3, 5], logits[4], logits[5, ::2] = torch.nan, -torch.inf, -torch.inf
    parameters = sampling_parameters(7, temperature=1.0, top_p=0.8, top_k=0, min_p=0.0, seed=19)
    parameters["temperature"][0] = 0.0
    parameters["top_p"][1] = 1.0
    parameters["top_k"][2] = 5
    expected = sample_reference(logits, **parameters).tolist()
    on_device = {name: value.to(device) for name, value in parameters.items()}
    with poisoned_outputs():
        tokens = sample(logits.to(device), **on_device, parts=parts)
    assert tokens.tolist() == expected


def check_filters(filters: dict[str, Any], device: str, num_rows: int) -> None:
    """Twelve distinct tokens, so that every filter's border is met often."""
    logits = torch.linspace(1.5, -1.5, 12).expand(num_rows, -1)
    parameters = sampling_parameters(num_rows, **filters, seed=27)
    on_device = {name: value.to(device) for name, value in parameters.items()}
    tokens = sample(logits.to(device), **on_device).tolist()
    assert tokens == sample_reference(logits, **parameters).tolist()
    allowed = filtered_probabilities(logits[0], **filters).nonzero().flatten().tolist()
    assert set(tokens) <= set(allowed)


def check_bad_rows(device: str) -> None:
    """A bad row gets -1, greedy or not, filtered or not; its neighbours what they'd get alone."""
    vocab_size = 301
    logits = logits_of("normal", 12, vocab_size, seed=18)
    bad_values = (torch.nan, torch.inf, -torch.inf)
    for row, value in enumerate(bad_values * 2):
        # -inf is bad only if it is all there is.
        logits[2 * row, slice(None) if value == -torch.inf else slice(300, 301)] = value
    parameters = sampling_parameters(12, 0.8, 1.0, 0, 0.0, seed=19)
    parameters["temperature"][6:] = 0.0
    for top_p in (1.0, 0.5):
        parameters["top_p"].fill_(top_p)
        on_device = {name: value.to(device) for name, value in parameters.items()}
        tokens = sample(logits.to(device), **on_device).tolist()
        assert tokens[::2] == [-1] * 6
        assert tokens == sample_reference(logits, **parameters).tolist()
        assert all(0 <= token < vocab_size for token in tokens[1::2])


def check_batch_invariance(device: str) -> None:
    """A row draws the same alone, in a batch, and in another place of it."""
    num_rows = 9
    logits = logits_of("normal", num_rows, 301, seed=20).to(device)
    parameters = sampling_parameters(num_rows, 1.0, 0.8, 40, 0.01, seed=21)
    parameters = {name: value.to(device) for name, value in parameters.items()}
    together = sample(logits, **parameters).tolist()
    backwards = {name: value.flip(0) for name, value in parameters.items()}
    assert sample(logits.flip(0), **backwards).tolist() == together[::-1]
    for row in range(num_rows):
        alone = {name: value[row : row + 1] for name, value in parameters.items()}
        assert sample(logits[row : row + 1], **alone).tolist() == [together[row]]


def check_far_logits(device: str) -> None:
    """Rows times row strides beyond 32 bits."""
    logits = far_apart(3, 100, dtype=torch.float32, device=device)
    logits.copy_(logits_of("normal", 3, 100, seed=14))
    parameters = sampling_parameters(3, 1.0, 0.9, 0, 0.0, seed=15)
    parameters = {name: value.to(device) for name, value in parameters.items()}
    assert torch.equal(sample(logits, **parameters), sample_reference(logits, **parameters))


def check_no_logits(device: str) -> None:
    parameters = sampling_parameters(0, 1.0, 1.0, 0, 0.0, seed=0)
    parameters = {name: value.to(device) for name, value in parameters.items()}
    assert sample(torch.empty((0, 9), device=device), **parameters).shape == (0,)


def draw_many(
    logits_row: Tensor,
    num_draws: int,
    device: str,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
) -> Tensor:
    """Draws of one row at positions 0, 1, ..., for one seed."""
    parameters = sampling_parameters(num_draws, temperature, top_p, top_k, min_p, seed=22)
    parameters["seed"].fill_(2026)
    parameters["sequence_index"].zero_()
    parameters["position"] = torch.arange(num_draws)
    parameters = {name: value.to(device) for name, value in parameters.items()}
    return sample(logits_row.to(device).expand(num_draws, -1), **parameters)
