"""Models that the native decoder doesn't know, computed by transformers' own code.

The causal model of transformers runs on the packed tokens of a step, [1, T] with their positions
and without any cache or mask of its own; where it attends, it calls our paged attention
(`transformers.AttentionInterface`). Slower than the native decoder: nothing is fused. This module
imports transformers, which takes seconds: import it only where a model needs it. No code of the
folder is ever run. Must not know: rows, sampling, requests. Entry point: `FallbackModel`.

T tokens, H query heads, K kv heads, D head dim, Hid hidden size, V vocabulary.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

from octavo_worker.attention_inputs import AttentionOptions, StepInputs
from octavo_worker.models.transformers_probe import AttentionLayer, Probed, decoder_of

if TYPE_CHECKING:
    from octavo_worker.backends.base import Backend

PAGED = "octavo_paged"


@dataclass(frozen=True, slots=True)
class FallbackConfig:
    """What the KV cache and the runner need to know; see `ModelConfig`.

    `intermediate_size` is the widest output of a linear layer, the head aside.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype


class _Step:
    """The step that the layers are computing."""

    __slots__ = ("backend", "inputs", "kv_caches")

    inputs: StepInputs
    kv_caches: list[tuple[Tensor, Tensor]]
    backend: "Backend"


class PagedAttention:
    """One layer's attention over its paged cache.

    `unmoved`: a position table that rotates by nothing, since queries and keys come rotated.
    """

    def __init__(self, step: _Step, index: int, options: AttentionOptions, unmoved: Tensor) -> None:
        self._step = step
        self._index = index
        self._options = options
        self._unmoved = unmoved

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[1, T, H, value's dim] of query [1, H, T, D], key and value [1, K, T, D or less]."""
        step, value_dim = self._step, value.shape[3]
        k_cache, v_cache = step.kv_caches[self._index]
        inputs, backend, options = step.inputs, step.backend, self._options
        q, k, v = (_by_token(x, k_cache) for x in (query, key, value))
        q, _ = backend.rope_and_cache(
            q, k, v, self._unmoved, inputs.positions, inputs.slot_mapping, k_cache, v_cache
        )
        num_prefill = inputs.num_prefill_tokens
        parts: list[Tensor] = []
        if num_prefill > 0:
            chunks = q[:num_prefill]
            parts.append(backend.prefill_attention(chunks, k_cache, v_cache, inputs, options))
        if num_prefill < q.shape[0]:
            rows = q[num_prefill:]
            parts.append(backend.decode_attention(rows, k_cache, v_cache, inputs, options))
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        return mixed[None, ..., :value_dim].to(query.dtype)


def _by_token(x: Tensor, cache: Tensor) -> Tensor:
    """[T, heads, D] of [1, heads, T, D or less] in the cache's dtype, filled up with zeros."""
    x = x[0].transpose(0, 1).to(cache.dtype)
    return F.pad(x, (0, cache.shape[3] - x.shape[2])).contiguous()


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,  # noqa: ARG001 - transformers' signature
    **_: Any,
) -> tuple[Tensor, None]:
    attention: Any = module.octavo_attention
    return attention(query, key, value), None


class _HiddenStates(nn.Module):
    """Stands where the decoder stood, so that the model computes its logits and nothing else."""

    def __init__(self, config: Any, output_class: type[Any]) -> None:
        super().__init__()
        self.config = config
        self._output_class = output_class
        self.hidden: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._output_class(last_hidden_state=self.hidden)


class FallbackModel:
    """transformers' model with paged attention; see `models.decoder.Model` for the protocol."""

    def __init__(
        self,
        model: PreTrainedModel,
        probed: Probed,
        config: FallbackConfig,
        *,
        is_capturable: bool,
    ) -> None:
        AttentionInterface.register(PAGED, _attend)
        self.config = config
        self.device = model.device
        self.is_capturable = is_capturable
        self.layers = probed.layers
        self._step = _Step()
        model.requires_grad_(False).eval()
        model.set_attn_implementation(PAGED)
        parameters = {id(p): p for p in model.parameters()}  # a tied head counts once
        self._num_bytes = sum(p.nbytes for p in parameters.values())
        self._decoder = decoder_of(model)
        self.device = model.device
        self._bind(probed.layers)
        self._hidden_states = _HiddenStates(self._decoder.config, probed.output_class)
        _replace(model, self._decoder, self._hidden_states)
        self._model = model

    def _bind(self, layers: tuple[AttentionLayer, ...]) -> None:
        unmoved = torch.zeros(self.config.max_model_len, 2, 1, device=self.device)
        unmoved[:, 0] = 1.0
        for index, layer in enumerate(layers):
            attention = PagedAttention(self._step, index, layer.options, unmoved)
            self._decoder.get_submodule(layer.module).octavo_attention = attention  # type: ignore[assignment]

    def num_bytes(self) -> int:
        """Bytes of all parameters (a tied head counts once)."""
        return self._num_bytes

    def forward(
        self, inputs: StepInputs, kv_caches: list[tuple[Tensor, Tensor]], backend: "Backend"
    ) -> Tensor:
        """Run a step: hidden states after the final norm of the tokens read; K and V are stored."""
        step = self._step
        step.inputs, step.kv_caches, step.backend = inputs, kv_caches, backend
        output = self._decoder(
            input_ids=inputs.input_ids[None],
            position_ids=inputs.positions[None],
            use_cache=False,
        )
        hidden = output.last_hidden_state[0]
        return hidden if inputs.readout is None else hidden[inputs.readout.tokens]

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [S, V] for hidden states [S, Hid], by the model's own head, scale and cap."""
        self._hidden_states.hidden = hidden[None]
        logits = self._model(input_ids=None, use_cache=False).logits[0].float()
        self._hidden_states.hidden = None
        return logits


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    name = next(name for name, module in model.named_modules() if module is old)
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, new)
