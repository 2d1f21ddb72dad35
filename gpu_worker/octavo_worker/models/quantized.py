"""The maker of a quantised checkpoint's linear layers.

Which layers are quantised is the configuration's word, and what is stored must agree: a layer
that is stored otherwise is refused by the tensor's name. With kernels for them 4-bit codes stay
packed; else, and with 8 bits, a layer becomes a plain matrix. Must not know: decoders. Entry
point: `QuantMaker`.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from octavo.errors import ConfigurationError
from octavo_worker.models.config import ModelConfig
from octavo_worker.models.linear import DenseMaker, Linear, Split
from octavo_worker.models.quant_linear import (
    DensePart,
    PackedPiece,
    Part,
    Piece,
    PlainPiece,
    QuantLinear,
    QuantPart,
    W4Kernels,
)
from octavo_worker.quant import Codes, Quantization
from octavo_worker.quant.stored import LayerSize
from octavo_worker.slots import BadValuesError, Slot
from octavo_worker.weights import StoredTensor


class QuantMaker:
    """Makes a model's linear layers, quantised or not, as its configuration says."""

    def __init__(
        self,
        config: ModelConfig,
        quantization: Quantization,
        device: torch.device,
        stored: Mapping[str, StoredTensor] | None,
        kernels: W4Kernels | None,
    ) -> None:
        """`stored`: the checkpoint's tensors by name; None = values will be drawn. `kernels`: for
        4-bit codes; None = all layers become plain matrices.

        Raises ConfigurationError for a quantised head.
        """
        self._quantization = quantization
        self._layout = config.layout
        self._dtype = config.dtype
        self._device = device
        self._stored = stored
        self._make_dense = DenseMaker(config.dtype, device)
        self._make_piece: Callable[[Codes], Piece]
        if kernels is not None and quantization.bits == 4:
            self._make_piece = partial(PackedPiece.of, kernels=kernels, dtype=config.dtype)
            self.form = "packed codes"
        else:
            self._make_piece = partial(PlainPiece.of, dtype=config.dtype)
            self.form = f"{config.dtype} matrices".removeprefix("torch.")
        self._suffixes = [form.suffix for form in quantization.forms(LayerSize(32, 32, 1))]
        self._refuse_packed(self._layout.module_of("lm_head"), "a quantised head isn't supported")

    def __call__(
        self,
        module: str,
        parts: Mapping[str, int],
        in_size: int,
        *,
        bias: bool,
        split: Split,
    ) -> Linear:
        """Raises ConfigurationError naming a tensor that is stored in another way than said."""
        names = [f"{module}.{name}" for name in parts]
        if not any(self._is_quantized(name) for name in names):
            return self._make_dense(module, parts, in_size, bias=bias, split=split)
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
    ) -> Linear:
        """Some outputs of every part and some inputs of a layer; sizes are the whole layer's."""
        made: list[Part] = []
        biases: dict[str, Slot] = {}
        lengths = [len(wanted) for wanted in outputs.values()]
        vector = self._vector(sum(lengths)) if bias else None
        slices = (None,) * len(parts) if vector is None else vector.split(lengths)
        for (part, size), place in zip(parts.items(), slices, strict=True):
            name, wanted = f"{module}.{part}", outputs[part]
            if self._is_quantized(name):
                made.append(self._quantized(name, size, in_size, wanted, inputs))
            else:
                dims = (size, in_size)
                made.append(DensePart(name, dims, (wanted, inputs), self._dtype, self._device))
            biases |= self._bias_slots(f"{name}.bias", size, place, wanted)
        return QuantLinear(made, biases, vector, self._make_piece)

    def _quantized(
        self, name: str, size: int, in_size: int, outputs: range, inputs: range
    ) -> QuantPart:
        quantization = self._quantization
        try:
            whole = quantization.size(size, in_size)
        except ValueError as error:
            raise ConfigurationError(
                f"config.json: {name} can't be {quantization}: {error}"
            ) from None
        region = quantization.region(whole, outputs, inputs)
        return QuantPart(name, quantization, whole, region, self._device)

    def _bias_slots(
        self, name: str, size: int, place: Tensor | None, wanted: range
    ) -> dict[str, Slot]:
        if place is not None:

            def take(stored: Tensor) -> Tensor:
                return stored[wanted.start : wanted.stop]

            return {name: Slot(place, shape=(size,), take=take)}
        if self._stored is None or self._layout.name_of(name) not in self._stored:
            return {}
        # AutoGPTQ stores one for every layer, of zeros where the model has none.
        nothing = torch.empty(0, dtype=self._dtype, device=self._device)
        return {name: Slot(nothing, shape=(size,), take=_no_bias)}

    def _is_quantized(self, name: str) -> bool:
        module = self._layout.module_of(name)
        covered = self._quantization.covers(module)
        if self._stored is None:
            return covered
        is_packed = any(f"{module}.{suffix}" in self._stored for suffix in self._suffixes)
        dense = self._stored.get(f"{module}.weight")
        if covered and not is_packed and dense is not None:
            raise ConfigurationError(
                f"{dense.path}: tensor {module}.weight is not quantised, though config.json's "
                "quantization_config doesn't leave it out: unclear"
            )
        if not covered:
            self._refuse_packed(module, "config.json's quantization_config leaves this layer out")
        return covered

    def _refuse_packed(self, name: str, why: str) -> None:
        for suffix in self._suffixes:
            found = (self._stored or {}).get(f"{name}.{suffix}")
            if found is not None:
                raise ConfigurationError(f"{found.path}: tensor {name}.{suffix} is packed: {why}")

    def _vector(self, size: int) -> Tensor:
        return torch.empty(size, dtype=self._dtype, device=self._device)


def _no_bias(stored: Tensor) -> Tensor:
    if bool(stored.any()):
        raise BadValuesError("isn't 0, but config.json has no bias there")
    return stored[:0]
