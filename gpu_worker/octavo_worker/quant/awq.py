"""AWQ checkpoints, as AutoAWQ writes them in its version "gemm".

Lin et al., "AWQ", 2023. Per linear layer of K inputs and N outputs: `qweight` int32 [K, N / 8],
`qzeros` int32 [G, N / 8], `scales` [G, N]. A word holds eight neighbours along N; from its lowest
bits on these are the columns 0, 2, 4, 6, 1, 3, 5, 7. Must not know: layers. Entry point: `Awq`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from octavo_worker.quant.codes import Codes, unpack
from octavo_worker.quant.draws import draw_codes, draw_zeros
from octavo_worker.quant.fields import FieldReader
from octavo_worker.quant.modules import ModuleRules, contains
from octavo_worker.quant.stored import (
    Along,
    Axis,
    LayerSize,
    Region,
    StoredForm,
    num_groups,
    ordered_groups,
    ordered_region,
    scales_form,
    trimmed,
)

_BITS = 4
_GROUP_SIZES = (32, 64, 128, -1)
_WORDS = frozenset({torch.int32})
_PER_WORD = 8
# The place in its word of every column.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class Awq:
    """What quantization_config says."""

    group_size: int
    rules: ModuleRules

    @classmethod
    def from_fields(cls, fields: FieldReader) -> Self:
        """Raises ConfigurationError naming the field."""
        fields.refuse("lm_head", "dynamic")
        fields.word("version", ("gemm",), "gemm")
        fields.word("checkpoint_format", ("gemm",), "gemm")
        fields.word("format", ("gemm",), "gemm")
        fields.word("backend", ("autoawq",), "autoawq")
        fields.number("bits", (_BITS,))
        if not fields.flag("zero_point", default=True):
            raise fields.error("zero_point", "isn't supported; supported: true")
        names = fields.names("modules_to_not_convert")
        return cls(
            group_size=fields.number("group_size", _GROUP_SIZES),
            rules=ModuleRules(tuple(contains(name) for name in names)),
        )

    @property
    def bits(self) -> int:
        return _BITS

    def covers(self, module: str) -> bool:
        return self.rules.cover(module)

    def size(self, outputs: int, inputs: int) -> LayerSize:
        if outputs % _PER_WORD:
            raise ValueError(f"{outputs} outputs are no multiple of {_PER_WORD}")
        if self.group_size != -1 and inputs % self.group_size:
            raise ValueError(f"{inputs} inputs aren't whole groups of {self.group_size}")
        return LayerSize(outputs, inputs, num_groups(inputs, self.group_size))

    def region(self, size: LayerSize, outputs: range, inputs: range) -> Region:
        return ordered_region(size, outputs, inputs, self.group_size)

    def forms(self, size: LayerSize) -> tuple[StoredForm, ...]:  # noqa: ARG002 - one signature
        inputs, groups = Along(Axis.INPUTS), Along(Axis.GROUPS)
        packed = Along(Axis.OUTPUTS, _PER_WORD)
        codes, zeros = draw_codes(self.bits, symmetric=False), draw_zeros(self.bits)
        return (
            StoredForm("qweight", (inputs, packed), torch.int32, codes, _WORDS),
            StoredForm("qzeros", (groups, packed), torch.int32, zeros, _WORDS),
            scales_form("scales", (groups, Along(Axis.OUTPUTS)), self.bits, symmetric=False),
        )

    def unpack(self, raw: Mapping[str, Tensor], region: Region) -> Codes:
        values = trimmed(_columns(raw["qweight"]), region.outputs, _PER_WORD, 1)
        zeros = trimmed(_columns(raw["qzeros"]), region.outputs, _PER_WORD, 1)
        return Codes(
            bits=self.bits,
            values=values.t(),
            scales=raw["scales"].t(),
            zeros=zeros.t(),
            groups=ordered_groups(region, self.group_size).to(values.device),
        )

    def __str__(self) -> str:
        groups = "one group" if self.group_size == -1 else f"groups of {self.group_size}"
        return f"AWQ, {self.bits} bits, {groups}"


def _columns(words: Tensor) -> Tensor:
    """uint8 [R, 8 W] of int32 [R, W], in the order of the columns."""
    return unpack(words, _BITS).unflatten(1, (-1, _PER_WORD))[:, :, _PLACES].flatten(1)
