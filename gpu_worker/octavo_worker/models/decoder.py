"""The decoder of all Llama-shaped families: RMSNorm, attention with RoPE, gated SiLU.

One class for Llama, Mistral, Qwen2, Qwen3 and SmolLM; what differs between them is in
`ModelConfig`. Q, k and v are one matrix, gate and up another. Linear layers are torch's, all
else is the backend's, so that the same code serves every backend. A forward pass depends on
shapes and on the integers of `StepInputs` alone: no host synchronisation, no branch on values;
it can be captured in a CUDA graph. Must not know: files, rows, sampling, requests.

Shapes: T tokens of a step (prefill chunks first, then S decode rows), Hid hidden size, H query
heads, K kv heads, D head dim, I intermediate size, V vocabulary, P positions, R rotated dims.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo_worker.models.config import ModelConfig
from octavo_worker.models.rope import cos_sin_table, identity_table

if TYPE_CHECKING:
    from octavo_worker.attention_inputs import StepInputs
    from octavo_worker.backends.base import Backend

EMBED_NAME = "model.embed_tokens.weight"
HEAD_NAME = "lm_head.weight"


@dataclass(slots=True)
class Linear:
    """y = x Wᵀ + b with weight [out, in] and bias [out] or None."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class _Allocator:
    """Makes uninitialised parameters of one dtype on one device."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device

    def tensor(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def linear(self, out_size: int, in_size: int, bias: bool) -> Linear:
        return Linear(self.tensor(out_size, in_size), self.tensor(out_size) if bias else None)


class Layer:
    """One transformer block. `cos_sin`: float32 [P, 2, R/2], shared between layers."""

    def __init__(self, config: ModelConfig, make: _Allocator, cos_sin: Tensor) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        q_size, kv_size = config.q_size, config.kv_size
        self.cos_sin = cos_sin
        self.input_norm = make.tensor(hidden)
        self.qkv = make.linear(q_size + 2 * kv_size, hidden, config.qkv_bias)
        self.q_norm = make.tensor(config.head_dim) if config.qk_norm else None
        self.k_norm = make.tensor(config.head_dim) if config.qk_norm else None
        self.o = make.linear(hidden, q_size, config.o_bias)
        self.post_attention_norm = make.tensor(hidden)
        self.gate_up = make.linear(2 * inner, hidden, config.mlp_bias)
        self.down = make.linear(hidden, inner, config.mlp_bias)

    def slots(self, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
        """(name in a checkpoint, without the layer's prefix; the place it's loaded to)."""
        q_size, kv_size, inner = config.q_size, config.kv_size, config.intermediate_size
        qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        yield "input_layernorm.weight", self.input_norm
        yield from _parts("self_attn", self.qkv, qkv)
        yield from _parts("self_attn", self.o, {"o_proj": config.hidden_size})
        if self.q_norm is not None and self.k_norm is not None:
            yield "self_attn.q_norm.weight", self.q_norm
            yield "self_attn.k_norm.weight", self.k_norm
        yield "post_attention_layernorm.weight", self.post_attention_norm
        yield from _parts("mlp", self.gate_up, {"gate_proj": inner, "up_proj": inner})
        yield from _parts("mlp", self.down, {"down_proj": config.hidden_size})


def _parts(module: str, linear: Linear, sizes: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    """The rows of a fused layer by the names of its parts, which lie in this order."""
    start = 0
    for name, size in sizes.items():
        yield f"{module}.{name}.weight", linear.weight[start : start + size]
        if linear.bias is not None:
            yield f"{module}.{name}.bias", linear.bias[start : start + size]
        start += size
    assert start == linear.weight.shape[0]


class Model:
    """A decoder with its parameters on one device, uninitialised until they're loaded.

    `tied`: the head is the embedding matrix itself, held once.
    """

    def __init__(self, config: ModelConfig, device: torch.device, *, tied: bool) -> None:
        make = _Allocator(config.dtype, device)
        self.config = config
        self.device = device
        tables = {True: cos_sin_table(config.rope, config.max_model_len).to(device)}
        if not all(config.rope_layers):
            tables[False] = identity_table(config.rope, config.max_model_len).to(device)
        self.embed_tokens = make.tensor(config.vocab_size, config.hidden_size)
        self.layers = [Layer(config, make, tables[has_rope]) for has_rope in config.rope_layers]
        self.final_norm = make.tensor(config.hidden_size)
        self.lm_head = (
            self.embed_tokens if tied else make.tensor(config.vocab_size, config.hidden_size)
        )

    def slots(self) -> dict[str, Tensor]:
        """Checkpoint name -> the place its values belong; together every parameter, once."""
        slots = {EMBED_NAME: self.embed_tokens}
        for index, layer in enumerate(self.layers):
            slots |= {f"model.layers.{index}.{k}": v for k, v in layer.slots(self.config)}
        slots["model.norm.weight"] = self.final_norm
        if self.lm_head is not self.embed_tokens:
            slots[HEAD_NAME] = self.lm_head
        return slots

    def num_bytes(self) -> int:
        """Bytes of all parameters (a tied head counts once)."""
        return sum(tensor.nbytes for tensor in self.slots().values())

    def forward(
        self,
        inputs: "StepInputs",
        kv_caches: list[tuple[Tensor, Tensor]],
        backend: "Backend",
    ) -> Tensor:
        """Run a step: hidden states [T, Hid] after the final norm; K and V are stored.

        `kv_caches` holds (k_cache, v_cache), each [N, K, B, D], for every layer.
        """
        eps = self.config.rms_norm_eps
        residual = F.embedding(inputs.input_ids, self.embed_tokens)
        hidden = backend.rms_norm(residual, self.layers[0].input_norm, eps)
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.final_norm]
        for layer, kv_cache, next_norm in zip(self.layers, kv_caches, next_norms, strict=True):
            hidden = self._attention(layer, hidden, inputs, kv_cache, backend)
            hidden, residual = backend.add_rms_norm(
                hidden, residual, layer.post_attention_norm, eps
            )
            hidden = layer.down(backend.silu_mul(layer.gate_up(hidden)))
            hidden, residual = backend.add_rms_norm(hidden, residual, next_norm, eps)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [S, V] for hidden states [S, Hid], those of the rows to be sampled."""
        return F.linear(hidden, self.lm_head).float()

    def _attention(
        self,
        layer: Layer,
        hidden: Tensor,
        inputs: "StepInputs",
        kv_cache: tuple[Tensor, Tensor],
        backend: "Backend",
    ) -> Tensor:
        """[T, Hid] -> [T, Hid]. Q, k, v are views of one matrix: only their rows are dense."""
        config, (k_cache, v_cache) = self.config, kv_cache
        q, k, v = layer.qkv(hidden).split([config.q_size, config.kv_size, config.kv_size], dim=-1)
        q = q.unflatten(-1, (config.num_heads, config.head_dim))
        k = k.unflatten(-1, (config.num_kv_heads, config.head_dim))
        v = v.unflatten(-1, (config.num_kv_heads, config.head_dim))
        if layer.q_norm is not None and layer.k_norm is not None:
            q = _norm_heads(q, layer.q_norm, config.rms_norm_eps, backend)
            k = _norm_heads(k, layer.k_norm, config.rms_norm_eps, backend)
        q, k = backend.rope_and_cache(
            q, k, v, layer.cos_sin, inputs.positions, inputs.slot_mapping, k_cache, v_cache
        )
        num_prefill = inputs.num_prefill_tokens
        parts: list[Tensor] = []
        if num_prefill > 0:
            chunks = q[:num_prefill]
            parts.append(backend.prefill_attention(chunks, k_cache, v_cache, inputs, config.scale))
        if num_prefill < q.shape[0]:
            rows = q[num_prefill:]
            parts.append(backend.decode_attention(rows, k_cache, v_cache, inputs, config.scale))
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        return layer.o(mixed.flatten(1))


def _norm_heads(x: Tensor, weight: Tensor, eps: float, backend: "Backend") -> Tensor:
    """RMSNorm over each head's D of [T, H, D]."""
    return backend.rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)
