"""The CPU backend: plain torch, for laptops and tests. Never imports triton.

Attention gathers each row's scattered blocks into a padded batch (`gather`), then computes densely.
Slots that no query sees may hold anything, NaN too; they are overwritten in the gathered copy,
since a weight of zero would not silence a NaN.

T tokens, S rows, C chunks, H query heads, K kv heads, G = H / K, D head dim, N blocks,
B block size, L padded context.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from octavo_worker import sampling
from octavo_worker.attention_inputs import AttentionOptions, KvScales, StepInputs
from octavo_worker.backends import cpu_experts
from octavo_worker.backends.gather import Gather, bits_of, gather_decode, gather_prefill
from octavo_worker.sampling import SamplingTensors


class _Gathers(NamedTuple):
    """What the layers of one window read in one step."""

    prefill: list[Gather]
    decode: list[Gather]


class CpuBackend:
    """See `backends.base.Backend` for the operations' shapes."""

    name = "cpu"

    def __init__(self) -> None:
        self._inputs: StepInputs | None = None
        self._gathers: dict[int | None, _Gathers] = {}

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + eps)
        return (weight * y.to(weight.dtype)).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = x + residual
        return self.rms_norm(residual, weight, eps), residual

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
        cos, sin = cos_sin[positions].unbind(dim=1)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        block_size = k_cache.shape[2]
        # Tokens without a slot go to the null block, whose content is never read.
        slots = slot_mapping.clamp(min=0)
        blocks, offsets = slots // block_size, slots % block_size
        if kv_scales is None:
            k_cache[blocks, :, offsets] = k.to(k_cache.dtype)
            v_cache[blocks, :, offsets] = v.to(v_cache.dtype)
        else:
            bits_of(k_cache)[blocks, :, offsets] = _in_8_bits(k, kv_scales.k, k_cache.dtype)
            bits_of(v_cache)[blocks, :, offsets] = _in_8_bits(v, kv_scales.v, v_cache.dtype)
        return q, k

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

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
        return cpu_experts.experts(
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
        del own_kv  # The cache has them, too.
        output = torch.zeros_like(q)
        bounds = inputs.cu_seqlens_q.tolist()
        for gather in self._gathers_of(inputs, k_cache, options.window).prefill:
            tokens = slice(*bounds[int(gather.rows) :][:2])
            chunk = q[tokens].transpose(0, 1)[None]
            out = _attend(chunk, k_cache, v_cache, gather, options)
            output[tokens] = out[0].transpose(0, 1)
        return output

    def decode_attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        inputs: StepInputs,
        options: AttentionOptions,
    ) -> torch.Tensor:
        output = torch.zeros_like(q)
        for gather in self._gathers_of(inputs, k_cache, options.window).decode:
            rows = q[gather.rows].unflatten(1, (k_cache.shape[1], -1))
            out = _attend(rows, k_cache, v_cache, gather, options)
            output[gather.rows] = out.flatten(1, 2)
        return output

    def sample(self, logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
        return sampling.sample(logits, params)

    def _gathers_of(self, inputs: StepInputs, cache: torch.Tensor, window: int | None) -> _Gathers:
        if inputs is not self._inputs:
            self._inputs = inputs
            self._gathers = {}
        # A window that hides nothing in this step is none.
        longest = max(inputs.max_context_prefill, inputs.max_context_decode)
        window = None if window is None or window >= longest else window
        if window not in self._gathers:
            self._gathers[window] = _Gathers(
                gather_prefill(inputs, cache, window), gather_decode(inputs, cache, window)
            )
        return self._gathers[window]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first 2 * cos.shape[-1] dims of x [T, heads, D] by halves, in fp32."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    parts = [first * cos - second * sin, second * cos + first * sin]
    rotated = torch.cat(parts, dim=-1).to(x.dtype)
    if 2 * half == x.shape[-1]:
        return rotated
    return torch.cat([rotated, x[..., 2 * half :]], dim=-1)


def _in_8_bits(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bits (uint8) of x [T, K, D] / scale [K]: within what `dtype` reaches, NaN as 0."""
    most = torch.finfo(dtype).max
    return bits_of((x.float() / scale[:, None]).nan_to_num(0.0).clamp(-most, most).to(dtype))


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    gather: Gather,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attention of q [S', K or H, queries, D] over gathered contexts; the same shape."""
    shape = (q.shape[0], k_cache.shape[1], -1, q.shape[-1])
    k = bits_of(k_cache).flatten(0, 1).flatten(1).index_select(0, gather.index)
    v = bits_of(v_cache).flatten(0, 1).flatten(1).index_select(0, gather.index)
    k.view(-1, q.shape[-1]).index_fill_(0, gather.unused, 0.0)
    v.view(-1, q.shape[-1]).index_fill_(0, gather.unused, 0.0)
    k, v = k.view(shape), v.view(shape)
    if options.kv_scales is not None:
        k = k.view(k_cache.dtype).to(q.dtype) * options.kv_scales.k.to(q.dtype)[:, None, None]
        v = v.view(v_cache.dtype).to(q.dtype) * options.kv_scales.v.to(q.dtype)[:, None, None]
        gather = replace(gather, mask=gather.mask.to(q.dtype))
    if options.soft_cap is not None:
        return _attend_capped(q, k, v, gather.mask, options.scale, options.soft_cap)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=gather.mask, scale=options.scale, enable_gqa=True
    )


def _attend_capped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    soft_cap: float,
) -> torch.Tensor:
    """What torch's attention can't: scores within +-soft_cap. Scores in fp32."""
    grouped = q.unflatten(1, (k.shape[1], -1))  # [S', K, H / K or 1, queries, D]
    scores = grouped.float() @ k[:, :, None].transpose(-1, -2).float() * scale
    scores = torch.tanh(scores / soft_cap) * soft_cap + mask[:, :, None]
    weights = scores.softmax(dim=-1).to(v.dtype)
    return (weights @ v[:, :, None]).flatten(1, 2)
