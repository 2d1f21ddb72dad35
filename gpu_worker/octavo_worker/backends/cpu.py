"""The CPU backend: plain torch, for laptops and tests. Never imports triton.

A row's blocks lie scattered, so attention first gathers them, head by head, into one padded
batch. Every layer of a step gathers the same blocks: the index of a step is made once.
Slots past a row's context may hold anything, NaN too; they are overwritten in the gathered
copy, since a weight of zero would not silence a NaN.

T tokens, S rows, C chunks, H query heads, K kv heads, G = H / K, D head dim, N blocks,
B block size, L padded context.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from octavo_worker import sampling
from octavo_worker.attention_inputs import StepInputs
from octavo_worker.sampling import SamplingTensors

# Rows of like length share a padded batch: lengths of one batch differ by at most 2 x.
_LEAST_PADDED_LEN = 64


@dataclass(frozen=True, slots=True)
class _Gather:
    """Which cache rows make up a padded batch of contexts."""

    rows: torch.Tensor  # int64 [S'], of the decode rows
    # int64 [S' * K * blocks], into the cache seen as [N * K, B * D]
    index: torch.Tensor
    unused: torch.Tensor  # int64 [n], slots past the contexts, of the S' * K * L gathered ones
    mask: torch.Tensor  # added to the scores, broadcastable to [S', heads, queries, L]


class CpuBackend:
    """See `backends.base.Backend` for the operations' shapes."""

    name = "cpu"

    def __init__(self) -> None:
        self._inputs: StepInputs | None = None
        self._decode: list[_Gather] = []
        self._prefill: list[_Gather] = []

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + eps)
        return weight * y.to(x.dtype)

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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = cos_sin[positions].unbind(dim=1)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        block_size = k_cache.shape[2]
        # Tokens without a slot go to the null block, whose content is never read.
        slots = slot_mapping.clamp(min=0)
        blocks, offsets = slots // block_size, slots % block_size
        k_cache[blocks, :, offsets] = k.to(k_cache.dtype)
        v_cache[blocks, :, offsets] = v.to(v_cache.dtype)
        return q, k

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def prefill_attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        inputs: StepInputs,
        scale: float,
    ) -> torch.Tensor:
        self._index_step(inputs, k_cache)
        outputs: list[torch.Tensor] = []
        bounds = inputs.cu_seqlens_q.tolist()
        for start, end, gather in zip(bounds, bounds[1:], self._prefill, strict=False):
            chunk = q[start:end].transpose(0, 1)[None]
            outputs.append(_attend(chunk, k_cache, v_cache, gather, scale)[0].transpose(0, 1))
        return torch.cat(outputs)

    def decode_attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        inputs: StepInputs,
        scale: float,
    ) -> torch.Tensor:
        self._index_step(inputs, k_cache)
        output = torch.zeros_like(q)
        for gather in self._decode:
            rows = q[gather.rows].unflatten(1, (k_cache.shape[1], -1))
            out = _attend(rows, k_cache, v_cache, gather, scale)
            output[gather.rows] = out.flatten(1, 2)
        return output

    def sample(self, logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
        return sampling.sample(logits, params)

    def _index_step(self, inputs: StepInputs, cache: torch.Tensor) -> None:
        if inputs is self._inputs:
            return
        self._inputs = inputs
        self._decode = _index_decode(inputs, cache)
        self._prefill = _index_prefill(inputs, cache)


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


def _attend(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, gather: _Gather, scale: float
) -> torch.Tensor:
    """Attention of q [S', K or H, queries, D] over gathered contexts; the same shape."""
    shape = (q.shape[0], k_cache.shape[1], -1, q.shape[-1])
    k = k_cache.flatten(0, 1).flatten(1).index_select(0, gather.index)
    v = v_cache.flatten(0, 1).flatten(1).index_select(0, gather.index)
    k.view(-1, q.shape[-1]).index_fill_(0, gather.unused, 0.0)
    v.view(-1, q.shape[-1]).index_fill_(0, gather.unused, 0.0)
    k, v = k.view(shape), v.view(shape)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=gather.mask, scale=scale, enable_gqa=True
    )


def _index(block_table: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Cache rows [S' * K * blocks] of the blocks in `block_table` [S', blocks], by kv head."""
    num_kv_heads = cache.shape[1]
    heads = torch.arange(num_kv_heads)
    return (block_table.long()[:, None, :] * num_kv_heads + heads[None, :, None]).flatten()


def _mask(is_seen: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """0 where `is_seen`, else -inf; made once a step, where a bool is converted in each layer."""
    return torch.zeros(is_seen.shape, dtype=cache.dtype).masked_fill_(~is_seen, -torch.inf)


def _unused(is_used: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Gathered slots, of S' * K * L, of which `is_used` [S', L] says no."""
    num_kv_heads = cache.shape[1]
    is_unused = ~is_used[:, None, :].expand(-1, num_kv_heads, -1)
    return is_unused.flatten().nonzero().flatten()


def _index_decode(inputs: StepInputs, cache: torch.Tensor) -> list[_Gather]:
    block_size = cache.shape[2]
    batches: dict[int, list[int]] = {}
    lens: list[int] = inputs.decode_context_lens.tolist()
    for row, length in enumerate(lens):
        if length > 0:
            batches.setdefault(max(length, _LEAST_PADDED_LEN).bit_length(), []).append(row)
    gathers: list[_Gather] = []
    for batch in batches.values():
        rows = torch.tensor(batch)
        num_blocks = -(-max(lens[row] for row in batch) // block_size)
        context_lens = inputs.decode_context_lens[rows]
        columns = torch.arange(num_blocks * block_size)
        is_used = columns[None, :] < context_lens[:, None]
        gathers.append(
            _Gather(
                rows=rows,
                index=_index(inputs.decode_block_table[rows, :num_blocks], cache),
                unused=_unused(is_used, cache),
                mask=_mask(is_used[:, None, None, :], cache),
            )
        )
    return gathers


def _index_prefill(inputs: StepInputs, cache: torch.Tensor) -> list[_Gather]:
    block_size = cache.shape[2]
    bounds: list[int] = inputs.cu_seqlens_q.tolist()
    lens: list[int] = inputs.prefill_context_lens.tolist()
    gathers: list[_Gather] = []
    for chunk, length in enumerate(lens):
        num_tokens = bounds[chunk + 1] - bounds[chunk]
        num_blocks = -(-length // block_size)
        columns = torch.arange(num_blocks * block_size)
        queries = torch.arange(length - num_tokens, length)
        is_seen = columns[None, :] <= queries[:, None]
        gathers.append(
            _Gather(
                rows=torch.tensor([chunk]),
                index=_index(inputs.prefill_block_table[chunk : chunk + 1, :num_blocks], cache),
                unused=_unused((columns < length)[None], cache),
                mask=_mask(is_seen[None, None], cache),
            )
        )
    return gathers
