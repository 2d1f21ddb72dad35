"""How a format stores a quantised layer: tensor by tensor, and the part of each that is wanted.

A rank of several needs some outputs or inputs of a layer only; stored words hold 4 or 8 values
along one axis, so that whole words around the wanted values are kept, and trimmed when they are
unpacked. Must not know: layers, devices. Entry points: `Quantization`, `StoredForm`, `Region`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from octavo_worker.quant.codes import Codes
from octavo_worker.quant.draws import Fill, draw_scales
from octavo_worker.slots import FLOATS, BadValuesError

_INDICES = frozenset({torch.int32, torch.int64})


class Axis(Enum):
    """What an axis of a stored tensor counts."""

    OUTPUTS = "outputs"
    INPUTS = "inputs"
    GROUPS = "groups"


class Along(NamedTuple):
    """An axis of a stored tensor, and how many values an element of it holds."""

    axis: Axis
    per_word: int = 1


class LayerSize(NamedTuple):
    """N outputs, K inputs, G groups of inputs."""

    outputs: int
    inputs: int
    groups: int

    def along(self, axis: Axis) -> int:
        return {
            Axis.OUTPUTS: self.outputs,
            Axis.INPUTS: self.inputs,
            Axis.GROUPS: self.groups,
        }[axis]


class Region(NamedTuple):
    """The wanted part of a layer, in half-open ranges of its whole size."""

    outputs: range
    inputs: range
    groups: range

    def along(self, axis: Axis) -> range:
        return {
            Axis.OUTPUTS: self.outputs,
            Axis.INPUTS: self.inputs,
            Axis.GROUPS: self.groups,
        }[axis]


@dataclass(frozen=True, slots=True)
class StoredForm:
    """One tensor of a layer, `<module>.<suffix>` in the file.

    `axes`: what its axes count; a plain number is a fixed length. `check` raises BadValuesError
    for values (of the whole stored tensor) that can't be right. `fill` draws random ones.
    """

    suffix: str
    axes: tuple[Along | int, ...]
    dtype: torch.dtype
    fill: Fill
    dtypes: frozenset[torch.dtype]
    check: Callable[[Tensor], None] | None = None

    @property
    def out_axis(self) -> int | None:
        """The axis along which outputs lie, packed or not."""
        axes = (
            None if isinstance(along, int) else along.axis is Axis.OUTPUTS for along in self.axes
        )
        return next((index for index, is_out in enumerate(axes) if is_out), None)

    def shape(self, size: LayerSize) -> tuple[int, ...]:
        """Of the stored tensor."""
        return tuple(
            along if isinstance(along, int) else _num_words(size.along(along.axis), along.per_word)
            for along in self.axes
        )

    def words(self, region: Region) -> tuple[slice, ...]:
        """Where the words lie that hold any value of `region`."""
        return tuple(
            slice(0, along)
            if isinstance(along, int)
            else _words_around(region.along(along.axis), along.per_word)
            for along in self.axes
        )

    def take(self, stored: Tensor, region: Region) -> Tensor:
        """Check a stored tensor; the words of `region`."""
        if self.check is not None:
            self.check(stored)
        return stored[self.words(region)]


class Quantization(Protocol):
    """A format as one folder uses it."""

    @property
    def bits(self) -> int:
        """Of a code: 4 or 8."""
        ...

    def covers(self, module: str) -> bool:
        """Whether the linear layer of this name is quantised, as the configuration says."""
        ...

    def size(self, outputs: int, inputs: int) -> LayerSize:
        """Raises ValueError if a layer of that size can't be stored in this format."""
        ...

    def region(self, size: LayerSize, outputs: range, inputs: range) -> Region:
        """The part of a layer with these outputs and inputs, and the groups that it needs."""
        ...

    def forms(self, size: LayerSize) -> Sequence[StoredForm]:
        """Every tensor of a layer but its bias."""
        ...

    def unpack(self, raw: Mapping[str, Tensor], region: Region) -> Codes:
        """From what `forms` say, by suffix, cut to the words of `region`."""
        ...

    def __str__(self) -> str:
        """For logs: "AWQ, 4 bits, groups of 128"."""
        ...


def num_groups(inputs: int, group_size: int) -> int:
    """`group_size` -1 = one group; the last group may be smaller."""
    return 1 if group_size == -1 else -(-inputs // group_size)


def ordered_groups(region: Region, group_size: int) -> Tensor:
    """int64 [K of the region]: the group of each input, counted from the region's first one."""
    indices = torch.arange(region.inputs.start, region.inputs.stop)
    if group_size == -1:
        return torch.zeros_like(indices)
    return indices // group_size - region.groups.start


def ordered_region(size: LayerSize, outputs: range, inputs: range, group_size: int) -> Region:
    """The region of neighbours in `inputs` whose groups follow each other."""
    if group_size == -1:
        return Region(outputs, inputs, range(1))
    first, last = inputs.start // group_size, num_groups(inputs.stop, group_size)
    assert last <= size.groups
    return Region(outputs, inputs, range(first, last))


def trimmed(values: Tensor, wanted: range, per_word: int, dim: int) -> Tensor:
    """Of values unpacked from the words around `wanted`, those that are."""
    return values.narrow(dim, wanted.start % per_word, len(wanted))


def check_finite(stored: Tensor) -> None:
    """A check for scales."""
    if not bool(stored.isfinite().all()):
        raise BadValuesError("holds NaN or infinity where only finite scales make sense")


def scales_form(
    suffix: str, axes: tuple[Along | int, ...], bits: int, *, symmetric: bool
) -> StoredForm:
    """`symmetric`: zero points aren't stored, or all alike."""
    fill = draw_scales(bits, symmetric=symmetric)
    return StoredForm(suffix, axes, torch.float32, fill, FLOATS, check_finite)


def groups_form(suffix: str, size: LayerSize, group_size: int, *, act_order: bool) -> StoredForm:
    """The group of every input: in order, or with `act_order` in any order."""
    width = size.inputs if group_size == -1 else group_size
    ordered = torch.arange(size.inputs) // width

    def check(stored: Tensor) -> None:
        if torch.equal(stored.long(), ordered):
            return
        if not act_order:
            raise BadValuesError(
                "puts inputs into groups out of order, though the configuration says desc_act=false"
            )
        lowest, highest = int(stored.min()), int(stored.max())
        if lowest < 0 or highest >= size.groups:
            raise BadValuesError(
                f"holds groups from {lowest} to {highest}; there are 0 to {size.groups - 1}"
            )
        if not torch.equal(stored.long().sort().values, ordered):
            raise BadValuesError(f"doesn't put {width} inputs into each group")

    def fill(target: Tensor, _generator: torch.Generator, _std: float) -> None:
        # One order for all layers of a width, as layers with the same input have.
        order = torch.randperm(len(ordered), generator=torch.Generator().manual_seed(0))
        target.copy_((ordered[order] if act_order else ordered)[: len(target)])

    return StoredForm(suffix, (Along(Axis.INPUTS),), torch.int32, fill, _INDICES, check)


def _num_words(count: int, per_word: int) -> int:
    return -(-count // per_word)


def _words_around(wanted: range, per_word: int) -> slice:
    return slice(wanted.start // per_word, _num_words(wanted.stop, per_word))
