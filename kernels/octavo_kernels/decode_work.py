"""How the contexts of a decode step are cut, so that its attention fills the whole card.

Rows differ in length, so the work is a flat list: `decode_work_list` cuts the contexts into items
(row, start, end) of about total / (programs that fill the card) tokens. Its size depends on shapes
alone (a CUDA graph can hold it); surplus items say so. A row with context 0 (dead) has one empty
item. With a sliding window items cover a context's last `window` tokens: nothing before is read.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.launch import Launch, cdiv, next_power_of_2, num_multiprocessors

_PROGRAMS_PER_SM = 8
_MIN_CHUNK_TOKENS = 64
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


@triton.jit(do_not_specialize=["num_rows"])
def _work_list_kernel(
    items,
    item_offsets,
    context_lens,
    num_rows,
    max_split_items,  # at most so many more items than rows
    MIN_CHUNK: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 = none
):
    item = tl.program_id(0)
    row = tl.arange(0, ROWS_PAD)
    context = tl.load(context_lens + row, mask=row < num_rows, other=0)
    seen = context
    if WINDOW > 0:
        seen = tl.minimum(context, WINDOW)
    total = tl.sum(seen.to(tl.int64), axis=0)
    # A multiple of MIN_CHUNK: no item but a row's last ends inside a tile.
    even = (total + max_split_items - 1) // max_split_items
    chunk = ((even + MIN_CHUNK - 1) // MIN_CHUNK * MIN_CHUNK).to(tl.int32)
    chunk = tl.maximum(chunk, MIN_CHUNK)
    num_items = tl.maximum((seen + chunk - 1) // chunk, 1)
    num_items = tl.where(row < num_rows, num_items, 0)
    ends = tl.cumsum(num_items, axis=0)

    # The item's row is the number of rows whose items all come before it; only that row's lane
    # contributes to the sums below, and none does for a surplus item.
    mine = (ends > item) & (ends - num_items <= item)
    from_first = (item - (ends - num_items)) * chunk
    start = tl.sum(tl.where(mine, context - seen + from_first, 0), axis=0)
    context_len = tl.sum(tl.where(mine, context, 0), axis=0)
    tl.store(items + item * 3, tl.sum(tl.where(mine, row + 1, 0), axis=0) - 1)
    tl.store(items + item * 3 + 1, start)
    tl.store(items + item * 3 + 2, tl.minimum(start + chunk, context_len))
    if item == 0:
        tl.store(item_offsets, 0)
        tl.store(item_offsets + 1 + row, ends, mask=row < num_rows)


def work_list_launch(
    work: WorkList,
    context_lens: Tensor,
    *,
    window: int | None = None,
    min_chunk: int = _MIN_CHUNK_TOKENS,
) -> Launch:
    num_items, num_rows = work.items.shape[0], context_lens.shape[0]
    return Launch(
        kernel=_work_list_kernel,
        grid=(num_items,),
        args=(work.items, work.item_offsets, context_lens, num_rows, num_items - num_rows),
        constants={
            "MIN_CHUNK": min_chunk,
            "ROWS_PAD": max(_MIN_ROWS_PAD, next_power_of_2(num_rows)),
            "WINDOW": window or 0,
        },
        num_warps=4,
    )


def decode_work_list(
    context_lens: Tensor,
    num_kv_heads: int,
    *,
    window: int | None = None,
    num_sms: int | None = None,
    min_chunk: int = _MIN_CHUNK_TOKENS,
) -> WorkList:
    """Cuts contexts (int32 [S], on the card, never read by the host) into items.

    `num_sms` defaults to the card's. `min_chunk` is the length of the smallest item that is not
    its row's last; a multiple of the attention kernel's tile wastes least.
    """
    assert context_lens.ndim == 1, context_lens.shape
    assert context_lens.dtype == torch.int32, context_lens.dtype
    device = context_lens.device
    num_sms = num_multiprocessors(device) if num_sms is None else num_sms
    num_rows = context_lens.shape[0]
    # sum ceil(len / chunk) <= rows + total / chunk: so many items always suffice.
    num_items = num_rows + cdiv(_PROGRAMS_PER_SM * num_sms, num_kv_heads)
    work = WorkList(
        items=torch.empty((num_items, 3), dtype=torch.int32, device=device),
        item_offsets=torch.empty(num_rows + 1, dtype=torch.int32, device=device),
        tickets=torch.zeros((num_rows, num_kv_heads), dtype=torch.int32, device=device),
    )
    work_list_launch(work, context_lens, window=window, min_chunk=min_chunk).run()
    return work
