"""How the contexts of a decode step are cut, so that its attention fills the whole card.

Rows differ in length, so the work is a flat list: `decode_work_list` cuts the contexts into items
(row, start, end). Where they can all run at once and about evenly, the items are so large; else so
small that the card's programs, which take one after another, end at about the same time. The list's
size depends on shapes alone (a CUDA graph can hold it); surplus items say so. A row with context 0
(dead) has one empty item. With a sliding window items cover a context's last `window` tokens:
nothing before is read.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.launch import Launch, cdiv, next_power_of_2, num_multiprocessors

# Items a multiprocessor, one after another: 8 ended earlier than 4, 6 or 12 (H200, 64 x 2,048).
_SMALL_PER_SM = 8
_TRIALS = 8
_MIN_ROWS_PAD = 128  # fewer sizes, fewer compilations


class WorkList(NamedTuple):
    """How the contexts of one step are cut; for every layer of one window and K kv heads.

    items: int32 [W, 3], (row, start, end) in tokens; row -1 in surplus items, start = end in the
    only item of a dead row.
    item_offsets: int32 [S + 1]: row s owns items item_offsets[s] .. item_offsets[s + 1].
    tickets: int32 [S, K], zero between launches: how many of a row's items have arrived.
    """

    items: Tensor
    item_offsets: Tensor
    tickets: Tensor


@triton.jit
def _chunk_of(total, count, MIN_CHUNK: tl.constexpr):
    """total / count, rounded up to a multiple of MIN_CHUNK, at least one: no item but a row's last
    ends inside a tile."""
    even = (total + count - 1) // count
    return tl.maximum((even + MIN_CHUNK - 1) // MIN_CHUNK, 1).to(tl.int32) * MIN_CHUNK


@triton.jit(do_not_specialize=["num_rows", "max_split_items", "at_once"])
def _work_list_kernel(
    items,
    item_offsets,
    context_lens,
    num_rows,
    max_split_items,  # at most so many more items than rows
    at_once,  # items that the card runs at the same time
    MIN_CHUNK: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 = none
    TRIALS: tl.constexpr,
):
    item = tl.program_id(0)
    row = tl.arange(0, ROWS_PAD)
    is_row = row < num_rows
    context = tl.load(context_lens + row, mask=is_row, other=0)
    seen = context
    if WINDOW > 0:
        seen = tl.minimum(context, WINDOW)
    total = tl.sum(seen.to(tl.int64), axis=0)
    chunk = _chunk_of(total, max_split_items, MIN_CHUNK)
    # A row little longer than its items would have a short one more, to be merged.
    slack = chunk // 4
    if num_rows <= at_once:
        # The smallest chunk, of a few, whose items all run at once. A chunk makes less than one
        # item a row above total / chunk: the last trial always fits.
        trial = tl.arange(0, TRIALS)
        share = tl.maximum(at_once - num_rows * trial // (TRIALS - 1), 1)
        trial_chunk = _chunk_of(total, share, MIN_CHUNK)
        parts = tl.maximum((seen[None, :] + trial_chunk[:, None] - 1) // trial_chunk[:, None], 1)
        count = tl.sum(tl.where(is_row[None, :], parts, 0), axis=1)
        one_wave = tl.min(tl.where(count <= at_once, trial_chunk, 2**31 - 1), axis=0)
        # Not if too many programs would wait for the longest.
        is_even = 4 * total >= 3 * one_wave.to(tl.int64) * at_once
        if is_even or one_wave <= chunk:
            chunk = one_wave
            slack = 0
    num_items = tl.maximum((seen - slack + chunk - 1) // chunk, 1)
    chunks = _chunk_of(seen, num_items, MIN_CHUNK)
    num_items = tl.maximum((seen + chunks - 1) // chunks, 1)
    num_items = tl.where(is_row, num_items, 0)
    ends = tl.cumsum(num_items, axis=0)

    # The item's row is the number of rows whose items all come before it; only that row's lane
    # contributes to the sums below, and none does for a surplus item.
    mine = (ends > item) & (ends - num_items <= item)
    from_first = (item - (ends - num_items)) * chunks
    start = tl.sum(tl.where(mine, context - seen + from_first, 0), axis=0)
    end = tl.sum(
        tl.where(mine, tl.minimum(context - seen + from_first + chunks, context), 0), axis=0
    )
    tl.store(items + item * 3, tl.sum(tl.where(mine, row + 1, 0), axis=0) - 1)
    tl.store(items + item * 3 + 1, start)
    tl.store(items + item * 3 + 2, end)
    if item == 0:
        tl.store(item_offsets, 0)
        tl.store(item_offsets + 1 + row, ends, mask=is_row)


def work_list_launch(
    work: WorkList,
    context_lens: Tensor,
    *,
    at_once: int,
    min_chunk: int,
    window: int | None = None,
) -> Launch:
    num_items, num_rows = work.items.shape[0], context_lens.shape[0]
    return Launch(
        kernel=_work_list_kernel,
        grid=(num_items,),
        args=(
            *(work.items, work.item_offsets, context_lens),
            *(num_rows, num_items - num_rows, at_once),
        ),
        constants={
            "MIN_CHUNK": min_chunk,
            "ROWS_PAD": max(_MIN_ROWS_PAD, next_power_of_2(num_rows)),
            "WINDOW": window or 0,
            "TRIALS": _TRIALS,
        },
        num_warps=4,
    )


def decode_work_list(
    context_lens: Tensor,
    num_kv_heads: int,
    *,
    per_sm: int = 3,
    min_chunk: int = 64,
    window: int | None = None,
    num_sms: int | None = None,
) -> WorkList:
    """Cuts contexts (int32 [S], on the card, never read by the host) into items.

    `per_sm`: attention programs that a multiprocessor runs at once. `min_chunk`: the length of the
    smallest item that is not its row's last; a multiple of the attention kernel's tile wastes
    least. `num_sms` defaults to the card's.
    """
    assert context_lens.ndim == 1, context_lens.shape
    assert context_lens.dtype == torch.int32, context_lens.dtype
    device = context_lens.device
    num_sms = num_multiprocessors(device) if num_sms is None else num_sms
    num_rows = context_lens.shape[0]
    at_once = max(1, per_sm * num_sms // num_kv_heads)
    # sum ceil(len / chunk) <= rows + total / chunk: so many items always suffice.
    num_items = num_rows + cdiv(_SMALL_PER_SM * num_sms, num_kv_heads)
    if 4 * num_rows <= at_once:
        # Any cut is even enough, and programs without an item would delay the others.
        num_items = at_once
    work = WorkList(
        items=torch.empty((num_items, 3), dtype=torch.int32, device=device),
        item_offsets=torch.empty(num_rows + 1, dtype=torch.int32, device=device),
        tickets=torch.zeros((num_rows, num_kv_heads), dtype=torch.int32, device=device),
    )
    work_list_launch(work, context_lens, at_once=at_once, min_chunk=min_chunk, window=window).run()
    return work
