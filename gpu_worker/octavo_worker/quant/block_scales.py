"""Layers stored in 8-bit floats (e4m3) with a scale a block of outputs and inputs.

Stored: `weight` float8_e4m3fn [N, K] and a float for each block of it, [N / height, K / width]
rounded up; W = weight * the scale of its block. Formats: "fp8" with `weight_block_size`
(DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024; its `weight_scale_inv` multiplies all the same)
and compressed-tensors "float-quantized" with the strategy "block".

These scales change along the inputs of a product: the layers are widened while they are loaded and
computed like plain ones, activations as they are. Must not know: layers, files. Entry point:
`BlockScales`.
"""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from octavo_worker.quant.fields import FieldReader
from octavo_worker.slots import BadValuesError

BLOCK = "block"  # compressed-tensors' strategy


@dataclass(frozen=True, slots=True)
class BlockScales:
    """Blocks of `height` outputs and `width` inputs; `suffix`: of the scales' tensor."""

    height: int
    width: int
    suffix: str

    @classmethod
    def from_fields(cls, fields: FieldReader) -> Self:
        """DeepSeek's. Raises ConfigurationError naming the field."""
        fields.word("activation_scheme", ("dynamic",), "dynamic")
        fields.word("fmt", ("e4m3",), "e4m3")
        fields.refuse("kv_cache_scheme")
        return cls(*_sizes(fields, "weight_block_size"), "weight_scale_inv")

    @classmethod
    def from_compressed(cls, weights: FieldReader) -> Self:
        """`weights`: of the one group. Raises ConfigurationError naming the field."""
        return cls(*_sizes(weights, "block_structure"), "weight_scale")

    def shape(self, weight: tuple[int, ...]) -> tuple[int, ...]:
        """Of the scales for a weight [N, K]."""
        return -(-weight[0] // self.height), -(-weight[1] // self.width)

    def widened(self, weight: Tensor, scales: Tensor) -> Tensor:
        """float32 [N, K] of a stored weight [N, K] and its scales. Raises BadValuesError."""
        if not bool(scales.isfinite().all()):
            raise BadValuesError(f"has NaN or infinity among its scales ({self.suffix})")
        rows = scales.float().repeat_interleave(self.height, dim=0)[: weight.shape[0]]
        return weight.float().mul_(rows.repeat_interleave(self.width, dim=1)[:, : weight.shape[1]])

    def __str__(self) -> str:
        return f"8-bit floats (e4m3), a scale a block of {self.height} x {self.width}"


def _sizes(fields: FieldReader, name: str) -> tuple[int, int]:
    value = fields.get(name)
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    if not is_pair or not all(type(size) is int and size > 0 for size in value):
        raise fields.error(name, "must be two sizes above 0")
    return value[0], value[1]
