"""Linear layers, fused from parts that checkpoints hold one by one.

A decoder asks a `LinearMaker` for each of its layers by the checkpoint's names, and calls what
it gets: plain matrices here, packed or sharded ones elsewhere. Must not know: decoders, files.
Entry points: `Weights`, `Linear`, `LinearMaker`, `DenseMaker`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo_worker.slots import Slot

# From so many rows on a product that adds itself to the residual stream is faster than one beside a
# norm that adds it (8B on an H200: two such products a layer save 0.7 % of a prompt).
_LEAST_ROWS_ADDED = 2048


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


class CuttingMaker(LinearMaker, Protocol):
    """A maker that also makes a part of a layer, for one of several ranks."""

    def cut(
        self,
        module: str,
        parts: Mapping[str, int],
        in_size: int,
        *,
        bias: bool,
        outputs: Mapping[str, range],
        inputs: range,
    ) -> Linear:
        """Some outputs of every part and some inputs of a layer; sizes are the whole layer's.

        A bias is the wanted outputs', whatever the inputs are.
        """
        ...


class DensePart(NamedTuple):
    """A stored matrix [size, in_size]: the region that is wanted of it."""

    size: int
    in_size: int
    outputs: range
    inputs: range

    def weight_slot(self, target: Tensor) -> Slot:
        def take(stored: Tensor) -> Tensor:
            rows = stored[self.outputs.start : self.outputs.stop]
            return rows[:, self.inputs.start : self.inputs.stop]

        return Slot(target, shape=(self.size, self.in_size), take=take)

    def bias_slot(self, target: Tensor) -> Slot:
        def take(stored: Tensor) -> Tensor:
            return stored[self.outputs.start : self.outputs.stop]

        return Slot(target, shape=(self.size,), take=take)


@dataclass(slots=True)
class DenseLinear:
    """weight [out, in] and bias [out] or None; `parts` by their full names."""

    weight: Tensor
    bias: Tensor | None
    parts: Mapping[str, DensePart]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def add_to(self, total: Tensor, x: Tensor) -> bool:
        """total [T, out] += self(x), in place: done only where one product is the faster way."""
        if self.bias is not None or len(x) < _LEAST_ROWS_ADDED:
            return False
        total.addmm_(x, self.weight.T)
        return True

    def slots(self) -> Iterator[tuple[str, Slot]]:
        start = 0
        for name, part in self.parts.items():
            rows = slice(start, start + len(part.outputs))
            yield f"{name}.weight", part.weight_slot(self.weight[rows])
            if self.bias is not None:
                yield f"{name}.bias", part.bias_slot(self.bias[rows])
            start = rows.stop
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
        whole = {name: range(size) for name, size in parts.items()}
        return self.cut(module, parts, in_size, bias=bias, outputs=whole, inputs=range(in_size))

    def cut(
        self,
        module: str,
        parts: Mapping[str, int],
        in_size: int,
        *,
        bias: bool,
        outputs: Mapping[str, range],
        inputs: range,
    ) -> DenseLinear:
        """See `CuttingMaker`."""
        wanted = {
            f"{module}.{name}": DensePart(size, in_size, outputs[name], inputs)
            for name, size in parts.items()
        }
        out_size = sum(len(part.outputs) for part in wanted.values())
        weight = torch.empty(out_size, len(inputs), dtype=self._dtype, device=self._device)
        vector = torch.empty(out_size, dtype=self._dtype, device=self._device) if bias else None
        return DenseLinear(weight, vector, wanted)
