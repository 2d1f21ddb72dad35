"""What both attention kernels share: reading paged KV, and one tile of online softmax.

    s = q k^T * scale      m' = max(m, s)      p = exp(s - m')
    l' = l exp(m - m') + sum(p)                acc' = acc exp(m - m') + p v

With a soft cap c (Gemma Team, "Gemma 2", 2024) the score s becomes c tanh(s / c) first.

Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al.,
"FlashAttention", 2022. Exponentials are base 2: `scale_log2` is the softmax scale times log2(e).

Slots outside what a row may see hold anything, NaN included. They are never loaded, or their
scores are replaced by a select: a multiplication by zero would let a NaN through.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.launch import offset64

LOG2_E = math.log2(math.e)
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def load_kv(
    k_cache,  # [N, K, B, D]
    v_cache,
    table,  # the row's block ids
    token,  # [TILE] positions in the context
    end,  # tokens at or after this position are not loaded
    kv_head,
    stride_block,
    B: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    IS_FULL: tl.constexpr,  # the whole tile lies before `end`
):
    """Keys and values of one tile, both [TILE, D_PAD]; zeros where nothing was loaded."""
    if IS_FULL:
        block = tl.load(table + token // B)
    else:
        block = tl.load(table + token // B, mask=token < end, other=0)
    row = offset64(block, stride_block) + (kv_head * B + token % B) * D
    dim = tl.arange(0, D_PAD)
    offset = row[:, None] + dim[None, :]
    if IS_FULL and D == D_PAD:
        k = tl.load(k_cache + offset)
        v = tl.load(v_cache + offset)
    else:
        mask = (token < end)[:, None] & (dim < D)[None, :]
        k = tl.load(k_cache + offset, mask=mask, other=0.0)
        v = tl.load(v_cache + offset, mask=mask, other=0.0)
    return k, v


@triton.jit
def load_whole_blocks(
    k_cache,  # [N, K, B, D]
    v_cache,
    table,  # the row's block ids
    first,  # position of the tile's first token, a multiple of TILE
    kv_head,
    stride_block,
    B: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Keys and values of TILE tokens that are all stored: an id is read once a block, not once a
    token, and addresses are computed from it."""
    PART: tl.constexpr = min(B, TILE)  # tokens of the tile that lie in one block
    part = first + tl.arange(0, TILE // PART) * PART
    start = offset64(tl.load(table + part // B), stride_block) + kv_head * B * D
    if B > TILE:
        start += part % B * D
    dim = tl.arange(0, D_PAD)
    in_block = (tl.arange(0, PART) * D)[:, None] + dim[None, :]
    offset = start[:, None, None] + in_block[None, :, :]
    if D == D_PAD:
        k = tl.load(k_cache + offset)
        v = tl.load(v_cache + offset)
    else:
        mask = (dim < D)[None, None, :]
        k = tl.load(k_cache + offset, mask=mask, other=0.0)
        v = tl.load(v_cache + offset, mask=mask, other=0.0)
    return tl.reshape(k, (TILE, D_PAD)), tl.reshape(v, (TILE, D_PAD))


@triton.jit
def dot_query(query):
    """`query` for dots with a cache of 8-bit floats: these become float16 by one instruction for
    two, bfloat16 by five. Both hold them exactly."""
    if query.dtype == tl.bfloat16:
        wide = query.to(tl.float32)
        return tl.clamp(wide, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    else:
        return query


@triton.jit
def bounded(score, scale_log2, SOFT_CAP: tl.constexpr):
    """tanh(score * scale / SOFT_CAP): scores that SOFT_CAP scales."""
    # tanh(x) = 1 - 2 / (exp(2x) + 1): right at both ends, where exp is 0 or infinite.
    return 1.0 - 2.0 / (tl.exp2(score * (scale_log2 * (2.0 / SOFT_CAP))) + 1.0)


@triton.jit
def attend_tile(
    q,  # [ROWS, D_PAD]
    k,  # [TILE, D_PAD]
    v,
    visible,  # [ROWS, TILE] or broadcastable; ignored if IS_FULL
    row_max,  # [ROWS] float32, in units of log2
    row_sum,
    acc,  # [ROWS, D_PAD] float32
    scale_log2,  # above 0
    IS_FULL: tl.constexpr,
    SOFT_CAP: tl.constexpr,  # 0 = none
    MAY_START_HIDDEN: tl.constexpr,
):
    """(row_max, row_sum, acc) after one more tile.

    Unless MAY_START_HIDDEN the first tile must show every row at least one token: then no maximum
    is ever -inf again and no difference of maxima is NaN.
    """
    # What is stored in 8 bits is exact in the query's dtype; sums are float32's.
    k, v = k.to(q.dtype), v.to(q.dtype)
    # "ieee": for float32 the default would be TF32; other dtypes don't mind.
    score = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SOFT_CAP > 0:
        score = bounded(score, scale_log2, SOFT_CAP)
        scale_log2 = SOFT_CAP * _LOG2_E
    if not IS_FULL:
        score = tl.where(visible, score, float("-inf"))
    # Scaled after the maximum was taken: scale and difference below are one multiply-add.
    new_max = tl.maximum(row_max, tl.max(score, axis=1) * scale_log2)
    base = new_max
    if MAY_START_HIDDEN:
        # A row that saw nothing yet: its weights are exp(-inf - 0) = 0, not exp(-inf + inf).
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weight = tl.exp2(score * scale_log2 - base[:, None])
    decay = tl.exp2(row_max - base)
    row_sum = row_sum * decay + tl.sum(weight, axis=1)
    acc = tl.dot(weight.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return new_max, row_sum, acc


class KvScales(NamedTuple):
    """What keys and values were divided by before they were stored: float32 [K] each."""

    k: Tensor
    v: Tensor


def scale_args(scales: KvScales | None, unused: Tensor) -> tuple[Tensor, Tensor]:
    """A kernel's pointers: without scales it reads neither."""
    return (unused, unused) if scales is None else (scales.k, scales.v)


def check_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, scales: KvScales | None
) -> None:
    """q [T, H, D] with contiguous heads; caches [N, K, B, D], each block contiguous, of q's dtype
    or, with scales, of another."""
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    assert q.ndim == 3, q.shape
    assert q.shape[2] == head_dim, (q.shape, k_cache.shape)
    assert q.shape[1] % num_kv_heads == 0, (q.shape, k_cache.shape)
    assert q.stride()[1:] == (head_dim, 1), q.stride()
    assert k_cache.shape == v_cache.shape, (k_cache.shape, v_cache.shape)
    assert k_cache.stride() == v_cache.stride(), (k_cache.stride(), v_cache.stride())
    assert k_cache.stride()[1:] == (block_size * head_dim, head_dim, 1), k_cache.stride()
    assert k_cache.dtype == v_cache.dtype, (k_cache.dtype, v_cache.dtype)
    if scales is None:
        assert q.dtype == k_cache.dtype, (q.dtype, k_cache.dtype)
    else:
        check_scales(scales, num_kv_heads)
    assert block_table.ndim == 2, block_table.shape
    assert block_table.dtype == torch.int32, block_table.dtype
    assert block_table.stride(1) == 1, block_table.stride()


def check_scales(scales: KvScales, num_kv_heads: int) -> None:
    for scale in scales:
        assert scale.shape == (num_kv_heads,), (scale.shape, num_kv_heads)
        assert scale.dtype == torch.float32, scale.dtype


def gather_kv(
    cache: Tensor, block_table_row: Tensor, num_tokens: int, scale: Tensor | None = None
) -> Tensor:
    """The first `num_tokens` tokens of one row, float32 [num_tokens, K, D] (for references)."""
    block_size = cache.shape[2]
    blocks = block_table_row[: -(-num_tokens // block_size)].long()
    tokens = cache[blocks].transpose(1, 2).reshape(-1, cache.shape[1], cache.shape[3])
    values = tokens[:num_tokens].float()
    return values if scale is None else values * scale[:, None]


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_position: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Causal attention in float32: q [L, H, D] at positions first_position.., k and v [P, K, D]."""
    first_key = 0 if window is None else max(first_position - window + 1, 0)
    k, v = k[first_key:], v[first_key:]
    group_size = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group_size, dim=1), v.repeat_interleave(group_size, dim=1)
    score = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    query_position = first_position + torch.arange(q.shape[0], device=q.device)
    key_position = first_key + torch.arange(k.shape[0], device=q.device)
    hidden = key_position[None, :] > query_position[:, None]
    if window is not None:
        hidden |= key_position[None, :] <= query_position[:, None] - window
    if soft_cap is not None:
        score = soft_cap * torch.tanh(score / soft_cap)
    weight = score.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weight, v).to(q.dtype)
