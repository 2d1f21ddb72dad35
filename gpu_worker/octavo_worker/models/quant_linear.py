"""A linear layer of several stored parts, some of them quantised, and what it becomes.

Parts hold tensors as they are stored while these are loaded. `finish` unpacks them, brings them
into the form that is computed with, and lets the stored form go: called layer by layer, so that
a model never lies in memory twice. Parts are joined where their inputs are grouped alike, else
computed one by one. Codes may get a plain matrix beside them, for products of many rows. Must not
know: decoders, files, configurations. Entry points: `QuantLinear`, `quantized_among`.

T tokens, N outputs, K inputs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo_worker.models.linear import Linear, Weights
from octavo_worker.quant import Codes, Quantization, Region, StoredForm
from octavo_worker.quant.arrangement import arrange
from octavo_worker.quant.codes import join
from octavo_worker.quant.stored import LayerSize
from octavo_worker.slots import Slot

_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
# Up to so many rows a product reads codes even where a matrix lies beside them. Measured on an H200
# with the layers of an 8B model: gate and up take 41 µs with codes and 60 with bf16 at 64 rows, 80
# and 66 at 128 (qkv 16.5 and 17, 26.7 and 18). `octavo bench kernels w4a16` shows where they cross.
MOST_ROWS_OF_CODES = 64


class Piece(Protocol):
    """Some of a layer's outputs, ready to be computed: [T, K] -> [T, n], without bias."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def num_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PlainPiece:
    """weight [n, K]."""

    weight: Tensor

    @classmethod
    def of(cls, codes: Codes, dtype: torch.dtype) -> Self:
        return cls(codes.dequantize(dtype))

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)

    def num_bytes(self) -> int:
        return self.weight.nbytes


class W4Kernels(NamedTuple):
    """What `octavo_kernels` does with 4-bit weights, handed in by whoever may import it."""

    # (codes, scales, zeros, group size) to the weight that `matmul` takes beside x.
    pack: Callable[[Tensor, Tensor, Tensor, int], Any]
    matmul: Callable[[Tensor, Any], Tensor]
    # A packed weight as a matrix of a dtype, its columns as they were packed.
    dequantize: Callable[[Any, torch.dtype], Tensor]


@dataclass(frozen=True, slots=True)
class PackedPiece:
    """`weight`: what `kernels.pack` made; `order` int32: the inputs of its columns (None = all).

    `matrix` [n, K]: the same weights once more, for products of more than `MOST_ROWS_OF_CODES`
    rows; None = codes serve them all. Its columns are the inputs in their own order.
    """

    kernels: W4Kernels
    weight: Any
    order: Tensor | None
    in_size: int
    matrix: Tensor | None = None

    @classmethod
    def of(cls, codes: Codes, kernels: W4Kernels, dtype: torch.dtype) -> Self:
        """`dtype`: computed in; also of the scales, if no 16-bit float holds these."""
        values, scales, zeros, group_size, order = arrange(codes)
        weight = kernels.pack(values, _in_16_bits(scales, dtype), zeros, group_size)
        return cls(kernels, weight, None if order is None else order.int(), len(codes.groups))

    def with_matrix(self, dtype: torch.dtype) -> Self:
        matrix = self.kernels.dequantize(self.weight, dtype)
        if self.order is not None:
            columns, matrix = matrix, matrix.new_zeros(matrix.shape[0], self.in_size)
            # Added, not copied: columns that only fill a run up are 0 and name an input again.
            matrix.index_add_(1, self.order, columns)
        return replace(self, matrix=matrix)

    def __call__(self, x: Tensor) -> Tensor:
        if self.matrix is not None and x.shape[0] > MOST_ROWS_OF_CODES:
            return F.linear(x, self.matrix)
        if self.order is not None:
            x = x.index_select(1, self.order)
        return self.kernels.matmul(x, self.weight)

    def num_bytes(self) -> int:
        beside = (tensor for tensor in (self.order, self.matrix) if tensor is not None)
        return self.weight.num_bytes + sum(tensor.nbytes for tensor in beside)


def _in_16_bits(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """As they are if a 16-bit float holds them all, else rounded."""
    for candidate in _SIXTEEN_BITS:
        if torch.equal(scales.to(candidate).float(), scales):
            return scales.to(candidate)
    return scales.to(dtype if dtype in _SIXTEEN_BITS else torch.float16)


class QuantPart:
    """One stored layer, or a rank's region of it, while it is loaded."""

    def __init__(
        self,
        name: str,
        quantization: Quantization,
        size: LayerSize,
        region: Region,
        device: torch.device,
    ) -> None:
        self.name = name
        self._quantization = quantization
        self._size = size
        self._region = region
        self._forms = quantization.forms(size)
        self._raw = {form.suffix: _empty(form, size, region, device) for form in self._forms}
        self._order: Tensor | None = None

    @property
    def num_weights(self) -> int:
        return len(self._region.outputs) * len(self._region.inputs)

    def slots(self) -> Iterator[tuple[str, Slot]]:
        for form in self._forms:
            slot = Slot(
                self._raw[form.suffix],
                shape=form.shape(self._size),
                dtypes=form.dtypes,
                take=partial(form.take, region=self._region),
                fill=form.fill,
                out_axis=form.out_axis,
                reorder=self._reorder,
            )
            yield f"{self.name}.{form.suffix}", slot

    def _reorder(self, outputs: Tensor) -> None:
        own = self._region.outputs
        self._order = outputs[own.start : own.stop] - own.start

    def codes(self) -> Codes:
        codes = self._quantization.unpack(self._raw, self._region)
        return codes if self._order is None else codes.in_order(self._order)


class DensePart:
    """One layer that is stored as it is, or a rank's region of it."""

    def __init__(
        self,
        name: str,
        size: tuple[int, int],
        region: tuple[range, range],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.name = name
        self._shape = size
        self._region = region
        self.weight = torch.empty(*map(len, region), dtype=dtype, device=device)

    def slots(self) -> Iterator[tuple[str, Slot]]:
        outputs, inputs = self._region

        def take(stored: Tensor) -> Tensor:
            return stored[outputs.start : outputs.stop, inputs.start : inputs.stop]

        yield f"{self.name}.weight", Slot(self.weight, shape=self._shape, take=take)


def _empty(form: StoredForm, size: LayerSize, region: Region, device: torch.device) -> Tensor:
    lengths = zip(form.shape(size), form.words(region), strict=True)
    shape = [len(range(*words.indices(length))) for length, words in lengths]
    return torch.empty(shape, dtype=form.dtype, device=device)


Part = QuantPart | DensePart


class QuantLinear:
    """A layer of several parts, at least one of them quantised. See `Linear`."""

    def __init__(
        self,
        parts: Sequence[Part],
        biases: Mapping[str, Slot],
        bias: Tensor | None,
        make_piece: Callable[[Codes], Piece],
    ) -> None:
        """`biases`: the slots of all stored biases, by name; `bias` [N]: where they are."""
        self._parts = parts
        self.num_quantized = sum(part.num_weights for part in parts if isinstance(part, QuantPart))
        self._biases = biases
        self.bias = bias
        self._make_piece = make_piece
        self.pieces: tuple[Piece, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        if len(self.pieces) == 1:
            y = self.pieces[0](x)
        else:
            y = torch.cat([piece(x) for piece in self.pieces], dim=-1)
        return y if self.bias is None else y + self.bias

    def slots(self) -> Iterator[tuple[str, Slot]]:
        for part in self._parts:
            yield from part.slots()
        yield from self._biases.items()

    def finish(self) -> None:
        pieces: list[Piece] = []
        alike: list[Codes] = []
        for part in self._parts:
            codes = part.codes() if isinstance(part, QuantPart) else None
            if alike and (codes is None or not torch.equal(codes.groups, alike[0].groups)):
                pieces.append(self._make_piece(join(alike)))
                alike = []
            if codes is not None:
                alike.append(codes)
            elif isinstance(part, DensePart):
                pieces.append(PlainPiece(part.weight))
        if alike:
            pieces.append(self._make_piece(join(alike)))
        self._parts, self._biases = (), {}
        self.pieces = tuple(_joined(pieces))

    @property
    def is_packed(self) -> bool:
        """Whether codes are computed with, once finished."""
        return any(isinstance(piece, PackedPiece) for piece in self.pieces)

    def keep_matrices(self, dtype: torch.dtype) -> None:
        """Once finished: matrices beside codes, of `num_quantized` weights in all."""
        self.pieces = tuple(
            piece.with_matrix(dtype) if isinstance(piece, PackedPiece) else piece
            for piece in self.pieces
        )

    def num_bytes(self) -> int:
        """Once finished."""
        bias = 0 if self.bias is None else self.bias.nbytes
        return sum(piece.num_bytes() for piece in self.pieces) + bias


@runtime_checkable
class Wrapper(Protocol):
    """A layer that does more with what another one computes."""

    @property
    def wrapped(self) -> Linear: ...


def quantized_among(weights: Iterable[Weights]) -> Iterator[QuantLinear]:
    """Those of which a part is quantised, also where something is wrapped around them."""
    for layer in weights:
        linear = layer.wrapped if isinstance(layer, Wrapper) else layer
        if isinstance(linear, QuantLinear):
            yield linear


def _joined(pieces: Sequence[Piece]) -> Sequence[Piece]:
    """Plain matrices as one."""
    plain = [piece.weight for piece in pieces if isinstance(piece, PlainPiece)]
    if len(plain) < len(pieces) or len(plain) == 1:
        return pieces
    return [PlainPiece(torch.cat(plain))]
