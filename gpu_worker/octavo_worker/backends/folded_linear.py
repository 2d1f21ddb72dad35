"""Linear layers as the fused decode step takes them: a weight that a product of few rows can read.

Layers that can't be folded (several pieces, inputs in another order, odd sizes) are computed by
themselves. Must not know: steps. Entry point: `FoldedLinear`.
"""

from torch import Tensor

from octavo_kernels.e4m3_weight import E4m3Weight
from octavo_kernels.skinny_tiles import Config, choose_config
from octavo_kernels.skinny_weight import Weight
from octavo_worker.models.fp8_linear import Fp8Linear
from octavo_worker.models.linear import DenseLinear, Linear
from octavo_worker.models.quant_linear import PackedPiece, PlainPiece, QuantLinear


class FoldedLinear:
    """`linear`: computes the product by itself where `config` is None."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear
        self._weight = _weight_of(linear)
        self.bias = _bias_of(linear)

    @property
    def weight(self) -> Weight:
        """Where `config` isn't None."""
        assert self._weight is not None
        return self._weight

    def config(self, num_rows: int, *, gated: bool = False, adds: bool = False) -> Config | None:
        """Tiles for so many rows; `adds`: to the residual stream, where no bias is folded."""
        if self._weight is None or (adds and self.bias is not None):
            return None
        return choose_config(num_rows, self._weight, gated=gated)


def _weight_of(linear: Linear) -> Weight | None:
    if isinstance(linear, DenseLinear):
        return linear.weight
    if isinstance(linear, Fp8Linear):
        return E4m3Weight.of(linear.weight, linear.scales) if linear.is_arranged else None
    if isinstance(linear, QuantLinear) and len(linear.pieces) == 1:
        piece = linear.pieces[0]
        if isinstance(piece, PlainPiece):
            return piece.weight
        if isinstance(piece, PackedPiece) and piece.order is None:
            return piece.weight
    return None


def _bias_of(linear: Linear) -> Tensor | None:
    if isinstance(linear, DenseLinear | Fp8Linear | QuantLinear):
        return linear.bias
    return None
