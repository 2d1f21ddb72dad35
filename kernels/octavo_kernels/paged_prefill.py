"""Causal attention of prompt chunks over their paged contexts.

    out[t] = softmax(q[t] K^T * scale) V      over the tokens up to t's own position

C chunks lie one after another in q; chunk c is the last part of a context of context_lens[c]
tokens, whose keys and values (the chunk's too) are in the paged cache already. Dao et al.,
"FlashAttention-2", 2023, over the block tables of Kwon et al., "PagedAttention", 2023.

A program takes ROWS rows of one chunk and one kv head; a row is a (token, query head of the group)
pair, so keys are shared by a group whatever its size. Tiles of keys that all its tokens see need no
mask; those on the diagonal follow. With a sliding window (a query sees the last `window` keys,
itself included) the first tile starts at the first key that any row sees: none before it is read.

Chunks differ in length, so the work is a flat list: `prefill_work_list` cuts them into items on the
card. Its size depends on shapes alone (a CUDA graph can hold it); surplus programs exit. Tokens
behind the last chunk, which pad a captured step, get zeros.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.launch import Launch, compute_capability, next_power_of_2, offset64
from octavo_kernels.paged_kv import (
    LOG2_E,
    KvScales,
    attend_tile,
    attention_reference,
    check_cache,
    gather_kv,
    load_kv,
    load_whole_blocks,
    scale_args,
)

_MIN_CHUNKS_PAD = 512  # fewer sizes, fewer compilations
# The diagonal's tiles are not larger than this: of a larger one more would be computed in vain.
_DIAGONAL_KEYS = 64


@triton.jit(do_not_specialize=["num_tokens", "num_chunks"])
def _work_list_kernel(
    items,
    cu_seqlens_q,
    num_tokens,
    num_chunks,
    TOKENS: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
):
    item = tl.program_id(0)
    # The tokens behind the last chunk are one more, the num_chunks-th.
    chunk = tl.arange(0, CHUNKS_PAD)
    start = tl.load(cu_seqlens_q + chunk, mask=chunk <= num_chunks, other=num_tokens)
    end = tl.load(cu_seqlens_q + chunk + 1, mask=chunk < num_chunks, other=num_tokens)
    num_items = (end - start + TOKENS - 1) // TOKENS
    ends = tl.cumsum(num_items, axis=0)
    # Only the item's own chunk contributes to the sums below; none does for a surplus item.
    mine = (ends > item) & (ends - num_items <= item)
    # The last tokens of a chunk see the most keys: the longest programs start first.
    first = (ends - 1 - item) * TOKENS
    tl.store(items + item * 2, tl.sum(tl.where(mine, chunk + 1, 0), axis=0) - 1)
    tl.store(items + item * 2 + 1, tl.sum(tl.where(mine, first, 0), axis=0))


@triton.jit(do_not_specialize=["num_tokens", "num_chunks"])
def _paged_prefill_kernel(
    out,  # [T, H, D]
    q,
    k_cache,
    v_cache,
    block_table,
    items,
    cu_seqlens_q,
    context_lens,
    num_tokens,
    num_chunks,
    scale_log2,
    stride_q,
    stride_block,
    stride_table,
    k_scales,  # [K] float32
    v_scales,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
    D_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DIAGONAL: tl.constexpr,  # keys of a tile that not all rows see all of
    WINDOW: tl.constexpr,  # 0 = none
    SOFT_CAP: tl.constexpr,  # 0 = none
    IS_SCALED: tl.constexpr,
):
    TOKENS: tl.constexpr = ROWS // G  # rows that are left over are masked
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    chunk = tl.load(items + item * 2)
    first = tl.load(items + item * 2 + 1)
    if chunk < 0:
        return
    q_start = tl.load(cu_seqlens_q + chunk)
    q_end = num_tokens
    if chunk < num_chunks:
        q_end = tl.load(cu_seqlens_q + chunk + 1)
    q_len = q_end - q_start

    row = tl.arange(0, ROWS)
    token_in_chunk = first + row // G
    dim = tl.arange(0, D_PAD)
    is_live = (row < TOKENS * G) & (token_in_chunk < q_len)
    mask = is_live[:, None] & (dim < D)[None, :]
    head_offset = ((kv_head * G + row % G) * D)[:, None] + dim[None, :]
    token = q_start + token_in_chunk
    target = out + offset64(token, K * G * D)[:, None] + head_offset
    if chunk == num_chunks:
        tl.store(target, tl.zeros([ROWS, D_PAD], out.dtype.element_ty), mask=mask)
        return
    history = tl.load(context_lens + chunk) - q_len
    query = tl.load(q + offset64(token, stride_q)[:, None] + head_offset, mask=mask, other=0.0)
    table = block_table + offset64(chunk, stride_table)

    position = history + token_in_chunk
    if IS_SCALED:
        scale_log2 = scale_log2 * tl.load(k_scales + kv_head)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    # begin .. full_start: the window's border | full_start .. full_end: seen by all rows |
    # full_end .. end: the diagonal | before begin, from end on: seen by none
    end = history + tl.minimum(first + TOKENS, q_len)
    if WINDOW > 0:
        begin = tl.maximum(history + first + 1 - WINDOW, 0)
        full_end = begin + (history + first + 1 - begin) // TILE * TILE
        border = tl.maximum(end - WINDOW - begin, 0)
        full_start = tl.minimum(begin + (border + TILE - 1) // TILE * TILE, full_end)
        position = tl.minimum(position, end - 1)  # dead rows too see something
        for tile in range(begin, full_start, TILE):
            key = tile + tl.arange(0, TILE)
            k, v = load_kv(
                k_cache, v_cache, table, key, end, kv_head, stride_block, B, D, D_PAD, True
            )
            visible = key[None, :] > position[:, None] - WINDOW
            row_max, row_sum, acc = attend_tile(
                query, k, v, visible, row_max, row_sum, acc, scale_log2, False, SOFT_CAP, True
            )
    else:
        full_start = 0
        full_end = (history + first + 1) // TILE * TILE
    for tile in range(full_start, full_end, TILE):
        # A window's tiles start anywhere; float32's products spill over addresses by block.
        if WINDOW > 0 or query.dtype == tl.float32:
            key = tile + tl.arange(0, TILE)
            k, v = load_kv(
                k_cache, v_cache, table, key, end, kv_head, stride_block, B, D, D_PAD, True
            )
        else:
            k, v = load_whole_blocks(
                k_cache, v_cache, table, tile, kv_head, stride_block, B, D, D_PAD, TILE
            )
        row_max, row_sum, acc = attend_tile(
            query, k, v, True, row_max, row_sum, acc, scale_log2, True, SOFT_CAP, False
        )
    for tile in range(full_end, end, DIAGONAL):
        key = tile + tl.arange(0, DIAGONAL)
        k, v = load_kv(k_cache, v_cache, table, key, end, kv_head, stride_block, B, D, D_PAD, False)
        visible = (key[None, :] <= position[:, None]) & (key < end)[None, :]
        if WINDOW > 0:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        row_max, row_sum, acc = attend_tile(
            query, k, v, visible, row_max, row_sum, acc, scale_log2, False, SOFT_CAP, WINDOW > 0
        )

    result = acc / row_sum[:, None]
    if IS_SCALED:
        result = result * tl.load(v_scales + kv_head)
    tl.store(target, result.to(query.dtype), mask=mask)


class Tiles(NamedTuple):
    """What a program takes, and how it is compiled."""

    rows: int
    keys: int  # of a tile that all rows see
    num_warps: int
    num_stages: int


def choose_tiles(
    dtype: torch.dtype, head_dim_padded: int, group_size: int, capability: int
) -> Tiles:
    """As much as a card of this generation takes without spilling registers."""
    if dtype == torch.float32:  # no tensor cores: the products live in registers
        return Tiles(max(16, next_power_of_2(group_size)), 16, 4, 2)
    if head_dim_padded > 128:
        return Tiles(64, 32, 8, 2)
    if capability < 90:
        return Tiles(128, 32 if head_dim_padded > 64 else 64, 8, 3)
    return Tiles(128, 64, 8, 5)


def _tiles_of(q: Tensor, num_kv_heads: int) -> Tiles:
    """For q [T, H, D] on its device."""
    head_dim_padded, group_size = next_power_of_2(q.shape[2]), q.shape[1] // num_kv_heads
    return choose_tiles(q.dtype, head_dim_padded, group_size, compute_capability(q.device))


def prefill_work_list_launch(
    items: Tensor, cu_seqlens_q: Tensor, num_tokens: int, tokens_an_item: int
) -> Launch:
    num_chunks = cu_seqlens_q.shape[0] - 1
    return Launch(
        kernel=_work_list_kernel,
        grid=(items.shape[0],),
        args=(items, cu_seqlens_q, num_tokens, num_chunks),
        constants={
            "TOKENS": tokens_an_item,
            "CHUNKS_PAD": max(_MIN_CHUNKS_PAD, next_power_of_2(num_chunks + 1)),
        },
        num_warps=4,
    )


def prefill_work_list(
    q: Tensor, cu_seqlens_q: Tensor, num_kv_heads: int, tiles: Tiles | None = None
) -> Tensor:
    """How the chunks of q [T, H, D] are cut: int32 [W, 2], (chunk, its first token in the chunk).

    The same for every layer of a step. Tokens behind the last chunk are chunk C's, surplus items
    chunk -1's. `tiles`: as `paged_prefill_launch`'s.
    """
    tiles, group_size = tiles or _tiles_of(q, num_kv_heads), q.shape[1] // num_kv_heads
    assert group_size <= tiles.rows, (group_size, tiles)
    tokens_an_item = tiles.rows // group_size
    num_tokens, num_chunks = q.shape[0], cu_seqlens_q.shape[0] - 1
    # sum ceil(len / tokens) <= chunks + total / tokens, the tokens behind the last being one more.
    num_items = num_chunks + 1 + num_tokens // tokens_an_item
    items = torch.empty((num_items, 2), dtype=torch.int32, device=q.device)
    prefill_work_list_launch(items, cu_seqlens_q, num_tokens, tokens_an_item).run()
    return items


def paged_prefill_launch(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    items: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    kv_scales: KvScales | None = None,
    tiles: Tiles | None = None,
) -> Launch:
    """`tiles`: None = what `choose_tiles` says of q's device."""
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    group_size = q.shape[1] // num_kv_heads
    head_dim_padded = next_power_of_2(head_dim)
    tiles = tiles or _tiles_of(q, num_kv_heads)
    assert scale > 0, scale
    return Launch(
        kernel=_paged_prefill_kernel,
        grid=(items.shape[0], num_kv_heads),
        args=(
            *(out, q, k_cache, v_cache, block_table, items, cu_seqlens_q, context_lens),
            *(q.shape[0], context_lens.shape[0]),
            *(scale * LOG2_E, q.stride(0), k_cache.stride(0), block_table.stride(0)),
            *scale_args(kv_scales, q),
        ),
        constants={
            "K": num_kv_heads,
            "G": group_size,
            "D": head_dim,
            "B": block_size,
            "D_PAD": head_dim_padded,
            "ROWS": tiles.rows,
            "TILE": tiles.keys,
            "DIAGONAL": min(tiles.keys, _DIAGONAL_KEYS),
            "WINDOW": window or 0,
            "SOFT_CAP": soft_cap or 0.0,
            "IS_SCALED": kv_scales is not None,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    kv_scales: KvScales | None = None,
    work: Tensor | None = None,
) -> Tensor:
    """[T, H, D] in q's dtype; zeros for tokens behind the last chunk.

    q: [T, H, D], the chunks one after another, some perhaps empty. cu_seqlens_q: int32 [C + 1],
    their borders in q. k_cache, v_cache: [N, K, B, D]. block_table: int32 [C, M], read up to a
    chunk's context only. context_lens: int32 [C], tokens before the chunk plus the chunk's.
    window: keys that a query sees, itself included; soft_cap: scores become
    soft_cap * tanh(score / soft_cap). kv_scales: of caches in 8 bits. work: from
    `prefill_work_list`, if the caller shares one among the layers of a step.
    """
    check_cache(q, k_cache, v_cache, block_table, kv_scales)
    num_chunks = context_lens.shape[0]
    assert block_table.shape[0] == num_chunks, (block_table.shape, num_chunks)
    assert cu_seqlens_q.shape == (num_chunks + 1,), (cu_seqlens_q.shape, num_chunks)
    assert cu_seqlens_q.dtype == context_lens.dtype == torch.int32
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.shape[0]:
        if work is None:
            work = prefill_work_list(q, cu_seqlens_q, k_cache.shape[1])
        paged_prefill_launch(
            *(out, q, k_cache, v_cache, block_table, work, cu_seqlens_q, context_lens, scale),
            window=window,
            soft_cap=soft_cap,
            kv_scales=kv_scales,
        ).run()
    return out


def paged_prefill_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    kv_scales: KvScales | None = None,
) -> Tensor:
    borders = cu_seqlens_q.tolist()
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for chunk, length in enumerate(context_lens.tolist()):
        start, end = borders[chunk], borders[chunk + 1]
        k = gather_kv(k_cache, block_table[chunk], length, kv_scales and kv_scales.k)
        v = gather_kv(v_cache, block_table[chunk], length, kv_scales and kv_scales.v)
        history = length - (end - start)
        out[start:end] = attention_reference(q[start:end], k, v, history, scale, window, soft_cap)
    return out
