"""Layouts: under which names checkpoints store what the decoder names as Llama does.

The decoder knows one tensor a projection: `model.layers.0.self_attn.q_proj.weight`. A family
whose files name it otherwise, hold several of them as one, or number a head's dims otherwise says
so in a `Layout`. Must not know: files, decoders. Entry points: `Layout`, `LLAMA`.

Pairs of rotated dims: our kernels rotate dims j and j + R/2 of a head together ("by halves"),
some checkpoints mean dims 2j and 2j + 1 ("interleaved"). Scores are dot products of q and k, so
the same reordering of both changes nothing: rows of q and k are brought into our order as they
are loaded (packed ones when they are unpacked), and no kernel knows of it.

D head dim, R <= D rotated dims.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from octavo_worker.slots import FusedSlot, Place, Slot

_LAYERS = "model.layers."


class Heads(NamedTuple):
    """Outputs of q and of k, dims of a head, and how many of those are rotated."""

    q_size: int
    kv_size: int
    head_dim: int
    rotary_dim: int


def fused(stored: str, *modules: str) -> dict[str, str]:
    """`Layout.modules` of several modules that one tensor holds one after the other."""
    return dict.fromkeys(modules, stored)


@dataclass(frozen=True, slots=True)
class Layout:
    """The names of a family's checkpoints.

    `layers`: what numbers are put behind, "transformer.h". `modules`: our name of a module, whole
    ("model.norm") or within its layer ("self_attn.q_proj"), -> the stored one; modules of one
    layer that share a stored name are fused in the order of the decoder's slots. What isn't
    named is stored under our name. `is_interleaved`: see above.
    """

    layers: str = "model.layers"
    modules: Mapping[str, str] = field(default_factory=dict[str, str])
    is_interleaved: bool = False

    def name_of(self, name: str) -> str:
        """The stored name of a tensor, "model.layers.0.mlp.up_proj.weight"."""
        module, _, tensor = name.rpartition(".")
        return f"{self.module_of(module)}.{tensor}"

    def module_of(self, module: str) -> str:
        """The stored name of a module, "model.layers.0.mlp.up_proj"."""
        if not module.startswith(_LAYERS):
            return self.modules.get(module, module)
        index, _, within = module.removeprefix(_LAYERS).partition(".")
        return f"{self.layers}.{index}.{self.modules.get(within, within)}"

    def stored(self, slots: Mapping[str, Slot], heads: Heads) -> dict[str, Place]:
        """Stored name -> place, for a decoder's slots by our names."""
        parts: dict[str, list[Slot]] = {}
        for name, slot in slots.items():
            if self.is_interleaved:
                slot = _by_halves(name, slot, heads)
            parts.setdefault(self.name_of(name), []).append(slot)
        return {
            name: of_name[0] if len(of_name) == 1 else FusedSlot(tuple(of_name))
            for name, of_name in parts.items()
        }


def _by_halves(name: str, slot: Slot, heads: Heads) -> Slot:
    """The slot with rows of interleaved pairs reordered as they're loaded, if it has any."""
    sizes = {"q_proj": heads.q_size, "k_proj": heads.kv_size}
    size = sizes.get(name.rsplit(".", 2)[-2])
    if size is None:
        return slot
    order = _order(size, heads)
    if slot.reorder is not None:
        slot.reorder(order)
        return slot
    axis, take = slot.out_axis, slot.take
    assert axis is not None, name
    assert slot.shape[axis] == size, (name, slot.shape, size)

    def take_in_order(stored: Tensor) -> Tensor:
        ordered = stored.index_select(axis, order)
        return ordered if take is None else take(ordered)

    return replace(slot, take=take_in_order)


def _order(size: int, heads: Heads) -> Tensor:
    """int64 [size]: the stored row of each of ours."""
    rotated = torch.arange(heads.rotary_dim).view(-1, 2).T.flatten()
    of_head = torch.cat([rotated, torch.arange(heads.rotary_dim, heads.head_dim)])
    return (torch.arange(0, size, heads.head_dim)[:, None] + of_head).flatten()


LLAMA = Layout()
