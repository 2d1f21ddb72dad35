"""Slots for the few rows that need more than a row's fixed tensors.

A row gets a slot when it is added and gives it back when it leaves; the tensors that are indexed
by slots grow by doubling, so a worker whose rows need none holds none.

Must not know: what lies in the slots. Entry points: `SidePool`, `enlarge`.
"""

import numpy as np
import torch

from octavo_worker.plan import I64

_NO_SLOT = -1
_LEAST_SLOTS = 4


class SidePool:
    """Which slot each row has."""

    def __init__(self, num_rows: int) -> None:
        self.num_slots = 0
        self._slots = np.full(num_rows, _NO_SLOT, np.int64)
        self._free: list[int] = []

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def take(self, row: int) -> int:
        """A slot for `row`, which has none; afterwards `num_slots` may have grown."""
        assert self._slots[row] == _NO_SLOT, row
        if not self._free:
            num_slots = max(2 * self.num_slots, _LEAST_SLOTS)
            self._free = list(range(num_slots - 1, self.num_slots - 1, -1))
            self.num_slots = num_slots
        slot = self._free.pop()
        self._slots[row] = slot
        return slot

    def release(self, row: int) -> None:
        """Give the row's slot back, if it has one."""
        slot = int(self._slots[row])
        if slot != _NO_SLOT:
            self._slots[row] = _NO_SLOT
            self._free.append(slot)

    def clear(self) -> None:
        """No row has a slot."""
        for row in np.flatnonzero(self._slots != _NO_SLOT).tolist():
            self.release(row)

    def slots_of(self, rows: I64) -> I64:
        """The slots of rows that have one."""
        slots = self._slots[rows]
        assert (slots != _NO_SLOT).all(), rows
        return slots


def enlarge(tensor: torch.Tensor, shape: tuple[int, ...], fill: float | bool = 0) -> torch.Tensor:
    """`tensor` with at least `shape` entries along each dimension, new ones `fill`."""
    new_shape = [max(old, new) for old, new in zip(tensor.shape, shape, strict=True)]
    if new_shape == list(tensor.shape):
        return tensor
    larger = tensor.new_full(new_shape, fill)
    larger[tuple(slice(size) for size in tensor.shape)] = tensor
    return larger
