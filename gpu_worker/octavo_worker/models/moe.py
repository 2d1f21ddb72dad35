"""A mixture of experts: a router chooses a few of many small MLPs for every token.

All experts of a layer are two tensors, so that one kernel reads just those that were chosen.
Checkpoints store them one by one (the original layout) or as just these two tensors. Must not
know: attention, files. Entry points: `SparseMlp`, `with_stored_experts`.

Shapes: T tokens, Hid hidden size, E experts, I intermediate size of one.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from octavo_worker.models.config import ModelConfig
from octavo_worker.models.linear import LinearMaker, Split, Weights
from octavo_worker.models.mlp import GatedMlp
from octavo_worker.models.moe_config import MoeConfig
from octavo_worker.slots import Slot

if TYPE_CHECKING:
    from octavo_worker.attention_inputs import StepInputs
    from octavo_worker.backends.base import Backend

_FUSED_SUFFIX = ".mlp.experts.gate_up_proj"


def with_stored_experts(config: ModelConfig, stored: Collection[str]) -> ModelConfig:
    """The configuration for a checkpoint of these tensors: are the experts stored one by one?"""
    if config.moe is None or not any(name.endswith(_FUSED_SUFFIX) for name in stored):
        return config
    return replace(config, moe=replace(config.moe, names=None))


class Experts:
    """The experts of a layer: gate_up [E, 2 I, Hid] (gate first) and down [E, Hid, I].

    A rank of several may hold a part of each one's width, I of `expert_size`: what it computes is
    then a partial sum.
    """

    def __init__(
        self,
        moe: MoeConfig,
        hidden_size: int,
        module: str,
        empty: Callable[..., Tensor],
        part: range | None = None,
    ) -> None:
        """`module`: "model.layers.0.mlp.experts"; `empty`: makes a tensor of a shape."""
        self._part = part if part is not None else range(moe.expert_size)
        self.gate_up = empty(moe.num_experts, 2 * len(self._part), hidden_size)
        self.down = empty(moe.num_experts, hidden_size, len(self._part))
        self._moe, self._hidden_size, self._module = moe, hidden_size, module

    def __call__(
        self, hidden: Tensor, scores: Tensor, inputs: "StepInputs", backend: "Backend"
    ) -> Tensor:
        """[T, Hid] of hidden [T, Hid], by the router's scores [T, E]."""
        return backend.experts(
            hidden,
            scores,
            self.gate_up,
            self.down,
            inputs.slot_mapping,
            top_k=self._moe.top_k,
            renormalise=self._moe.renormalise,
        )

    def slots(self) -> Iterator[tuple[str, Slot]]:
        names, own = self._moe.names, slice(self._part.start, self._part.stop)
        size, hidden = self._moe.expert_size, self._hidden_size
        if names is None:
            yield f"{self._module}.gate_up_proj", self._stored_in_one()
            shape = (self._moe.num_experts, hidden, size)
            yield f"{self._module}.down_proj", Slot(self.down, shape, take=lambda w: w[..., own])
            return
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            module = f"{self._module}.{expert}"
            for name, target in zip((names.gate, names.up), gate_up.chunk(2), strict=True):
                slot = Slot(target, (size, hidden), take=lambda stored: stored[own])
                yield f"{module}.{name}.weight", slot
            slot = Slot(down, (hidden, size), take=lambda stored: stored[:, own])
            yield f"{module}.{names.down}.weight", slot

    def _stored_in_one(self) -> Slot:
        part, size = self._part, self._moe.expert_size

        def take(stored: Tensor) -> Tensor:
            halves = stored.split(size, dim=1)
            return torch.cat([half[:, part.start : part.stop] for half in halves], dim=1)

        shape = (self._moe.num_experts, 2 * size, self._hidden_size)
        return Slot(self.gate_up, shape, take=None if len(part) == size else take)

    def finish(self) -> None:
        """As stored is as computed with."""

    def num_bytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes


class ExpertsMaker(Protocol):
    """Makes the experts of a layer, or a rank's part of them; see `Experts`."""

    def __call__(self, moe: MoeConfig, hidden_size: int, module: str) -> Experts: ...


class SparseMlp:
    """The sum of the chosen experts, weighted by the router, and of the shared one, if any."""

    def __init__(
        self,
        config: ModelConfig,
        moe: MoeConfig,
        make: LinearMaker,
        make_experts: ExpertsMaker,
        prefix: str,
    ) -> None:
        """`prefix`: the layer's, "model.layers.0"."""
        hidden, num_experts = config.hidden_size, moe.num_experts
        block = f"{prefix}.{moe.names.block if moe.names else 'mlp'}"
        self.router = make(block, {"gate": num_experts}, hidden, bias=False, split=Split.NONE)
        self.experts = make_experts(moe, hidden, f"{block}.experts")
        self.shared = self.shared_gate = None
        if moe.shared_size:
            self.shared = GatedMlp(config, make, f"{block}.shared_expert", moe.shared_size)
            parts = {"shared_expert_gate": 1}
            self.shared_gate = make(block, parts, hidden, bias=False, split=Split.NONE)

    def __call__(self, hidden: Tensor, inputs: "StepInputs", backend: "Backend") -> Tensor:
        routed = self.experts(hidden, self.router(hidden), inputs, backend)
        if self.shared is None or self.shared_gate is None:
            return routed
        shared = self.shared(hidden, inputs, backend)
        return routed + torch.sigmoid(self.shared_gate(hidden)) * shared

    def weights(self) -> Iterator[Weights]:
        yield from (self.router, self.experts)
        if self.shared is not None and self.shared_gate is not None:
            yield from self.shared.weights()
            yield self.shared_gate
