"""What stands between a layer's second norm and the residual. Entry points: `Mlp`, `GatedMlp`.

Must not know: attention, files. Shapes: T tokens, Hid hidden size, I intermediate size.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from octavo_worker.models.config import Activation, ModelConfig
from octavo_worker.models.linear import LinearMaker, Split, Weights

if TYPE_CHECKING:
    from octavo_worker.attention_inputs import StepInputs
    from octavo_worker.backends.base import Backend


class Mlp(Protocol):
    """[T, Hid] -> [T, Hid]."""

    def __call__(self, hidden: Tensor, inputs: "StepInputs", backend: "Backend") -> Tensor: ...

    def weights(self) -> Iterator[Weights]:
        """All that it's made of."""
        ...


class GatedMlp:
    """down(act(gate(x)) * up(x)); `module`: its name, "model.layers.0.mlp"."""

    def __init__(self, config: ModelConfig, make: LinearMaker, module: str, inner: int) -> None:
        self._activation = config.activation
        parts = {"gate_proj": inner, "up_proj": inner}
        bias = config.mlp_bias
        self.gate_up = make(module, parts, config.hidden_size, bias=bias, split=Split.COLUMNS)
        parts = {"down_proj": config.hidden_size}
        self.down = make(module, parts, inner, bias=bias, split=Split.ROWS)

    def __call__(
        self,
        hidden: Tensor,
        inputs: "StepInputs",  # noqa: ARG002 - every token is its own affair
        backend: "Backend",
    ) -> Tensor:
        return self.down(self.inner(hidden, backend))

    def inner(self, hidden: Tensor, backend: "Backend") -> Tensor:
        """What `down` takes: [T, I]."""
        gate_up = self.gate_up(hidden)
        if self._activation is Activation.GELU_TANH:
            return backend.gelu_mul(gate_up)
        return backend.silu_mul(gate_up)

    def weights(self) -> Iterator[Weights]:
        yield from (self.gate_up, self.down)
