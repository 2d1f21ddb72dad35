"""Linear layers, fused from parts that checkpoints hold one by one.

A decoder asks a `LinearMaker` for each of its layers by the checkpoint's names, and calls what
it gets: plain matrices here, packed or sharded ones elsewhere. Must not know: decoders, files.
Entry points: `Weights`, `Linear`, `LinearMaker`, `DenseMaker`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo_worker.slots import Slot


class Split(Enum):
    """How a layer is cut when several ranks share a model: its outputs (HEADS: those of whole
    heads), its inputs, or not."""

    COLUMNS = "columns"
    HEADS = "heads"
    ROWS = "rows"
    NONE = "none"


class Weights(Protocol):
    """Parameters that are loaded, brought into their final form and counted together."""

    def slots(self) -> Iterator[tuple[str, Slot]]:
        """(name in the checkpoint, place) of every stored tensor."""
        ...

    def finish(self) -> None:
        """All slots are filled: bring the values into the form that is computed with."""
        ...

    def num_bytes(self) -> int:
        """Bytes that the finished parameters take."""
        ...


class Linear(Weights, Protocol):
    """y = x Wᵀ + b for x [T, in]; y [T, out]."""

    def __call__(self, x: Tensor) -> Tensor: ...


class LinearMaker(Protocol):
    """Makes a model's linear layers, their values still to come."""

    def __call__(
        self,
        module: str,
        parts: Mapping[str, int],
        in_size: int,
        *,
        bias: bool,
        split: Split,
    ) -> Linear:
        """One layer of several stored ones that lie in this order.

        `module`: their common prefix, "model.layers.0.self_attn"; `parts`: name in it ->
        number of outputs, {"q_proj": 4096, ...}.
        """
        ...


@dataclass(slots=True)
class DenseLinear:
    """weight [out, in] and bias [out] or None; `parts`: full name of a part -> its outputs."""

    weight: Tensor
    bias: Tensor | None
    parts: Mapping[str, int]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def slots(self) -> Iterator[tuple[str, Slot]]:
        start = 0
        for name, size in self.parts.items():
            yield f"{name}.weight", Slot(self.weight[start : start + size])
            if self.bias is not None:
                yield f"{name}.bias", Slot(self.bias[start : start + size])
            start += size
        assert start == self.weight.shape[0]

    def finish(self) -> None:
        """As stored is as computed with."""

    def num_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class DenseMaker:
    """Makes `DenseLinear` layers of one dtype on one device, uninitialised."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device

    def __call__(
        self,
        module: str,
        parts: Mapping[str, int],
        in_size: int,
        *,
        bias: bool,
        split: Split,  # noqa: ARG002 - one rank holds all
    ) -> DenseLinear:
        out_size = sum(parts.values())
        weight = torch.empty(out_size, in_size, dtype=self._dtype, device=self._device)
        vector = torch.empty(out_size, dtype=self._dtype, device=self._device) if bias else None
        return DenseLinear(weight, vector, {f"{module}.{k}": v for k, v in parts.items()})
