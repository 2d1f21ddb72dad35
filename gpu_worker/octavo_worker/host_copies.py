"""Copies between host and device that wait for nothing.

Only pinned memory is copied while the host goes on; a pageable array waits, if it is large, for
all that the device was given before. Must not know: steps. Entry points: `upload`,
`upload_into`, `ResultRing`.
"""

from typing import Any

import numpy.typing as npt
import torch


def upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy of a contiguous array on the device; the array is free again."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu" or not array.size:
        return tensor.to(device)
    # The allocator gives the pinned copy's memory to nobody else before the device has read it.
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_into(array: npt.NDArray[Any], target: torch.Tensor) -> None:
    """Put a contiguous array where the device has a tensor of its shape and dtype."""
    tensor = torch.from_numpy(array)
    if target.device.type != "cpu":
        tensor = tensor.pin_memory()
    target.copy_(tensor, non_blocking=True)


class ResultRing:
    """Slots that steps' results are copied to, in turn; pinned ones for those of a card.

    The steps are read in the order of their launch: slot n is taken again by step n + size, when
    step n has been read, never before.

        read <= launched <= read + size
    """

    def __init__(self, size: int, num_values: int, *, is_pinned: bool) -> None:
        """`num_values`: int64 that a result has at most."""
        self._slots = [
            torch.empty(num_values, dtype=torch.int64, pin_memory=is_pinned) for _ in range(size)
        ]
        self._num_launched = 0
        self._num_read = 0

    def copy(self, result: torch.Tensor) -> torch.Tensor:
        """`result` on the host, filled once the device gets there; until it was `read`."""
        size = len(self._slots)
        assert self._num_launched - self._num_read < size, "a result would be overwritten"
        slot = self._slots[self._num_launched % size]
        self._num_launched += 1
        target = slot[: result.numel()].view(result.shape)
        return target.copy_(result, non_blocking=True)

    def read(self) -> None:
        """The oldest result has been read."""
        assert self._num_read < self._num_launched
        self._num_read += 1
