"""The decoder of all Llama-shaped families: RMSNorm, attention with RoPE, a gated MLP.

One class for all of `families`; what differs between them is in `ModelConfig`. Q, k and v are one
matrix, gate and up another. Linear layers are a maker's, all else is the backend's, so that the
same code serves every backend. A forward pass depends on shapes and on the integers of
`StepInputs` alone: no host synchronisation, no branch on values; it can be captured in a CUDA
graph. Must not know: files, rows, sampling, requests.

Shapes: T tokens of a step (prefill chunks first, then S decode rows), Hid hidden size, H query
heads, K kv heads, D head dim, I intermediate size, V vocabulary, P positions, R rotated dims.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo_worker.attention_inputs import KvScales, StepInputs
from octavo_worker.models.config import ModelConfig
from octavo_worker.models.linear import (
    DenseLinear,
    DenseMaker,
    Linear,
    LinearMaker,
    Split,
    Weights,
)
from octavo_worker.models.mlp import GatedMlp, Mlp
from octavo_worker.models.moe import Experts, ExpertsMaker, SparseMlp
from octavo_worker.models.quant_linear import QuantLinear, quantized_among
from octavo_worker.models.rope import cos_sin_table, identity_table
from octavo_worker.slots import BadValuesError, Slot, ones

if TYPE_CHECKING:
    from octavo_worker.backends.base import Backend

EMBED_NAME = "model.embed_tokens.weight"
HEAD_NAME = "lm_head.weight"


class Layer:
    """One transformer block, the `index`-th."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        make: LinearMaker,
        make_experts: ExpertsMaker,
        make_norm: Callable[[int], Tensor],
        cos_sin: Tensor,
    ) -> None:
        """`cos_sin`: float32 [P, 2, R/2], shared by layers."""
        hidden, q_size, kv_size = config.hidden_size, config.q_size, config.kv_size
        prefix = f"model.layers.{index}"
        self.prefix = prefix
        self._offset_norms = config.offset_norms
        self.cos_sin = cos_sin
        self.options = config.attention[index]
        self.kv_scales = torch.ones(2, device=cos_sin.device)  # of all keys, of all values
        self._has_kv_scales = config.has_kv_scales
        attention = f"{prefix}.self_attn"
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv = make(attention, parts, hidden, bias=config.qkv_bias, split=Split.HEADS)
        parts = {"o_proj": hidden}
        self.o = make(attention, parts, q_size, bias=config.o_bias, split=Split.ROWS)
        self.mlp: Mlp
        if config.moe is not None and config.sparse_layers[index]:
            self.mlp = SparseMlp(config, config.moe, make, make_experts, prefix)
        else:
            self.mlp = GatedMlp(config, make, f"{prefix}.mlp", config.intermediate_size)
        self.input_norm = make_norm(hidden)
        self.q_norm = make_norm(config.head_dim) if config.qk_norm else None
        self.k_norm = make_norm(config.head_dim) if config.qk_norm else None
        self.post_attention_norm = make_norm(hidden)
        self.after_attention_norm = make_norm(hidden) if config.sandwich_norms else None
        self.after_mlp_norm = make_norm(hidden) if config.sandwich_norms else None

    def weights(self) -> Iterator[Weights]:
        """All of it but the norms."""
        yield from (self.qkv, self.o)
        yield from self.mlp.weights()

    def norms(self) -> dict[str, Tensor]:
        """The weights of its norms, by module."""
        norms = {
            "input_layernorm": self.input_norm,
            "self_attn.q_norm": self.q_norm,
            "self_attn.k_norm": self.k_norm,
            "post_self_attn_layernorm": self.after_attention_norm,
            "post_attention_layernorm": self.post_attention_norm,
            "post_mlp_layernorm": self.after_mlp_norm,
        }
        return {name: norm for name, norm in norms.items() if norm is not None}

    def slots(self) -> Iterator[tuple[str, Slot]]:
        """(name in a checkpoint; the place it's loaded to)."""
        for name, norm in self.norms().items():
            yield f"{self.prefix}.{name}.weight", norm_slot(norm, offset=self._offset_norms)
        if self._has_kv_scales:
            for name, place in zip(("k_scale", "v_scale"), self.kv_scales.split(1), strict=True):
                slot = Slot(place, take=_checked_scale, fill=ones, out_axis=None)
                yield f"{self.prefix}.self_attn.{name}", slot
        for weights in self.weights():
            yield from weights.slots()


def norm_slot(weight: Tensor, *, offset: bool) -> Slot:
    """The place of a norm's weight: random ones are 1. `offset`: what is stored lacks 1."""
    return Slot(weight, take=_plus_one if offset else None, fill=ones)


def _plus_one(stored: Tensor) -> Tensor:
    return 1 + stored.float()


def _checked_scale(stored: Tensor) -> Tensor:
    if not 0 < float(stored) < math.inf:
        raise BadValuesError(f"is {float(stored)}, which is no scale")
    return stored


def split_heads(qkv: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, H, D], k and v [T, K, D]: views of one projection's result."""
    q, k, v = qkv.split([config.q_size, config.kv_size, config.kv_size], dim=-1)
    return (
        q.unflatten(-1, (config.num_heads, config.head_dim)),
        k.unflatten(-1, (config.num_kv_heads, config.head_dim)),
        v.unflatten(-1, (config.num_kv_heads, config.head_dim)),
    )


class VocabParts(Protocol):
    """Embedding and head when several ranks share them; see `parallel.sharded.ShardedVocab`."""

    @property
    def num_rows(self) -> int: ...
    def slot(self, rows: Tensor) -> Slot: ...
    def embed(self, input_ids: Tensor, rows: Tensor) -> Tensor: ...
    def join(self, logits: Tensor) -> Tensor: ...


class Model:
    """A decoder with its parameters on one device, uninitialised until they're loaded.

    `tied`: the head is the embedding matrix itself, held once.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        *,
        tied: bool,
        make: LinearMaker | None = None,
        own_config: ModelConfig | None = None,
        vocab: VocabParts | None = None,
        make_experts: ExpertsMaker | None = None,
    ) -> None:
        """`make`: what linear layers are made of; None = plain matrices of the config's dtype.

        `own_config`, `vocab` and `make_experts`: what one of several ranks holds of all this;
        None = everything.
        """
        self.config = own_config or config
        self.device = device
        self._vocab = vocab
        make = make or DenseMaker(config.dtype, device)
        make_experts = make_experts or partial(Experts, empty=self._empty)
        tables = {
            rope: (
                identity_table(config.rope, config.max_model_len)
                if rope is None
                else cos_sin_table(rope, config.max_model_len)
            ).to(device)
            for rope in set(config.ropes)
        }
        num_ids = vocab.num_rows if vocab is not None else config.vocab_size
        self.embed_tokens = self._empty(num_ids, config.hidden_size)
        self.layers = [
            Layer(config, index, make, make_experts, self._norm, tables[rope])
            for index, rope in enumerate(config.ropes)
        ]
        self.final_norm = self._norm(config.hidden_size)
        self.lm_head = self.embed_tokens if tied else self._empty(num_ids, config.hidden_size)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.config.dtype, device=self.device)

    def _norm(self, size: int) -> Tensor:
        """In float32 if 1 is added to it: bfloat16 has too few digits beside 1."""
        dtype = torch.float32 if self.config.offset_norms else self.config.dtype
        return torch.empty(size, dtype=dtype, device=self.device)

    def slots(self) -> dict[str, Slot]:
        """Checkpoint name -> the place its values belong; together every parameter, once."""
        vocab_slot = self._vocab.slot if self._vocab is not None else Slot
        slots = {EMBED_NAME: vocab_slot(self.embed_tokens)}
        for layer in self.layers:
            slots |= dict(layer.slots())
        slots["model.norm.weight"] = norm_slot(self.final_norm, offset=self.config.offset_norms)
        if self.lm_head is not self.embed_tokens:
            slots[HEAD_NAME] = vocab_slot(self.lm_head)
        return slots

    @property
    def is_shared(self) -> bool:
        """Whether this is one rank's part."""
        return self._vocab is not None

    @property
    def quantized(self) -> list[QuantLinear]:
        """Its layers of which a part is quantised, for whoever knows what these can do."""
        return [linear for layer in self.layers for linear in quantized_among(layer.weights())]

    def finish(self) -> None:
        """All slots are filled: let the weights be brought into their final form."""
        for layer in self.layers:
            for weights in layer.weights():
                weights.finish()

    def num_bytes(self) -> int:
        """Bytes of all parameters (a tied head counts once)."""
        norms = [self.final_norm]
        num_bytes = self.embed_tokens.nbytes
        if self.lm_head is not self.embed_tokens:
            num_bytes += self.lm_head.nbytes
        for layer in self.layers:
            num_bytes += sum(weights.num_bytes() for weights in layer.weights())
            norms += layer.norms().values()
        return num_bytes + sum(norm.nbytes for norm in norms)

    def scale_kv(self) -> None:
        """From now on `forward` takes caches of 8-bit floats, with a scale a kv head.

        Scales that a checkpoint doesn't bring are 1: keys and values of models lie well within what
        e4m3 reaches.
        """
        for layer in self.layers:
            k, v = layer.kv_scales[:, None].repeat(1, self.config.num_kv_heads)
            layer.options = replace(layer.options, kv_scales=KvScales(k, v))

    def forward(
        self,
        inputs: StepInputs,
        kv_caches: list[tuple[Tensor, Tensor]],
        backend: "Backend",
    ) -> Tensor:
        """Run a step: hidden states after the final norm, [T, Hid] or of `inputs.readout` alone.

        K and V are stored. `kv_caches` holds (k_cache, v_cache), each [N, K, B, D], for every
        layer.
        """
        eps = self.config.rms_norm_eps
        residual = self._embed(inputs.input_ids)
        hidden = backend.rms_norm(residual, self.layers[0].input_norm, eps)
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.final_norm]
        for layer, kv_cache, next_norm in zip(self.layers, kv_caches, next_norms, strict=True):
            q, k, v = self._project(layer, hidden, inputs, kv_cache, backend)
            if layer is self.layers[-1] and (readout := inputs.readout) is not None:
                # No later layer asks for what the other tokens become.
                residual, q = residual[readout.tokens], q[readout.tokens]
                inputs = readout.inputs
                if not len(q):
                    return residual
            mixed = self._attend(layer, q, (k, v), inputs, kv_cache, backend)
            norms = layer.after_attention_norm, layer.post_attention_norm
            hidden, residual = self._add(mixed, layer.o, residual, norms, backend)
            norms = layer.after_mlp_norm, next_norm
            if isinstance(layer.mlp, GatedMlp):
                inner, down = layer.mlp.inner(hidden, backend), layer.mlp.down
                hidden, residual = self._add(inner, down, residual, norms, backend)
            else:
                delta = layer.mlp(hidden, inputs, backend)
                hidden, residual = self._add(delta, None, residual, norms, backend)
        return hidden

    def _add(
        self,
        x: Tensor,
        linear: Linear | None,
        residual: Tensor,
        norms: tuple[Tensor | None, Tensor],
        backend: "Backend",
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(sum), sum) of the residual stream and linear(x), None: x itself.

        `norms`: what is added is normalised with the first, if any, the sum with the second.
        May overwrite `residual`.
        """
        own_norm, next_norm = norms
        eps = self.config.rms_norm_eps
        if own_norm is None and isinstance(linear, DenseLinear) and linear.add_to(residual, x):
            return backend.rms_norm(residual, next_norm, eps), residual
        delta = x if linear is None else linear(x)
        if own_norm is not None:
            delta = backend.rms_norm(delta, own_norm, eps)
        return backend.add_rms_norm(delta, residual, next_norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [S, V] for hidden states [S, Hid], those of the rows to be sampled."""
        logits = F.linear(hidden, self.lm_head)
        logits = (logits if self._vocab is None else self._vocab.join(logits)).float()
        cap = self.config.final_soft_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _embed(self, input_ids: Tensor) -> Tensor:
        if self._vocab is None:
            hidden = F.embedding(input_ids, self.embed_tokens)
        else:
            hidden = self._vocab.embed(input_ids, self.embed_tokens)
        scale = self.config.embed_scale
        return hidden if scale is None else hidden * scale

    def _project(
        self,
        layer: Layer,
        hidden: Tensor,
        inputs: StepInputs,
        kv_cache: tuple[Tensor, Tensor],
        backend: "Backend",
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, H, D], k and v [T, K, D] of hidden [T, Hid]; k and v are stored.

        They may be views of one matrix: only their rows are dense.
        """
        config, (k_cache, v_cache) = self.config, kv_cache
        q, k, v = split_heads(layer.qkv(hidden), config)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = _norm_heads(q, layer.q_norm, config.rms_norm_eps, backend)
            k = _norm_heads(k, layer.k_norm, config.rms_norm_eps, backend)
        q, k = backend.rope_and_cache(
            *(q, k, v, layer.cos_sin, inputs.positions, inputs.slot_mapping, k_cache, v_cache),
            kv_scales=layer.options.kv_scales,
        )
        return q, k, v

    def _attend(
        self,
        layer: Layer,
        q: Tensor,
        kv: tuple[Tensor, Tensor],
        inputs: StepInputs,
        kv_cache: tuple[Tensor, Tensor],
        backend: "Backend",
    ) -> Tensor:
        """[T, H * D] of q [T, H, D]; `kv`: what was just stored."""
        (k, v), (k_cache, v_cache) = kv, kv_cache
        num_prefill = inputs.num_prefill_tokens
        parts: list[Tensor] = []
        if num_prefill > 0:
            chunks, own_kv = q[:num_prefill], (k[:num_prefill], v[:num_prefill])
            arguments = (k_cache, v_cache, inputs, layer.options)
            parts.append(backend.prefill_attention(chunks, *arguments, own_kv))
        if num_prefill < q.shape[0]:
            rows = q[num_prefill:]
            parts.append(backend.decode_attention(rows, k_cache, v_cache, inputs, layer.options))
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        return mixed.flatten(1)


def _norm_heads(x: Tensor, weight: Tensor, eps: float, backend: "Backend") -> Tensor:
    """RMSNorm over each head's D of [T, H, D]."""
    return backend.rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)
