"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them.

Frantar et al., "GPTQ", 2022. Per linear layer of K inputs and N outputs, with 32 / bits values a
word, lowest bits first: `qweight` int32 [K / 8, N] along K, `qzeros` int32 [G, N / 8] along N,
`scales` [G, N], `g_idx` int32 [K], the group of every input (with act-order in any order).

Zero points are stored minus 1 in checkpoint_format "gptq" and as they are in "gptq_v2". A zero
point of 0 minus 1 has no place: AutoGPTQ reads each value plus 1 modulo 2^bits; GPTQModel and
AutoRound take off 1 in all places of a word at once, so that a value borrows from its neighbour.
Who wrote a checkpoint stands in its configuration. Must not know: layers. Entry point: `Gptq`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Self

import torch
from torch import Tensor

from octavo_worker.quant.codes import Codes, repeated, unpack
from octavo_worker.quant.draws import draw_codes, draw_zeros
from octavo_worker.quant.fields import FieldReader
from octavo_worker.quant.modules import Match, ModuleRules, ends_with, matches
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

_BITS = (4, 8)
_GROUP_SIZES = (32, 64, 128, -1)
_CHECKPOINT_FORMATS = ("gptq", "gptq_v2")
_WORDS = frozenset({torch.int32})


class Zeros(Enum):
    """How zero points are stored."""

    PLAIN = "as they are"
    MINUS_ONE = "each minus 1"
    WORDS_MINUS_ONE = "minus 1 in all places of a word at once"


@dataclass(frozen=True, slots=True)
class Gptq:
    """What quantization_config says."""

    bits: int
    group_size: int
    symmetric: bool
    act_order: bool
    zeros: Zeros
    rules: ModuleRules

    @classmethod
    def from_fields(cls, fields: FieldReader) -> Self:
        """Raises ConfigurationError naming the field."""
        fields.refuse("is_marlin_format", "lm_head", "modules_to_not_convert")
        fields.refuse("adapter", "activation", "rotation")
        fields.word("pack_dtype", ("int32",), "int32")
        return cls(
            bits=fields.number("bits", _BITS),
            group_size=fields.number("group_size", _GROUP_SIZES),
            symmetric=fields.flag("sym", default=True),
            act_order=fields.flag("desc_act", default=False),
            zeros=_zeros(fields),
            rules=ModuleRules(_skipped(fields), _only(fields)),
        )

    def covers(self, module: str) -> bool:
        return self.rules.cover(module)

    def size(self, outputs: int, inputs: int) -> LayerSize:
        per_word = 32 // self.bits
        if outputs % per_word or inputs % per_word:
            raise ValueError(f"{outputs} x {inputs} isn't a multiple of {per_word} both ways")
        return LayerSize(outputs, inputs, num_groups(inputs, self.group_size))

    def region(self, size: LayerSize, outputs: range, inputs: range) -> Region:
        if self.act_order:
            return Region(outputs, inputs, range(size.groups))
        return ordered_region(size, outputs, inputs, self.group_size)

    def forms(self, size: LayerSize) -> tuple[StoredForm, ...]:
        per_word = 32 // self.bits
        outputs, groups = Along(Axis.OUTPUTS), Along(Axis.GROUPS)
        packed = Along(Axis.INPUTS, per_word), outputs
        codes = draw_codes(self.bits, symmetric=self.symmetric)
        return (
            StoredForm("qweight", packed, torch.int32, codes, _WORDS),
            self._zeros_form((groups, Along(Axis.OUTPUTS, per_word))),
            scales_form("scales", (groups, outputs), self.bits, symmetric=self.symmetric),
            groups_form("g_idx", size, self.group_size, act_order=self.act_order),
        )

    def unpack(self, raw: Mapping[str, Tensor], region: Region) -> Codes:
        per_word = 32 // self.bits
        values = unpack(raw["qweight"].t(), self.bits)
        zeros = self._unpack_zeros(raw["qzeros"])
        groups = raw["g_idx"].long() if self.act_order else ordered_groups(region, self.group_size)
        return Codes(
            bits=self.bits,
            values=trimmed(values, region.inputs, per_word, 1),
            scales=raw["scales"].t(),
            zeros=trimmed(zeros, region.outputs, per_word, 1).t(),
            groups=groups.to(values.device),
        )

    def __str__(self) -> str:
        groups = "one group" if self.group_size == -1 else f"groups of {self.group_size}"
        kind = "symmetric" if self.symmetric else "asymmetric"
        order = ", act-order" if self.act_order else ""
        return f"GPTQ, {self.bits} bits, {groups}, {kind}{order}, zero points {self.zeros.value}"

    def _zeros_form(self, axes: tuple[Along, Along]) -> StoredForm:
        middle = 1 << (self.bits - 1)
        minus = 0 if self.zeros is Zeros.PLAIN else 1
        word = repeated(middle - minus, self.bits)

        def check(words: Tensor) -> None:
            if self.symmetric and not bool((words == word).all()):
                raise BadValuesError(
                    f"holds other zero points than {middle}, {self.zeros.value}, though the "
                    "configuration says sym=true: is checkpoint_format wrong?"
                )

        def fill_middle(target: Tensor, _generator: torch.Generator, _std: float) -> None:
            target.fill_(word)

        fill = fill_middle if self.symmetric else draw_zeros(self.bits, minus=minus)
        return StoredForm("qzeros", axes, torch.int32, fill, _WORDS, check)

    def _unpack_zeros(self, words: Tensor) -> Tensor:
        """uint8 [G, N]."""
        if self.zeros is Zeros.WORDS_MINUS_ONE:
            # int32 sums wrap as the words of who wrote them did.
            return unpack(words + repeated(1, self.bits), self.bits)
        stored = unpack(words, self.bits)
        return stored if self.zeros is Zeros.PLAIN else (stored + 1) & ((1 << self.bits) - 1)


def _format(fields: FieldReader) -> str:
    """GPTQModel says it twice, others once or, when there was one only, never."""
    named = [name for name in ("checkpoint_format", "format") if fields.get(name) is not None]
    formats = {fields.word(name, _CHECKPOINT_FORMATS, "") for name in named}
    if len(formats) > 1:
        raise fields.error("format", f"contradicts {named[0]}={fields.get(named[0])!r}")
    return formats.pop() if formats else "gptq"


def _zeros(fields: FieldReader) -> Zeros:
    if _format(fields) == "gptq_v2":
        return Zeros.PLAIN
    quantizer = fields.inner("meta").get("quantizer")
    writers = quantizer if isinstance(quantizer, list) else [quantizer]
    by_words = any(str(writer).lower().startswith("gptqmodel") for writer in writers)
    by_words = by_words or fields.get("autoround_version") is not None
    return Zeros.WORDS_MINUS_ONE if by_words else Zeros.MINUS_ONE


def _skipped(fields: FieldReader) -> tuple[Match, ...]:
    """GPTQModel's `dynamic`: "-:<expression>" leaves layers out; other rules change their bits."""
    skipped: list[Match] = []
    for pattern, changes in fields.inner("dynamic").items():
        if not pattern.startswith("-:"):
            if changes:
                raise fields.error("dynamic", f"isn't supported: {pattern!r} changes {changes!r}")
            continue
        try:
            skipped.append(matches(pattern.removeprefix("-:")))
        except ValueError as error:
            raise fields.error("dynamic", str(error)) from None
    return tuple(skipped)


def _only(fields: FieldReader) -> tuple[Match, ...] | None:
    """optimum's `modules_in_block_to_quantize`: lists of names inside a block; absent = all."""
    blocks = fields.get("modules_in_block_to_quantize")
    if not blocks:
        return None
    names = [name for block in blocks for name in (block if isinstance(block, list) else [block])]
    if not all(isinstance(name, str) for name in names):
        raise fields.error("modules_in_block_to_quantize", "must be lists of names")
    return tuple(ends_with(name) for name in names)
