"""Slots: the places of a model's parameters, by the names that checkpoints have for them.

A slot says how its tensor is stored and how the values get from there to their place; a layer
that keeps weights in another form than checkpoints do (a shard of them, packed integers) says
so in its slots. Must not know: files, layers. Entry points: `Place`, `Slot`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
# Staged at once by a thread: torch keeps what it once pinned.
_PINNED_BYTES = 64 << 20


class Place(Protocol):
    """Where one stored tensor goes: the shape and the dtypes that it must have in the file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtypes(self) -> frozenset[torch.dtype]: ...

    def load(self, stored: Tensor) -> None:
        """Copy the stored tensor's values to their place; several threads load at once."""
        ...


class BadValuesError(Exception):
    """What a `take` raises for a stored tensor whose values can't be right; says why."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one stored tensor, or of a part of one (`FusedSlot`).

    `target`: where the values go, on the device, cast to its dtype. `shape`: the stored tensor's
    (default: the target's). `dtypes`: those that it may have in the file. `take`: what of the
    stored tensor (on the CPU, memory-mapped) belongs here, in the target's shape (default: all
    of it as it is). `fill`: draws random values in place of stored ones, from (target, generator,
    standard deviation) (default: normal). `out_axis`: the axis of the stored tensor along which
    the layer's outputs lie, packed or not; None = none, it's the same for all of them. `reorder`:
    of a layer whose outputs can't be put into another order while they are loaded; takes int64
    [outputs of the whole layer], the stored output of each wanted one.
    """

    target: Tensor
    shape: tuple[int, ...] = ()
    dtypes: frozenset[torch.dtype] = FLOATS
    take: Callable[[Tensor], Tensor] | None = None
    fill: Callable[[Tensor, torch.Generator, float], None] | None = field(default=None)
    out_axis: int | None = 0
    reorder: Callable[[Tensor], None] | None = None

    def __post_init__(self) -> None:
        if not self.shape:
            object.__setattr__(self, "shape", tuple(self.target.shape))

    def load(self, stored: Tensor) -> None:
        """Copy a stored tensor's values to their place."""
        values = stored if self.take is None else self.take(stored)
        if values.is_cpu and self.target.is_cuda:
            # Through pinned memory: this thread reads the file while others' copies run, where
            # the driver would copy pages of the mapping one by one.
            for target, piece in in_pieces(self.target, values, _PINNED_BYTES):
                target.copy_(piece.to(target.dtype).pin_memory())
        else:
            self.target.copy_(values)

    def draw(self, generator: torch.Generator, std: float) -> None:
        """Random values."""
        if self.fill is None:
            self.target.normal_(0.0, std, generator=generator)
        else:
            self.fill(self.target, generator, std)


@dataclass(frozen=True, slots=True)
class FusedSlot:
    """The place of one stored tensor that holds those of several slots, along their outputs."""

    parts: tuple[Slot, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        shape, axis = list(self.parts[0].shape), self.parts[0].out_axis
        if axis is not None:
            shape[axis] = sum(part.shape[axis] for part in self.parts)
        return tuple(shape)

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        return self.parts[0].dtypes

    def load(self, stored: Tensor) -> None:
        """Give each slot its part; all of it where there are no outputs to part it by."""
        start = 0
        for part in self.parts:
            if part.out_axis is None:
                part.load(stored)
                continue
            size = part.shape[part.out_axis]
            part.load(stored.narrow(part.out_axis, start, size))
            start += size


def in_pieces(target: Tensor, values: Tensor, num_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of rows of both, of about `num_bytes` of the target (a row at least)."""
    if target.ndim == 0 or target.nbytes <= num_bytes:
        yield target, values
        return
    rows = max(1, num_bytes * len(target) // target.nbytes)
    yield from zip(target.split(rows), values.split(rows), strict=True)


def ones(target: Tensor, _generator: torch.Generator, _std: float) -> None:
    """A `fill` for the weights of norms."""
    target.fill_(1.0)
