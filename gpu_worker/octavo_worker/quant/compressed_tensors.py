"""compressed-tensors checkpoints of the scheme W4A16, as llm-compressor writes them.

Format "pack-quantized", 4-bit integers. Per linear layer of K inputs and N outputs, eight values
a word, lowest bits first, each stored plus 8: `weight_packed` int32 [N, K / 8] along K,
`weight_scale` [N, G], `weight_shape` (N, K), if asymmetric `weight_zero_point` int32 [N / 8, G]
along N, and with act-order by groups `weight_g_idx` int32 [K]. Strategy "channel" is one group.
https://github.com/vllm-project/compressed-tensors. Must not know: layers. Entry point:
`CompressedTensors`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from octavo_worker.quant.codes import Codes, unpack
from octavo_worker.quant.draws import draw_codes, draw_zeros
from octavo_worker.quant.fields import FieldReader
from octavo_worker.quant.modules import Match, ModuleRules, equals, matches
from octavo_worker.quant.stored import (
    Along,
    Axis,
    LayerSize,
    Region,
    StoredForm,
    groups_form,
    num_groups,
    ordered_groups,
    ordered_region,
    scales_form,
    trimmed,
)
from octavo_worker.slots import BadValuesError

_BITS = 4
_GROUP_SIZES = (32, 64, 128)
_INDICES = frozenset({torch.int32, torch.int64})
_WORDS = frozenset({torch.int32})
_PER_WORD = 8
_MIDDLE = 8  # the code of 0 where there are no zero points
_LINEAR = "Linear"


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """What quantization_config says. `group_size` -1: strategy "channel"."""

    group_size: int
    symmetric: bool
    act_order: bool
    rules: ModuleRules

    @classmethod
    def from_fields(cls, fields: FieldReader) -> Self:
        """Raises ConfigurationError naming the field."""
        fields.word("format", ("pack-quantized",), "")
        group = only_group(fields)
        group.refuse("input_activations")
        group.word("format", ("pack-quantized",), "pack-quantized")
        weights = group.inner("weights")
        weights.number("num_bits", (_BITS,))
        weights.word("type", ("int",), "int")
        weights.refuse("dynamic")
        order = weights.get("actorder")
        if order not in (None, False, "weight", "static", "group", "dynamic"):
            raise weights.error("actorder", "isn't supported; supported: weight, group")
        strategy = weights.word("strategy", ("group", "channel"), "")
        is_group = strategy == "group"
        return cls(
            group_size=weights.number("group_size", _GROUP_SIZES) if is_group else -1,
            symmetric=weights.flag("symmetric"),
            act_order=order in ("group", "dynamic"),
            rules=rules_of(fields, group),
        )

    @property
    def bits(self) -> int:
        return _BITS

    def covers(self, module: str) -> bool:
        return self.rules.cover(module)

    def size(self, outputs: int, inputs: int) -> LayerSize:
        if self.group_size != -1 and inputs % self.group_size:
            raise ValueError(f"{inputs} inputs aren't whole groups of {self.group_size}")
        return LayerSize(outputs, inputs, num_groups(inputs, self.group_size))

    def region(self, size: LayerSize, outputs: range, inputs: range) -> Region:
        if self.act_order:
            return Region(outputs, inputs, range(size.groups))
        return ordered_region(size, outputs, inputs, self.group_size)

    def forms(self, size: LayerSize) -> tuple[StoredForm, ...]:
        outputs, groups = Along(Axis.OUTPUTS), Along(Axis.GROUPS)
        packed = outputs, Along(Axis.INPUTS, _PER_WORD)
        codes = draw_codes(self.bits, symmetric=self.symmetric)
        forms = [
            StoredForm("weight_packed", packed, torch.int32, codes, _WORDS),
            scales_form("weight_scale", (outputs, groups), self.bits, symmetric=self.symmetric),
            _shape_form(size),
        ]
        if not self.symmetric:
            axes = Along(Axis.OUTPUTS, _PER_WORD), groups
            zeros = draw_zeros(self.bits)
            forms.append(StoredForm("weight_zero_point", axes, torch.int32, zeros, _WORDS))
        if self.act_order:
            forms.append(groups_form("weight_g_idx", size, self.group_size, act_order=True))
        return tuple(forms)

    def unpack(self, raw: Mapping[str, Tensor], region: Region) -> Codes:
        values = unpack(raw["weight_packed"], self.bits)
        scales = raw["weight_scale"]
        if self.symmetric:
            zeros = torch.full_like(scales, _MIDDLE, dtype=torch.uint8)
        else:
            columns = unpack(raw["weight_zero_point"].t(), self.bits)
            zeros = trimmed(columns, region.outputs, _PER_WORD, 1).t()
        if self.act_order:
            groups = raw["weight_g_idx"].long()
        else:
            groups = ordered_groups(region, self.group_size)
        return Codes(
            bits=self.bits,
            values=trimmed(values, region.inputs, _PER_WORD, 1),
            scales=scales,
            zeros=zeros,
            groups=groups.to(values.device),
        )

    def __str__(self) -> str:
        groups = "one group" if self.group_size == -1 else f"groups of {self.group_size}"
        kind = "symmetric" if self.symmetric else "asymmetric"
        order = ", act-order" if self.act_order else ""
        return f"compressed-tensors, {self.bits} bits, {groups}, {kind}{order}"


def only_group(fields: FieldReader) -> FieldReader:
    """The one group of layers, after what all formats say alike; errors name the field."""
    fields.word("quantization_status", ("compressed",), "compressed")
    fields.refuse("transform_config")
    fields.inner("sparsity_config").word("format", ("dense",), "dense")
    groups = fields.inner("config_groups")
    if len(groups.items()) != 1:
        names = ", ".join(name for name, _ in groups.items()) or "none"
        raise fields.error("config_groups", f"must be one group; they are: {names}")
    group = groups.inner(groups.items()[0][0])
    group.refuse("output_activations")
    return group


def rules_of(fields: FieldReader, group: FieldReader) -> ModuleRules:
    """Which layers the targets of a group and the ignored names leave quantised."""
    targets = group.names("targets")
    only = None if _LINEAR in targets else _matchers(group, "targets", targets)
    return ModuleRules(_matchers(fields, "ignore", fields.names("ignore")), only)


def _matchers(fields: FieldReader, field: str, names: tuple[str, ...]) -> tuple[Match, ...]:
    """Full names, or "re:" and an expression that matches from a name's start."""
    try:
        return tuple(
            matches(name.removeprefix("re:")) if name.startswith("re:") else equals(name)
            for name in names
        )
    except ValueError as error:
        raise fields.error(field, str(error)) from None


def _shape_form(size: LayerSize) -> StoredForm:
    def check(stored: Tensor) -> None:
        # Outputs may be those of several layers in one.
        if stored.tolist()[1] != size.inputs:
            raise BadValuesError(
                f"says {stored.tolist()}; config.json asks for {size.inputs} inputs"
            )

    def fill(target: Tensor, _generator: torch.Generator, _std: float) -> None:
        target.copy_(torch.tensor([size.outputs, size.inputs]))

    return StoredForm("weight_shape", (2,), torch.int64, fill, _INDICES, check)
