"""The results of a context's parts as one: softmax over all of them.

    out = sum_i w_i out_i / sum_i w_i      w_i = 2^(lse_i - max lse)

Must not know: how a part was computed.
"""

import triton
import triton.language as tl

from octavo_kernels.launch import offset64


@triton.jit
def merge_parts(
    out,  # the row's [H, D]
    partial_out,  # [W, H, D] float32, normalised
    partial_lse,  # [W, H] float32, log2 of the sum of exponentials
    first,  # parts first .. last, at least one
    last,
    first_head,
    H: tl.constexpr,
    G: tl.constexpr,  # heads first_head .. first_head + G
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    GROUP: tl.constexpr,  # G padded
):
    """Write `out`; always in the same order, so that the bits are the same again."""
    group = tl.arange(0, GROUP)
    dim = tl.arange(0, D_PAD)
    head = first_head + group
    mask = (group < G)[:, None] & (dim < D)[None, :]
    place = head[:, None] * D + dim[None, :]
    top = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, D_PAD], tl.float32)
    # Few parts: a pipeline's prologue would take longer than what it hides.
    for step in tl.range(first, last, num_stages=1):
        part = first * 0 + step  # a tensor in the interpreter, too
        # Other programs' results: not from this multiprocessor's cache.
        lse = tl.load(
            partial_lse + part * H + head, mask=group < G, other=0.0, cache_modifier=".cg"
        )
        value = tl.load(
            partial_out + offset64(part, H * D) + place,
            mask=mask,
            other=0.0,
            cache_modifier=".cg",
        )
        new_top = tl.maximum(top, lse)
        decay = tl.exp2(top - new_top)
        weight = tl.exp2(lse - new_top)
        total = total * decay + weight
        acc = acc * decay[:, None] + weight[:, None] * value
        top = new_top
    tl.store(out + place, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)
