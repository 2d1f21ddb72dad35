"""One query's attention over paged keys and values, without tensor cores.

These would use one of 16 rows, and would take values of 8 bits in an order in which they don't lie.
Here every place of a block is a lane with a softmax of its own: values are used by the threads that
loaded them, and no tile waits for another's maximum. The lanes are joined at the end.
"""

import triton
import triton.language as tl

from octavo_kernels.launch import offset64
from octavo_kernels.paged_kv import LOG2_E, bounded

_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def attend_context(
    q,  # [D_PAD] float32
    k_cache,  # [N, K, B, D]
    v_cache,
    table,  # the row's block ids
    start,
    end,
    kv_head,
    stride_block,
    scale_log2,  # above 0
    B: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    SOFT_CAP: tl.constexpr,  # 0 = none
):
    """(max in units of log2, sum of exponentials, sum of values [D_PAD] weighted by them).

    Over the tokens [start, end), at least one: no others are loaded.
    """
    lane_max = tl.full([B], float("-inf"), tl.float32)
    lane_sum = tl.zeros([B], tl.float32)
    lanes = tl.zeros([B, D_PAD], tl.float32)
    dim, in_block = tl.arange(0, D_PAD), tl.arange(0, B)
    place = in_block[:, None] * D + dim[None, :]
    # A tile is a block: its id is one number, known a tile ahead.
    first = start // B * B
    block = tl.load(table + first // B)
    for tile in range(first, end, B):
        offset = offset64(block, stride_block) + kv_head * B * D + place
        visible = (tile + in_block >= start) & (tile + in_block < end)
        is_loaded = visible[:, None] & (dim < D)[None, :]
        k = tl.load(k_cache + offset, mask=is_loaded, other=0.0)
        v = tl.load(v_cache + offset, mask=is_loaded, other=0.0)
        block = tl.load(table + (tile + B) // B, mask=tile + B < end, other=0)
        lane_max, lane_sum, lanes = _attend_block(
            q, k, v, visible, lane_max, lane_sum, lanes, scale_log2, SOFT_CAP
        )
    top = tl.max(lane_max, axis=0)
    weight = tl.exp2(lane_max - top)
    return top, tl.sum(lane_sum * weight, axis=0), tl.sum(lanes * weight[:, None], axis=0)


@triton.jit
def _attend_block(
    q,
    k,  # [B, D_PAD]
    v,
    visible,  # [B]
    lane_max,  # [B] float32
    lane_sum,
    lanes,  # [B, D_PAD] float32
    scale_log2,
    SOFT_CAP: tl.constexpr,
):
    """(lane_max, lane_sum, lanes) after one more block."""
    score = tl.sum(k.to(tl.float32) * q[None, :], axis=1)
    if SOFT_CAP > 0:
        score = bounded(score, scale_log2, SOFT_CAP)
        scale_log2 = SOFT_CAP * _LOG2_E
    score = tl.where(visible, score * scale_log2, float("-inf"))
    new_max = tl.maximum(lane_max, score)
    # A lane that saw nothing yet: its weights are exp(-inf - 0) = 0, not exp(-inf + inf).
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weight = tl.exp2(score - base)
    decay = tl.exp2(lane_max - base)
    lane_sum = lane_sum * decay + weight
    lanes = lanes * decay[:, None] + weight[:, None] * v.to(tl.float32)
    return new_max, lane_sum, lanes
