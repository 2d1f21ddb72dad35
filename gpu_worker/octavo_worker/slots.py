"""Slots: the places of a model's parameters, by the names that checkpoints have for them.

A slot says how its tensor is stored and how the values get from there to their place; a layer
that keeps weights in another form than checkpoints do (a shard of them, packed integers) says
so in its slots. Must not know: files, layers. Entry point: `Slot`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one stored tensor.

    `target`: where the values go, on the device, cast to its dtype. `shape`: the stored tensor's
    (default: the target's). `dtypes`: those that it may have in the file. `take`: what of the
    stored tensor (on the CPU, memory-mapped) belongs here, in the target's shape (default: all
    of it as it is). `fill`: draws random values in place of stored ones, from (target, generator,
    standard deviation) (default: normal).
    """

    target: Tensor
    shape: tuple[int, ...] = ()
    dtypes: frozenset[torch.dtype] = FLOATS
    take: Callable[[Tensor], Tensor] | None = None
    fill: Callable[[Tensor, torch.Generator, float], None] | None = field(default=None)

    def __post_init__(self) -> None:
        if not self.shape:
            object.__setattr__(self, "shape", tuple(self.target.shape))

    def load(self, stored: Tensor) -> None:
        """Copy a stored tensor's values to their place."""
        self.target.copy_(stored if self.take is None else self.take(stored))

    def draw(self, generator: torch.Generator, std: float) -> None:
        """Random values."""
        if self.fill is None:
            self.target.normal_(0.0, std, generator=generator)
        else:
            self.fill(self.target, generator, std)


def ones(target: Tensor, _generator: torch.Generator, _std: float) -> None:
    """A `fill` for the weights of norms."""
    target.fill_(1.0)
