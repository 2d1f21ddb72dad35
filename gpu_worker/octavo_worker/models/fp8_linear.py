"""Linear layers in 8-bit floats, stored so or rounded while they are loaded.

A layer's parts share one e4m3 matrix, with a scale an output: a part's one scale is its outputs'.
Must not know: decoders, files. Entry point: `Fp8Maker`.

T tokens, N outputs, K inputs.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.errors import ConfigurationError
from octavo_worker.models.config import ModelConfig
from octavo_worker.models.linear import DenseMaker, Linear, Split
from octavo_worker.quant.fp8 import (
    E4M3,
    E4M3_MAX,
    Fp8Format,
    ScaledProduct,
    choose_product,
    quantize_rows,
)
from octavo_worker.quant.stored import check_finite
from octavo_worker.slots import Slot, ones
from octavo_worker.weights import StoredTensor

_E4M3_ONLY = frozenset({E4M3})
# Random weights reach so many standard deviations before they are cut off.
_DEVIATIONS = 5.0


class _Region(NamedTuple):
    """The wanted part of a stored layer [size, in_size]."""

    size: int
    in_size: int
    outputs: range
    inputs: range

    def rows(self, stored: Tensor) -> Tensor:
        return stored[self.outputs.start : self.outputs.stop]

    def take(self, stored: Tensor) -> Tensor:
        return self.rows(stored)[:, self.inputs.start : self.inputs.stop]


class _Part:
    """One stored layer, or a rank's region of it: its rows of the matrix, their scales."""

    def __init__(self, name: str, region: _Region, weight: Tensor, scales: Tensor) -> None:
        self.name = name
        self._region = region
        self._weight = weight
        self._scales = scales
        self._stored_scale: Tensor | None = None

    def rounded_slots(self) -> Iterator[tuple[str, Slot]]:
        """Stored in any float dtype, rounded while it is loaded."""
        shape = (self._region.size, self._region.in_size)
        slot = Slot(self._weight, shape=shape, take=self._round, fill=self._draw)
        yield f"{self.name}.weight", slot

    def stored_slots(
        self, scale_shape: tuple[int, ...], input_shape: tuple[int, ...] | None
    ) -> Iterator[tuple[str, Slot]]:
        """The shapes of a scale, and of an input scale, if there is one, which isn't used."""
        region = self._region
        shape = (region.size, region.in_size)
        slot = Slot(self._weight, shape=shape, dtypes=_E4M3_ONLY, take=region.take, fill=self._draw)
        yield f"{self.name}.weight", slot
        if torch.Size(scale_shape).numel() == 1:
            scale = self._stored_scale = self._scales.new_empty(scale_shape)
            slot = Slot(scale, take=_checked, fill=self._draw_scale, out_axis=None)
        else:
            scale = self._scales.view(-1, *(1 for _ in scale_shape[1:]))
            shape = (region.size, *scale_shape[1:])
            slot = Slot(scale, shape=shape, take=self._take_scales, fill=self._draw_scale)
        yield f"{self.name}.weight_scale", slot
        if input_shape is not None:
            unused = self._scales.new_empty(input_shape)
            yield f"{self.name}.input_scale", Slot(unused, fill=ones, out_axis=None)

    def bias_slot(self, place: Tensor) -> tuple[str, Slot]:
        region = self._region
        return f"{self.name}.bias", Slot(place, shape=(region.size,), take=region.rows)

    def finish(self) -> None:
        """Give each output its scale."""
        if self._stored_scale is not None:
            self._scales.copy_(self._stored_scale.flatten())
            self._stored_scale = None

    def _round(self, stored: Tensor) -> Tensor:
        # Sets the scales, too. On the layer's device: a CPU takes long for that.
        # A rank's inputs take the scales of all inputs: the numbers are those of one rank.
        rounded, scales = quantize_rows(self._region.rows(stored).to(self._weight.device))
        self._scales.copy_(scales)
        return rounded[:, self._region.inputs.start : self._region.inputs.stop]

    def _take_scales(self, stored: Tensor) -> Tensor:
        return self._region.rows(_checked(stored))

    def _draw(self, target: Tensor, generator: torch.Generator, std: float) -> None:
        values = torch.empty(target.shape, device=target.device)
        values.normal_(0.0, E4M3_MAX / _DEVIATIONS, generator=generator)
        target.copy_(values.clamp_(-E4M3_MAX, E4M3_MAX))
        self._draw_scale(self._scales, generator, std)

    def _draw_scale(self, target: Tensor, _generator: torch.Generator, std: float) -> None:
        target.fill_(std * _DEVIATIONS / E4M3_MAX)


def _checked(stored: Tensor) -> Tensor:
    check_finite(stored)
    return stored


class Fp8Linear:
    """weight e4m3 [N, K], scales float32 [N], bias [N] or None.

    `is_arranged`: the weight's inputs lie in the order that the product wants, not in their own.
    """

    def __init__(
        self,
        weight: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        parts: list[_Part],
        slots: dict[str, Slot],
        product: ScaledProduct,
    ) -> None:
        self.weight = weight
        self.scales = scales
        self.bias = bias
        self.is_arranged = False
        self._parts = parts
        self._slots = slots
        self._product = product

    def __call__(self, x: Tensor) -> Tensor:
        y = self._product(x, self.weight, self.scales)
        return y if self.bias is None else y + self.bias

    def slots(self) -> Iterator[tuple[str, Slot]]:
        yield from self._slots.items()

    def finish(self) -> None:
        """Called once, when all is loaded."""
        for part in self._parts:
            part.finish()
        self._parts, self._slots = [], {}
        arranged = self._product.arrange(self.weight)
        if arranged is not None:
            self.weight, self.is_arranged = arranged, True

    def num_bytes(self) -> int:
        bias = 0 if self.bias is None else self.bias.nbytes
        return self.weight.nbytes + self.scales.nbytes + bias


class Fp8Maker:
    """Makes a model's linear layers, in 8 bits or not, as the format says."""

    def __init__(
        self,
        config: ModelConfig,
        form: Fp8Format,
        device: torch.device,
        stored: Mapping[str, StoredTensor] | None,
    ) -> None:
        """`stored`: the checkpoint's tensors by name; None = values will be drawn."""
        self._form = form
        self._layout = config.layout
        self._dtype = config.dtype
        self._device = device
        self._stored = stored
        self._make_dense = DenseMaker(config.dtype, device)

    def __call__(
        self,
        module: str,
        parts: Mapping[str, int],
        in_size: int,
        *,
        bias: bool,
        split: Split,
    ) -> Linear:
        """Raises ConfigurationError for parts of which only some are in 8 bits, and for scales
        that are no scales."""
        if split is Split.NONE and not self._form.is_stored:
            # Routers of experts: small, and what they choose is all or nothing.
            return self._make_dense(module, parts, in_size, bias=bias, split=split)
        outputs = {name: range(size) for name, size in parts.items()}
        return self.cut(module, parts, in_size, bias=bias, outputs=outputs, inputs=range(in_size))

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
        """Some outputs of every part and some inputs of a layer; sizes are the whole layer's."""
        covered = {self._form.covers(self._layout.module_of(f"{module}.{part}")) for part in parts}
        if covered == {False}:
            return self._make_dense.cut(
                module, parts, in_size, bias=bias, outputs=outputs, inputs=inputs
            )
        if len(covered) > 1:
            raise ConfigurationError(
                f"config.json: quantization_config leaves some of {module}'s {', '.join(parts)} "
                "out: they are computed as one layer, all in 8 bits or none"
            )
        lengths = [len(wanted) for wanted in outputs.values()]
        weight = torch.empty(sum(lengths), len(inputs), dtype=E4M3, device=self._device)
        scales = torch.empty(sum(lengths), dtype=torch.float32, device=self._device)
        rows = zip(parts.items(), weight.split(lengths), scales.split(lengths), strict=True)
        made = [
            _Part(f"{module}.{part}", _Region(size, in_size, outputs[part], inputs), *places)
            for (part, size), *places in rows
        ]
        slots: dict[str, Slot] = {}
        for part in made:
            slots |= self._slots_of(part)
        vector = None
        if bias:
            vector = torch.empty(sum(lengths), dtype=self._dtype, device=self._device)
            pairs = zip(made, vector.split(lengths), strict=True)
            slots |= dict(part.bias_slot(place) for part, place in pairs)
        return Fp8Linear(weight, scales, vector, made, slots, choose_product(self._device))

    def _slots_of(self, part: _Part) -> dict[str, Slot]:
        if not self._form.is_stored:
            return dict(part.rounded_slots())
        scale_shape = self._shape_of(part.name, "weight_scale") or ()
        input_shape = self._shape_of(part.name, "input_scale")
        return dict(part.stored_slots(scale_shape, input_shape))

    def _shape_of(self, name: str, suffix: str) -> tuple[int, ...] | None:
        """Of a stored tensor; None if there is none."""
        found = (self._stored or {}).get(f"{self._layout.module_of(name)}.{suffix}")
        return None if found is None else found.shape
