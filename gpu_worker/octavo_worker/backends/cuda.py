"""The CUDA backend: the operations of a step as Triton kernels.

It only maps the step's inputs to the kernels' arguments; shapes, dtypes and numerics are the
kernels' matter. Must not know: plans, models. Entry point: `CudaBackend`.
"""

from enum import Enum, auto

import torch

from octavo_kernels import (
    decode_work,
    gated_mul,
    moe,
    paged_decode,
    paged_kv,
    paged_prefill,
    rms_norm,
    rope_and_cache,
    sample,
)
from octavo_worker.attention_inputs import AttentionOptions, KvScales, StepInputs
from octavo_worker.backends import cudnn_prefill
from octavo_worker.sampling import SamplingTensors


class PrefillWay(Enum):
    """What attends to prompt chunks; a step or layer that cuDNN doesn't cover is the kernel's."""

    KERNEL = auto()
    # Of steps in which no chunk has tokens before it: over the step's own keys and values.
    CUDNN_FRESH = auto()
    # Of the others, too, over the paged cache.
    CUDNN_PAGED = auto()


# Measured by `python -m tests.bench.prefill_attention`. The others need nvidia-cudnn-frontend.
PREFILL_WAY = PrefillWay.KERNEL


class CudaBackend:
    """See `backends.base.Backend` for the operations' shapes. Launches on the current stream."""

    name = "cuda"

    def __init__(self, prefill_way: PrefillWay = PREFILL_WAY) -> None:
        self._prefill_way = prefill_way
        # Of the thread that computes; made at its first use.
        self._cudnn: cudnn_prefill.CudnnPrefill | None = None
        self._inputs: StepInputs | None = None
        self._work: dict[tuple[int | None, int, int], decode_work.WorkList] = {}
        self._prefill_work: torch.Tensor | None = None

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rms_norm.add_rms_norm(x, residual, weight, eps)

    def rope_and_cache(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        kv_scales: KvScales | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rope_and_cache.rope_and_cache(
            *(q, k, v, cos_sin, positions, slot_mapping, k_cache, v_cache),
            kv_scales=kernels_scales(kv_scales),
        )

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return gated_mul.silu_mul(gate_up)

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return gated_mul.gelu_mul(gate_up)

    def experts(
        self,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        top_k: int,
        renormalise: bool,
    ) -> torch.Tensor:
        return moe.moe(
            *(x, router_logits, gate_up, down, slot_mapping),
            top_k=top_k,
            renormalise=renormalise,
        )

    def prefill_attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        inputs: StepInputs,
        options: AttentionOptions,
        own_kv: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        if self._prefill_way is not PrefillWay.KERNEL:
            cudnn = self._cudnn_for(q, k_cache, inputs, options)
            if cudnn is not None and inputs.is_fresh and own_kv is not None:
                return cudnn.attend_fresh(q, *own_kv, inputs, options)
            if cudnn is not None and self._prefill_way is PrefillWay.CUDNN_PAGED:
                return cudnn.attend_paged(q, k_cache, v_cache, inputs, options)
        return paged_prefill.paged_prefill(
            q,
            k_cache,
            v_cache,
            inputs.prefill_block_table,
            inputs.cu_seqlens_q,
            inputs.prefill_context_lens,
            options.scale,
            window=options.window,
            soft_cap=options.soft_cap,
            kv_scales=kernels_scales(options.kv_scales),
            work=self._prefill_work_list(inputs, q, k_cache.shape[1]),
        )

    def _cudnn_for(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        inputs: StepInputs,
        options: AttentionOptions,
    ) -> cudnn_prefill.CudnnPrefill | None:
        """None: the kernel has to. It alone gives zeros for what pads a captured step."""
        if torch.cuda.is_current_stream_capturing():
            return None
        if not cudnn_prefill.covers(q, k_cache, inputs, options):
            return None
        if self._cudnn is None:
            self._cudnn = cudnn_prefill.CudnnPrefill()
        return self._cudnn

    def decode_attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        inputs: StepInputs,
        options: AttentionOptions,
    ) -> torch.Tensor:
        return paged_decode.paged_decode(
            q,
            k_cache,
            v_cache,
            inputs.decode_block_table,
            inputs.decode_context_lens,
            options.scale,
            window=options.window,
            soft_cap=options.soft_cap,
            kv_scales=kernels_scales(options.kv_scales),
            work=self._work_list(inputs, q, k_cache, options.window),
        )

    def sample(self, logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
        tokens = sample.sample(
            logits,
            params.temperature,
            params.top_p,
            params.top_k,
            params.min_p,
            params.seed,
            params.position,
            params.sequence_index,
        )
        # A bad row's -1 becomes an id that exists: the row fails by its logits, but plans already
        # sent may still look its last token up, and an id out of range kills the whole device.
        return tokens.clamp_(min=0)

    def _work_list(
        self, inputs: StepInputs, q: torch.Tensor, k_cache: torch.Tensor, window: int | None
    ) -> decode_work.WorkList:
        """How the step's contexts are cut: made once a step for all layers of a kind."""
        self._begin(inputs)
        num_heads = q.shape[1]
        kind = (window, num_heads, k_cache.shape[1])
        if kind not in self._work:
            self._work[kind] = paged_decode.work_of_step(
                inputs.decode_context_lens, num_heads, q.dtype, k_cache, window=window
            )
        return self._work[kind]

    def _prefill_work_list(
        self, inputs: StepInputs, q: torch.Tensor, num_kv_heads: int
    ) -> torch.Tensor:
        """How the step's chunks are cut: made once a step for all layers."""
        self._begin(inputs)
        if self._prefill_work is None:
            borders = inputs.cu_seqlens_q
            self._prefill_work = paged_prefill.prefill_work_list(q, borders, num_kv_heads)
        return self._prefill_work

    def _begin(self, inputs: StepInputs) -> None:
        """Forget what belongs to another step."""
        if inputs is not self._inputs:
            self._inputs = inputs
            self._work, self._prefill_work = {}, None


def kernels_scales(scales: KvScales | None) -> paged_kv.KvScales | None:
    return None if scales is None else paged_kv.KvScales(*scales)
