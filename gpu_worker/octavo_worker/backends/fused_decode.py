"""Decode steps of plain decoders in six kernels a layer.

What a `decoder.Model` computes as eight to ten operations a layer is, for a few rows, six: the
products with norms, residuals and the gate folded in (`octavo_kernels.skinny_gemm`), q and k
normalised, rotated and stored by one kernel, and attention that merges its own parts. Results
round where the separate operations round. Which tiles a product takes, and where the library's
product is faster, was measured (`octavo_kernels.skinny_tiles`). Must not know: plans, sampling.

Entry points: `FusedDecode.of`, `FusedDecode.forward`, `FusedDecode.logits`.

S rows, Hid hidden size, V vocabulary.
"""

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo_kernels import step_rows
from octavo_kernels.decode_work import WorkList
from octavo_kernels.gated_mul import silu_mul
from octavo_kernels.paged_decode import paged_decode, work_of_step
from octavo_kernels.rms_norm import add_rms_norm, rms_norm
from octavo_kernels.rope_and_cache import rope_and_store
from octavo_kernels.sample import sample
from octavo_kernels.skinny_gemm import Scratch, skinny_gemm, skinny_gemm_add
from octavo_worker.attention_inputs import StepInputs
from octavo_worker.backends.cuda import kernels_scales
from octavo_worker.backends.folded_linear import FoldedLinear
from octavo_worker.models.config import Activation
from octavo_worker.models.decoder import Layer, Model, split_heads
from octavo_worker.models.linear import DenseLinear
from octavo_worker.models.mlp import GatedMlp
from octavo_worker.rows import RowTensors


class _Stream(NamedTuple):
    """The residual stream between two products, and what the next norm needs of it.

    From a product of few rows it comes as `Sum`: `scaled` and `squares` are known. Otherwise
    `delta` is still to be added (None: nothing is), and the norm is an operation of its own.
    """

    residual: Tensor
    delta: Tensor | None = None
    scaled: Tensor | None = None
    squares: Tensor | None = None


class _Norm(NamedTuple):
    """A norm's weight, and as it is folded into the product before it."""

    weight: Tensor
    folded: Tensor


class _Layer(NamedTuple):
    """A decoder layer's products; `next_norm`: of the layer after it, or the final one."""

    attention: Layer
    qkv: FoldedLinear
    o: FoldedLinear
    gate_up: FoldedLinear
    down: FoldedLinear
    mlp_norm: _Norm
    next_norm: _Norm


class FusedDecode:
    """One model's decode step. `pdl`: let each kernel start before its predecessor has ended."""

    def __init__(self, model: Model, *, pdl: bool) -> None:
        self._model = model
        self._pdl = pdl
        self._eps = model.config.rms_norm_eps
        self._head = FoldedLinear(DenseLinear(model.lm_head, None, {}))
        self._scratch = Scratch(model.device)
        self._norm_scale = _norm_scale(model)
        self._first_norm = self._norm(model.layers[0].input_norm)
        next_norms = [layer.input_norm for layer in model.layers[1:]] + [model.final_norm]
        self._layers = [
            self._layer(layer, next_norm)
            for layer, next_norm in zip(model.layers, next_norms, strict=True)
        ]

    def _layer(self, layer: Layer, next_norm: Tensor) -> _Layer:
        mlp = layer.mlp
        assert isinstance(mlp, GatedMlp)
        return _Layer(
            attention=layer,
            qkv=FoldedLinear(layer.qkv),
            o=FoldedLinear(layer.o),
            gate_up=FoldedLinear(mlp.gate_up),
            down=FoldedLinear(mlp.down),
            mlp_norm=self._norm(layer.post_attention_norm),
            next_norm=self._norm(next_norm),
        )

    def _norm(self, weight: Tensor) -> _Norm:
        scale = self._norm_scale
        return _Norm(weight, weight if scale == 1.0 else weight / scale)

    @classmethod
    def of(cls, model: Model, *, pdl: bool) -> Self | None:
        """None if the model has anything that isn't folded."""
        config = model.config
        if (
            config.offset_norms
            or config.activation is not Activation.SILU
            or config.embed_scale is not None
            or config.final_soft_cap is not None
            or model.is_shared
        ):
            return None
        is_plain = all(
            type(layer.mlp) is GatedMlp and layer.after_attention_norm is None
            for layer in model.layers
        )
        return cls(model, pdl=pdl) if is_plain else None

    def forward(self, inputs: StepInputs, kv_caches: list[tuple[Tensor, Tensor]]) -> _Stream:
        """Run a step that only decodes; what `logits` takes."""
        model = self._model
        stream = _Stream(F.embedding(inputs.input_ids, model.embed_tokens))
        # Before everything else, so that attention may read them without waiting.
        works = {
            window: work_of_step(
                *(inputs.decode_context_lens, model.config.num_heads, model.config.dtype),
                kv_caches[0][0],
                window=window,
            )
            for window in {layer.options.window for layer in model.layers}
        }
        norm = self._first_norm
        for layer, (k_cache, v_cache) in zip(self._layers, kv_caches, strict=True):
            qkv, residual = self._norm_product(stream, norm, layer.qkv)
            mixed = self._attend(layer.attention, qkv, inputs, k_cache, v_cache, works)
            stream = self._add_product(mixed, layer.o, residual, layer.mlp_norm)
            inner, residual = self._norm_product(stream, layer.mlp_norm, layer.gate_up, gated=True)
            stream = self._add_product(inner, layer.down, residual, layer.next_norm)
            norm = layer.next_norm
        return stream

    def step(
        self,
        rows: Tensor,
        held: RowTensors,
        block_size: int,
        kv_caches: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """The decode step of `rows` (int64 [S]): tokens and events int64 [2, S]."""
        own = rows_of(held)
        begun = step_rows.begin(rows, own, block_size)
        logits = self.logits(self.forward(_inputs_of(begun), kv_caches))
        tokens = sample(
            logits,
            *(begun.temperature, begun.top_p, begun.top_k, begun.min_p),
            *(begun.seed, begun.draw_positions, begun.sequence_index),
        )
        return step_rows.end(rows, tokens, begun.draw_positions, own)

    def logits(self, stream: _Stream) -> Tensor:
        """In the model's dtype [S, V]."""
        return self._norm_product(stream, self._layers[-1].next_norm, self._head)[0]

    def _attend(
        self,
        layer: Layer,
        qkv: Tensor,
        inputs: StepInputs,
        k_cache: Tensor,
        v_cache: Tensor,
        works: dict[int | None, WorkList],
    ) -> Tensor:
        options = layer.options
        q, k, v = split_heads(qkv, self._model.config)
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = (layer.q_norm, layer.k_norm, self._eps)
        q = rope_and_store(
            *(q, k, v, layer.cos_sin, inputs.positions, inputs.slot_mapping, k_cache, v_cache),
            kernels_scales(options.kv_scales),
            norms=norms,
            pdl=self._pdl,
        )
        mixed = paged_decode(
            *(q, k_cache, v_cache, inputs.decode_block_table, inputs.decode_context_lens),
            options.scale,
            window=options.window,
            soft_cap=options.soft_cap,
            kv_scales=kernels_scales(options.kv_scales),
            work=works[options.window],
            pdl=self._pdl,
        )
        return mixed.flatten(1)

    def _norm_product(
        self, stream: _Stream, norm: _Norm, linear: FoldedLinear, *, gated: bool = False
    ) -> tuple[Tensor, Tensor]:
        """linear(rms_norm(stream)), or silu(gate) * up of it; and the residual stream."""
        residual = stream.residual
        folded = linear.fold(residual.shape[0], gated=gated)
        if folded is not None and stream.scaled is not None:
            product = skinny_gemm(
                *(stream.scaled, folded.weight, self._scratch, folded.config),
                bias=linear.bias,
                squares=stream.squares,
                eps=self._eps,
                norm_scale=self._norm_scale,
                gated=gated,
                pdl=self._pdl,
            )
            return product, residual
        if stream.delta is not None:
            hidden, residual = add_rms_norm(stream.delta, residual, norm.weight, self._eps)
        else:
            hidden = rms_norm(residual, norm.weight, self._eps)
        if folded is not None:
            product = skinny_gemm(
                *(hidden, folded.weight, self._scratch, folded.config),
                bias=linear.bias,
                gated=gated,
            )
            return product, residual
        product = linear.linear(hidden)
        return (silu_mul(product) if gated else product), residual

    def _add_product(
        self, x: Tensor, linear: FoldedLinear, residual: Tensor, next_norm: _Norm
    ) -> _Stream:
        """residual + linear(x)."""
        folded = linear.fold(x.shape[0], adds=True)
        if folded is None:
            return _Stream(residual, delta=linear.linear(x))
        total, scaled, squares = skinny_gemm_add(
            *(x, folded.weight, self._scratch, folded.config, residual, next_norm.folded),
            pdl=self._pdl,
        )
        return _Stream(total, scaled=scaled, squares=squares)


def _norm_scale(model: Model) -> float:
    """What folded norm weights are divided by: in float16 the residual stream times a weight above
    1 might overflow. A power of two, so nothing is rounded."""
    if model.config.dtype != torch.float16:
        return 1.0
    norms = [model.final_norm]
    for layer in model.layers:
        norms += [layer.input_norm, layer.post_attention_norm]
    largest = float(torch.stack(norms).abs().max())
    return 2.0 ** max(0, math.ceil(math.log2(max(largest, 1.0))))


def rows_of(held: RowTensors) -> step_rows.Rows:
    """The row tensors as the step's kernels take them."""
    return step_rows.Rows(
        held.is_live,
        held.last_token,
        held.num_tokens,
        held.block_table,
        held.temperature,
        held.top_p,
        held.top_k,
        held.min_p,
        held.seed,
        held.sequence_index,
        held.stop_token_ids,
        held.min_total_tokens,
        held.max_total_tokens,
    )


def _inputs_of(begun: step_rows.Begun) -> StepInputs:
    return StepInputs.of_rows(
        begun.input_ids,
        begun.positions,
        begun.slots,
        begun.context_lens,
        begun.block_table,
        begun.block_table.shape[1],
    )
