"""Attention of one new token per row over its paged context, split over the whole card.

    out[s] = softmax(q[s] K^T * scale) V      over the context_lens[s] tokens of row s

Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention", 2023; the split
over the context follows Dao et al., "Flash-Decoding", 2023. The G query heads of a kv head share
its keys, so they are the rows of one dot, M = 16 or what a larger group needs; one query over a
cache of 8 bits goes without (`lone_query`).

Rows differ in length, so the work is a flat list of parts of contexts (`decode_work`); surplus
programs exit. The only item of a row writes the row's output; several leave partial results, which
the last of them to arrive merges in fixed order. A row with context 0 (dead) gets zeros. A sliding
window is a matter of the list alone.
"""

from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo_kernels.decode_work import WorkList, decode_work_list
from octavo_kernels.launch import Launch, next_power_of_2, offset64
from octavo_kernels.lone_query import attend_context
from octavo_kernels.merge_parts import merge_parts
from octavo_kernels.paged_kv import (
    LOG2_E,
    KvScales,
    attend_tile,
    attention_reference,
    check_cache,
    dot_query,
    gather_kv,
    load_kv,
    scale_args,
)

MAX_GROUP_SIZE = 128
_MIN_ROWS = 16  # of the dot: the smallest that tensor cores take


@triton.jit
def _paged_decode_kernel(
    out,  # [S, H, D]
    partial_out,  # [W, H, D] float32, normalised
    partial_lse,  # [W, H] float32, log2 of the sum of exponentials
    tickets,  # [S, K]
    q,
    k_cache,
    v_cache,
    block_table,
    items,
    item_offsets,
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
    TILE: tl.constexpr,  # tokens
    SOFT_CAP: tl.constexpr,  # 0 = none
    IS_SCALED: tl.constexpr,
    IS_ALONE: tl.constexpr,  # G = 1, without tensor cores
    IS_MASKED: tl.constexpr,  # one loop for full tiles and the last
    GROUP: tl.constexpr,  # G padded
    PDL: tl.constexpr,
):
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    # The list is a step's first result: long done.
    row = tl.load(items + item * 3)
    start = tl.load(items + item * 3 + 1)
    end = tl.load(items + item * 3 + 2)
    if row < 0:
        return

    group = tl.arange(0, ROWS)
    dim = tl.arange(0, D_PAD)
    head = kv_head * G + group
    mask = (group < G)[:, None] & (dim < D)[None, :]
    head_offset = head[:, None] * D + dim[None, :]
    target = out + offset64(row, K * G * D) + head_offset
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if start >= end:
        tl.store(target, tl.zeros([ROWS, D_PAD], q.dtype.element_ty), mask=mask)
        return
    query = tl.load(q + offset64(row, stride_q) + head_offset, mask=mask, other=0.0)
    table = block_table + offset64(row, stride_table)

    if IS_SCALED:
        scale_log2 = scale_log2 * tl.load(k_scales + kv_head)
    if IS_ALONE:
        lone = tl.sum(query.to(tl.float32), axis=0)  # its only row
        top, total, values = attend_context(
            *(lone, k_cache, v_cache, table, start, end, kv_head, stride_block, scale_log2),
            *(B, D, D_PAD, SOFT_CAP),
        )
        row_max = tl.zeros([ROWS], tl.float32) + top
        row_sum = tl.zeros([ROWS], tl.float32) + total
        acc = tl.zeros([ROWS, D_PAD], tl.float32) + values[None, :]
    else:
        if IS_SCALED:
            query = dot_query(query)
        row_max = tl.full([ROWS], float("-inf"), tl.float32)
        row_sum = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D_PAD], tl.float32)
        full_end = start
        if not IS_MASKED:
            full_end += (end - start) // TILE * TILE
            for tile in range(start, full_end, TILE):
                token = tile + tl.arange(0, TILE)
                k, v = load_kv(
                    k_cache, v_cache, table, token, end, kv_head, stride_block, B, D, D_PAD, True
                )
                row_max, row_sum, acc = attend_tile(
                    query, k, v, True, row_max, row_sum, acc, scale_log2, True, SOFT_CAP, False
                )
        # At most one tile, if full ones had their loop. A loop rather than an `if`: its loads are
        # pipelined too, and the dots keep the first loop's registers (float32 would spill).
        for tile in range(full_end, end, TILE):
            token = tile + tl.arange(0, TILE)
            k, v = load_kv(
                k_cache, v_cache, table, token, end, kv_head, stride_block, B, D, D_PAD, False
            )
            visible = (token < end)[None, :]
            row_max, row_sum, acc = attend_tile(
                query, k, v, visible, row_max, row_sum, acc, scale_log2, False, SOFT_CAP, False
            )

    result = acc / row_sum[:, None]
    if IS_SCALED:
        result = result * tl.load(v_scales + kv_head)
    first = tl.load(item_offsets + row)
    last = tl.load(item_offsets + row + 1)
    if last - first == 1:
        tl.store(target, result.to(out.dtype.element_ty), mask=mask)
        return
    tl.store(partial_out + offset64(item, K * G * D) + head_offset, result, mask=mask)
    tl.store(partial_lse + item * (K * G) + head, row_max + tl.log2(row_sum), mask=group < G)
    # All of this program's stores come before its ticket; who draws the last sees all others'.
    tl.debug_barrier()
    ticket = tl.atomic_add(tickets + row * K + kv_head, 1, sem="acq_rel", scope="gpu")
    if ticket < last - first - 1:
        return
    tl.store(tickets + row * K + kv_head, 0)
    merge_parts(
        *(out + offset64(row, K * G * D), partial_out, partial_lse, first, last, kv_head * G),
        *(K * G, G, D, D_PAD, GROUP),
    )


class _Programs(NamedTuple):
    """How attention runs on one shape of heads, as measured on an H200 at 400 to 8,192 tokens, 1 to
    256 rows.

    Block table -> key is a chain of two loads, so about half the stages buffer keys.
    """

    tile: int
    num_stages: int
    num_warps: int
    per_sm: int  # at once
    is_masked: bool = False

    @property
    def min_chunk(self) -> int:
        return max(64, self.tile)

    @classmethod
    def of(cls, dtype: torch.dtype, num_heads: int, k_cache: Tensor) -> Self:
        _, num_kv_heads, block_size, head_dim = k_cache.shape
        group_size = num_heads // num_kv_heads
        head_dim_padded = next_power_of_2(head_dim)
        num_warps = 4 if group_size <= 64 else 8
        if _is_alone(group_size, k_cache):
            # A tile is a block, and so many threads that each takes 16 bytes of its keys.
            num_warps = min(8, max(1, block_size * head_dim_padded // (16 * 32)))
            return cls(block_size, 1, num_warps, per_sm=8)
        if dtype == torch.float32:
            # Without tensor cores: products live in registers.
            return cls(16, 2, num_warps, per_sm=3)
        if head_dim_padded > 128:
            return cls(32, 5, num_warps, per_sm=3)
        if k_cache.dtype.itemsize == 1:
            return cls(64, 5, num_warps, per_sm=3)
        if group_size == 1:
            return cls(32, 7, num_warps, per_sm=4, is_masked=True)
        return cls(128, 3, num_warps, per_sm=3)


def _is_alone(group_size: int, k_cache: Tensor) -> bool:
    return group_size == 1 and k_cache.dtype.itemsize == 1


def paged_decode_launch(
    out: Tensor,
    partial_out: Tensor,
    partial_lse: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    work: WorkList,
    scale: float,
    *,
    soft_cap: float | None = None,
    kv_scales: KvScales | None = None,
    pdl: bool = False,
) -> Launch:
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = k_cache.shape[1:3]
    group_size = num_heads // num_kv_heads
    is_alone = _is_alone(group_size, k_cache)
    rows = 1 if is_alone else max(_MIN_ROWS, next_power_of_2(group_size))
    programs = _Programs.of(q.dtype, num_heads, k_cache)
    return Launch(
        kernel=_paged_decode_kernel,
        grid=(work.items.shape[0], num_kv_heads),
        args=(
            *(out, partial_out, partial_lse, work.tickets, q, k_cache, v_cache),
            *(block_table, work.items, work.item_offsets),
            *(scale * LOG2_E, q.stride(0), k_cache.stride(0), block_table.stride(0)),
            *scale_args(kv_scales, q),
        ),
        constants={
            "K": num_kv_heads,
            "G": group_size,
            "D": head_dim,
            "B": block_size,
            "D_PAD": next_power_of_2(head_dim),
            "ROWS": rows,
            "TILE": programs.tile,
            "SOFT_CAP": soft_cap or 0.0,
            "IS_SCALED": kv_scales is not None,
            "IS_ALONE": is_alone,
            "IS_MASKED": programs.is_masked,
            "GROUP": next_power_of_2(group_size),
            "PDL": pdl,
        },
        num_warps=programs.num_warps,
        num_stages=programs.num_stages,
        pdl=pdl,
    )


def work_of_step(
    context_lens: Tensor,
    num_heads: int,
    dtype: torch.dtype,
    k_cache: Tensor,
    *,
    window: int | None = None,
) -> WorkList:
    """How a step's contexts (int32 [S]) are cut for `num_heads` queries of `dtype` over caches like
    `k_cache`: one list for all layers of these heads and this window."""
    programs = _Programs.of(dtype, num_heads, k_cache)
    return decode_work_list(
        context_lens,
        k_cache.shape[1],
        per_sm=programs.per_sm,
        min_chunk=programs.min_chunk,
        window=window,
    )


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    kv_scales: KvScales | None = None,
    work: WorkList | None = None,
    pdl: bool = False,
) -> Tensor:
    """[S, H, D] in q's dtype; zeros for rows with context 0.

    q: [S, H, D], H / K <= 128. k_cache, v_cache: [N, K, B, D]. block_table: int32 [S, M], read up
    to a row's context only. context_lens: int32 [S], the new token included.
    window: keys that a query sees, itself included; soft_cap: scores become
    soft_cap * tanh(score / soft_cap). kv_scales: of caches in 8 bits. work: from
    `work_of_step` for the same window, if the caller shares one among the layers of a step.
    """
    check_cache(q, k_cache, v_cache, block_table, kv_scales)
    num_rows, num_heads, _ = q.shape
    assert num_heads // k_cache.shape[1] <= MAX_GROUP_SIZE, (q.shape, k_cache.shape)
    assert block_table.shape[0] == context_lens.shape[0] == num_rows
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not num_rows:
        return out
    if work is None:
        work = work_of_step(context_lens, num_heads, q.dtype, k_cache, window=window)
    assert work.tickets.shape == (num_rows, k_cache.shape[1]), (work.tickets.shape, k_cache.shape)
    num_items = work.items.shape[0]
    partial_out = torch.empty((num_items, *q.shape[1:]), dtype=torch.float32, device=q.device)
    partial_lse = torch.empty((num_items, num_heads), dtype=torch.float32, device=q.device)
    paged_decode_launch(
        *(out, partial_out, partial_lse, q, k_cache, v_cache, block_table, work, scale),
        soft_cap=soft_cap,
        kv_scales=kv_scales,
        pdl=pdl,
    ).run()
    return out


def paged_decode_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    kv_scales: KvScales | None = None,
) -> Tensor:
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for row, length in enumerate(context_lens.tolist()):
        if length:
            k = gather_kv(k_cache, block_table[row], length, kv_scales and kv_scales.k)
            v = gather_kv(v_cache, block_table[row], length, kv_scales and kv_scales.v)
            out[row] = attention_reference(
                q[row : row + 1], k, v, length - 1, scale, window, soft_cap
            )[0]
    return out
