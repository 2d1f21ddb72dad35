"""A mixture of experts: a router chooses a few of many small MLPs for every token.

All experts of a layer are two tensors, so that one kernel reads just those that were chosen.
Checkpoints store them one by one (the original layout) or as just these two tensors. Must not
know: attention, files. Entry points: `SparseMlp`, `with_stored_experts`.

Shapes: T tokens, Hid hidden size, E experts, I intermediate size of one.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo_worker.models.config import ModelConfig
from octavo_worker.models.linear import LinearMaker, Split, Weights
from octavo_worker.models.mlp import GatedMlp
from octavo_worker.models.moe_config import ExpertNames, MoeConfig
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
    """The experts of a layer: gate_up [E, 2 I, Hid] (gate first) and down [E, Hid, I]."""

    def __init__(
        self, gate_up: Tensor, down: Tensor, module: str, names: ExpertNames | None
    ) -> None:
        """`module`: "model.layers.0.mlp.experts"; `names`: of each one, None = stored as here."""
        self.gate_up, self.down = gate_up, down
        self._module, self._names = module, names

    def slots(self) -> Iterator[tuple[str, Slot]]:
        names = self._names
        if names is None:
            yield f"{self._module}.gate_up_proj", Slot(self.gate_up)
            yield f"{self._module}.down_proj", Slot(self.down)
            return
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            gate, up = gate_up.chunk(2)
            module = f"{self._module}.{expert}"
            yield f"{module}.{names.gate}.weight", Slot(gate)
            yield f"{module}.{names.up}.weight", Slot(up)
            yield f"{module}.{names.down}.weight", Slot(down)

    def finish(self) -> None:
        """As stored is as computed with."""

    def num_bytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes


class SparseMlp:
    """The sum of the chosen experts, weighted by the router, and of the shared one, if any."""

    def __init__(
        self,
        config: ModelConfig,
        moe: MoeConfig,
        make: LinearMaker,
        empty: Callable[..., Tensor],
        prefix: str,
    ) -> None:
        """`empty`: makes a tensor of a shape; `prefix`: the layer's, "model.layers.0"."""
        hidden, num_experts = config.hidden_size, moe.num_experts
        self.top_k, self.renormalise = moe.top_k, moe.renormalise
        block = f"{prefix}.{moe.names.block if moe.names else 'mlp'}"
        self.router = make(block, {"gate": num_experts}, hidden, bias=False, split=Split.NONE)

        self.experts = Experts(
            empty(num_experts, 2 * moe.expert_size, hidden),
            empty(num_experts, hidden, moe.expert_size),
            f"{block}.experts",
            moe.names,
        )
        self.shared = self.shared_gate = None
        if moe.shared_size:
            self.shared = GatedMlp(config, make, f"{block}.shared_expert", moe.shared_size)
            parts = {"shared_expert_gate": 1}
            self.shared_gate = make(block, parts, hidden, bias=False, split=Split.NONE)

    def __call__(self, hidden: Tensor, inputs: "StepInputs", backend: "Backend") -> Tensor:
        routed = backend.experts(
            hidden,
            self.router(hidden),
            self.experts.gate_up,
            self.experts.down,
            inputs.slot_mapping,
            top_k=self.top_k,
            renormalise=self.renormalise,
        )
        if self.shared is None or self.shared_gate is None:
            return routed
        shared = self.shared(hidden, inputs, backend)
        return routed + torch.sigmoid(self.shared_gate(hidden)) * shared

    def weights(self) -> Iterator[Weights]:
        yield from (self.router, self.experts)
        if self.shared is not None and self.shared_gate is not None:
            yield from self.shared.weights()
            yield self.shared_gate
