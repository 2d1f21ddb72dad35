"""The distribution that filters leave, by a sort, and how far draws may lie from it."""

import torch
from torch import Tensor


def filtered_probabilities(
    logits: Tensor, temperature: float, top_p: float, top_k: int, min_p: float
) -> Tensor:
    """[V] by sorting: a token stays if the mass and the count of the likelier ones allow it."""
    probabilities = (logits.double() / temperature).softmax(-1)
    ordered, order = probabilities.sort(descending=True)
    stays = ordered.cumsum(-1) - ordered < top_p
    stays &= ordered >= min_p * ordered[0]
    if top_k > 0:
        stays[top_k:] = False
    kept = torch.zeros_like(probabilities)
    kept[order[stays]] = ordered[stays]
    return kept / kept.sum()


def chi_square(tokens: Tensor, probabilities: Tensor) -> float:
    """Pearson's statistic of drawn tokens; tokens of probability 0 must not occur."""
    counts = torch.bincount(tokens.cpu(), minlength=len(probabilities)).double()
    expected = probabilities.double() * len(tokens)
    is_possible = probabilities > 0
    assert int(counts[~is_possible].sum()) == 0
    return float(((counts - expected).square() / expected)[is_possible].sum())


def chi_square_limit(num_values: int) -> float:
    """The 99.99 % quantile for so many values (Wilson and Hilferty's approximation)."""
    degrees = max(num_values - 1, 1)
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.719 * spread**0.5) ** 3
