"""Random values in place of a stored layer's, of mean 0 and of the wanted standard deviation.

Random bits are codes with a mean between two integers. A layer whose weights all lie off by half
a scale adds up over its inputs and the layers after it, beyond what float16 holds; so codes and
zero points are drawn to fit each other. Must not know: formats, layers. Entry points:
`draw_codes`, `draw_zeros`, `draw_scales`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from octavo_worker.quant.codes import repeated

Fill = Callable[[Tensor, torch.Generator, float], None]
# Scales differ by this fraction of their mean, either way.
_SCALE_SPREAD = 0.3


def draw_codes(bits: int, *, symmetric: bool) -> Fill:
    """A fill for int32 words of codes of `bits` bits.

    `symmetric`: the zero point is 2^(bits - 1). Only the lowest code has no opposite then, and
    becomes the zero point.
    """
    lowest_bits = repeated(1, bits)

    def fill(target: Tensor, generator: torch.Generator, _std: float) -> None:
        _draw_bits(target, generator)
        if symmetric:
            is_any = target.clone()
            for place in range(1, bits):
                is_any |= target >> place
            target |= (~is_any & lowest_bits) << (bits - 1)

    return fill


def draw_zeros(bits: int, *, minus: int = 0) -> Fill:
    """A fill for int32 words of zero points, stored less `minus`: the two integers beside the
    mean of all codes."""
    lower, lowest_bits = repeated((1 << (bits - 1)) - 1 - minus, bits), repeated(1, bits)

    def fill(target: Tensor, generator: torch.Generator, _std: float) -> None:
        _draw_bits(target, generator)
        # The sum may wrap, as words do.
        target.bitwise_and_(lowest_bits).add_(lower)

    return fill


def draw_scales(bits: int, *, symmetric: bool) -> Fill:
    """A fill for the scales of codes and zero points that are drawn as above."""
    count = 1 << bits
    # What is uniform over n integers has a variance of (n^2 - 1) / 12, a zero point adds 1 / 4;
    # symmetric codes leave out the lowest, which is the farthest from the zero point.
    variance = ((count - 1) * (count - 2) if symmetric else count**2 + 2) / 12
    deviation = (variance * (1 + _SCALE_SPREAD**2 / 3)) ** 0.5

    def fill(target: Tensor, generator: torch.Generator, std: float) -> None:
        mean = std / deviation
        low, high = (1 - _SCALE_SPREAD) * mean, (1 + _SCALE_SPREAD) * mean
        target.uniform_(low, high, generator=generator)

    return fill


def _draw_bits(target: Tensor, generator: torch.Generator) -> None:
    target.random_(-(1 << 31), 1 << 31, generator=generator)
