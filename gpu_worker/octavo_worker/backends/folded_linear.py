"""Linear layers as the fused decode step takes them: a weight that a product of few rows can read.

Layers that can't be folded (several pieces, codes of inputs in another order, odd sizes) are
computed by themselves. Must not know: steps. Entry point: `FoldedLinear`.
"""

from typing import NamedTuple

from torch import Tensor

from octavo_kernels.e4m3_weight import E4m3Weight
from octavo_kernels.skinny_tiles import Config, choose_config
from octavo_kernels.skinny_weight import Weight
from octavo_worker.models.fp8_linear import Fp8Linear
from octavo_worker.models.linear import DenseLinear, Linear
from octavo_worker.models.quant_linear import (
    MOST_ROWS_OF_CODES,
    PackedPiece,
    PlainPiece,
    QuantLinear,
)


class Folded(NamedTuple):
    """What a product reads, and by which tiles."""

    weight: Weight
    config: Config


class FoldedLinear:
    """`linear`: computes the product by itself where `fold` gives None."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear
        self._few, self._many = _weights_of(linear)
        self.bias = _bias_of(linear)

    def fold(self, num_rows: int, *, gated: bool = False, adds: bool = False) -> Folded | None:
        """The product of so many rows; `adds`: to the residual stream, where no bias is folded."""
        weight = self._many if num_rows > MOST_ROWS_OF_CODES else self._few
        if weight is None or (adds and self.bias is not None):
            return None
        config = choose_config(num_rows, weight, gated=gated)
        return None if config is None else Folded(weight, config)


def _weights_of(linear: Linear) -> tuple[Weight | None, Weight | None]:
    """For few rows, and for many."""
    weight: Weight | None = None
    if isinstance(linear, DenseLinear):
        weight = linear.weight
    elif isinstance(linear, Fp8Linear) and linear.is_arranged:
        weight = E4m3Weight.of(linear.weight, linear.scales)
    elif isinstance(linear, QuantLinear) and len(linear.pieces) == 1:
        piece = linear.pieces[0]
        if isinstance(piece, PackedPiece):
            codes: Weight | None = piece.weight if piece.order is None else None
            return codes, codes if piece.matrix is None else piece.matrix
        weight = piece.weight if isinstance(piece, PlainPiece) else None
    return weight, weight


def _bias_of(linear: Linear) -> Tensor | None:
    if isinstance(linear, DenseLinear | Fp8Linear | QuantLinear):
        return linear.bias
    return None
