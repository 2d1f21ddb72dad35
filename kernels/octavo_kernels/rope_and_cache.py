"""Rotary position embedding of q and k, fused with the write of k and v into the paged cache.

With x = (x1, x2, rest), x1 and x2 the first two halves of the R rotated dims (the pairing of
GPT-NeoX and Llama), and angles of the token's position:

    x1' = x1 cos - x2 sin        x2' = x2 cos + x1 sin        rest' = rest

Su et al., "RoFormer", 2021. Computed in float32, rounded once. Token t's k and v go to
slot_mapping[t] = block * B + offset of caches [N, K, B, D]; slot -1 stores nothing (a dead row).
One program per (token, kv head): the head's k and v and its group of query heads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo_kernels.launch import Launch, next_power_of_2, offset64
from octavo_kernels.paged_kv import KvScales, check_scales, scale_args


@triton.jit
def _rotate(x1, x2, cos, sin):
    x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
    return x1 * cos - x2 * sin, x2 * cos + x1 * sin


@triton.jit
def _normed(x, weight, inverse_rms):
    """x [..., X] times its inverse rms, rounded, times the weight, rounded."""
    scaled = (x.to(tl.float32) * inverse_rms).to(x.dtype)
    return (scaled.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _stored(x, cache, scale, IS_SCALED: tl.constexpr):
    """As the cache holds it. With a scale: within +-448, what e4m3 reaches; NaN becomes 0."""
    if IS_SCALED:
        x = tl.div_rn(x.to(tl.float32), scale)
        x = tl.where(x == x, tl.clamp(x, -448.0, 448.0), 0.0)
    return x.to(cache.dtype.element_ty)


@triton.jit
def _rope_and_cache_kernel(
    q_out,  # [T, H, D] contiguous
    k_out,  # [T, K, D] contiguous; not touched unless KEEP_K
    k_cache,
    v_cache,
    q,
    k,
    v,
    cos_sin,  # [P, 2, R / 2] float32
    positions,
    slot_mapping,
    stride_q,  # between tokens; heads and dims are contiguous
    stride_k,
    stride_v,
    stride_block,  # between blocks of either cache
    k_scales,  # [K] float32
    v_scales,
    q_norm,  # [D]; not touched unless HAS_NORM
    k_norm,
    eps,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,  # R / 2
    B: tl.constexpr,
    G_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,  # of D - R; 0 if all dims rotate
    D_PAD: tl.constexpr,
    IS_SCALED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    KEEP_K: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0)
    kv_head = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    position = tl.load(positions + token)
    slot = tl.load(slot_mapping + token)

    half = tl.arange(0, HALF_PAD)
    half_mask = half < HALF
    angles = cos_sin + offset64(position, 2 * HALF) + half
    cos = tl.load(angles, mask=half_mask, other=0.0)
    sin = tl.load(angles + HALF, mask=half_mask, other=0.0)

    group = tl.arange(0, G_PAD)[:, None]
    group_mask = group < G
    head_offset = (kv_head * G + group) * D
    q_in = q + offset64(token, stride_q) + head_offset
    q_to = q_out + offset64(token, K * G * D) + head_offset
    mask = group_mask & half_mask[None, :]
    q1 = tl.load(q_in + half[None, :], mask=mask, other=0.0)
    q2 = tl.load(q_in + HALF + half[None, :], mask=mask, other=0.0)
    k_in = k + offset64(token, stride_k) + kv_head * D
    k1 = tl.load(k_in + half, mask=half_mask, other=0.0)
    k2 = tl.load(k_in + HALF + half, mask=half_mask, other=0.0)
    rest = 2 * HALF + tl.arange(0, max(REST_PAD, 1))
    rest_mask = rest < D
    q_rest_mask = group_mask & rest_mask[None, :]
    if REST_PAD > 0:
        q_rest = tl.load(q_in + rest[None, :], mask=q_rest_mask, other=0.0)
        k_rest = tl.load(k_in + rest, mask=rest_mask, other=0.0)
    if HAS_NORM:
        wide1, wide2 = q1.to(tl.float32), q2.to(tl.float32)
        q_square = tl.sum(wide1 * wide1, axis=1) + tl.sum(wide2 * wide2, axis=1)
        wide1, wide2 = k1.to(tl.float32), k2.to(tl.float32)
        k_square = tl.sum(wide1 * wide1, axis=0) + tl.sum(wide2 * wide2, axis=0)
        if REST_PAD > 0:
            wide1, wide2 = q_rest.to(tl.float32), k_rest.to(tl.float32)
            q_square += tl.sum(wide1 * wide1, axis=1)
            k_square += tl.sum(wide2 * wide2, axis=0)
        q_inverse = tl.rsqrt(q_square / D + eps)[:, None]
        k_inverse = tl.rsqrt(k_square / D + eps)
        weight1 = tl.load(q_norm + half, mask=half_mask, other=0.0)
        weight2 = tl.load(q_norm + HALF + half, mask=half_mask, other=0.0)
        q1 = _normed(q1, weight1[None, :], q_inverse)
        q2 = _normed(q2, weight2[None, :], q_inverse)
        k1 = _normed(k1, tl.load(k_norm + half, mask=half_mask, other=0.0), k_inverse)
        k2 = _normed(k2, tl.load(k_norm + HALF + half, mask=half_mask, other=0.0), k_inverse)
        if REST_PAD > 0:
            weight1 = tl.load(q_norm + rest, mask=rest_mask, other=0.0)
            q_rest = _normed(q_rest, weight1[None, :], q_inverse)
            k_rest = _normed(k_rest, tl.load(k_norm + rest, mask=rest_mask, other=0.0), k_inverse)
    q1_new, q2_new = _rotate(q1, q2, cos[None, :], sin[None, :])
    tl.store(q_to + half[None, :], q1_new.to(q1.dtype), mask=mask)
    tl.store(q_to + HALF + half[None, :], q2_new.to(q1.dtype), mask=mask)

    k_scale = 1.0
    v_scale = 1.0
    if IS_SCALED:
        k_scale = tl.load(k_scales + kv_head)
        v_scale = tl.load(v_scales + kv_head)
    # A dead row's slot is -1: its address is never formed into a store.
    is_live = slot >= 0
    cache_offset = offset64(slot // B, stride_block) + (kv_head * B + slot % B) * D
    k1_new, k2_new = _rotate(k1, k2, cos, sin)
    k1_new, k2_new = k1_new.to(k1.dtype), k2_new.to(k1.dtype)
    k_slot = k_cache + cache_offset + half
    mask = half_mask & is_live
    tl.store(k_slot, _stored(k1_new, k_cache, k_scale, IS_SCALED), mask=mask)
    tl.store(k_slot + HALF, _stored(k2_new, k_cache, k_scale, IS_SCALED), mask=mask)
    if REST_PAD > 0:
        tl.store(q_to + rest[None, :], q_rest, mask=q_rest_mask)
        k_kept = _stored(k_rest, k_cache, k_scale, IS_SCALED)
        tl.store(k_cache + cache_offset + rest, k_kept, mask=rest_mask & is_live)
    if KEEP_K:
        k_to = k_out + offset64(token, K * D) + kv_head * D
        tl.store(k_to + half, k1_new, mask=half_mask)
        tl.store(k_to + HALF + half, k2_new, mask=half_mask)
        if REST_PAD > 0:
            tl.store(k_to + rest, k_rest, mask=rest_mask)

    dim = tl.arange(0, D_PAD)
    v_mask = (dim < D) & is_live
    value = tl.load(v + offset64(token, stride_v) + kv_head * D + dim, mask=v_mask)
    value = _stored(value, v_cache, v_scale, IS_SCALED)
    tl.store(v_cache + cache_offset + dim, value, mask=v_mask)


def rope_and_cache_launch(
    q_out: Tensor,
    k_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_scales: KvScales | None = None,
    *,
    norms: tuple[Tensor, Tensor, float] | None = None,
    keep_k: bool = True,
    pdl: bool = False,
) -> Launch:
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    group_size = num_heads // num_kv_heads
    half = cos_sin.shape[2]
    rest = head_dim - 2 * half
    args = (q_out, k_out, k_cache, v_cache, q, k, v, cos_sin, positions, slot_mapping)
    return Launch(
        kernel=_rope_and_cache_kernel,
        grid=(num_tokens, num_kv_heads),
        args=(
            *(*args, q.stride(0), k.stride(0), v.stride(0), k_cache.stride(0)),
            *scale_args(kv_scales, q),
            *(norms or (q, k, 0.0)),
        ),
        constants={
            "K": num_kv_heads,
            "G": group_size,
            "D": head_dim,
            "HALF": half,
            "B": block_size,
            "G_PAD": next_power_of_2(group_size),
            "HALF_PAD": next_power_of_2(half),
            "REST_PAD": next_power_of_2(rest) if rest else 0,
            "D_PAD": next_power_of_2(head_dim),
            "IS_SCALED": kv_scales is not None,
            "HAS_NORM": norms is not None,
            "KEEP_K": keep_k,
            "PDL": pdl,
        },
        num_warps=1 if group_size * head_dim <= 1024 else 4,
        pdl=pdl,
    )


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_scales: KvScales | None = None,
) -> None:
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    assert k.shape == v.shape == (num_tokens, num_kv_heads, head_dim), (k.shape, v.shape)
    assert num_heads % num_kv_heads == 0, (num_heads, num_kv_heads)
    assert k_cache.shape == v_cache.shape, (k_cache.shape, v_cache.shape)
    assert k_cache.shape[3] == head_dim, (k_cache.shape, head_dim)
    for x in (q, k, v):
        assert x.stride()[1:] == (head_dim, 1), x.stride()
    assert k_cache.stride() == v_cache.stride(), (k_cache.stride(), v_cache.stride())
    assert k_cache.stride()[1:] == (block_size * head_dim, head_dim, 1), k_cache.stride()
    assert q.dtype == k.dtype == v.dtype
    assert k_cache.dtype == v_cache.dtype
    if kv_scales is None:
        assert k_cache.dtype == q.dtype, (k_cache.dtype, q.dtype)
    else:
        check_scales(kv_scales, num_kv_heads)
    assert cos_sin.ndim == 3, cos_sin.shape
    assert cos_sin.shape[1] == 2, cos_sin.shape
    assert 2 * cos_sin.shape[2] <= head_dim, (cos_sin.shape, head_dim)
    assert cos_sin.dtype == torch.float32, cos_sin.dtype
    assert cos_sin.is_contiguous()
    assert positions.shape == slot_mapping.shape == (num_tokens,)
    assert positions.dtype == slot_mapping.dtype == torch.int64


def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_scales: KvScales | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotated copies of q [T, H, D] and k [T, K, D]; writes k and v into the caches in place.

    cos_sin: float32 [P, 2, R / 2], cosines then sines of each position, R <= D.
    positions: int64 [T], < P. slot_mapping: int64 [T], distinct, or -1 = no store.
    k_cache, v_cache: [N, K, B, D], one dtype with q, k, v; a block's [K, B, D] is contiguous.
    kv_scales: the caches are of another dtype (e4m3) and hold k and v divided by these.
    q, k, v may be views of one fused projection: only tokens may be strided.
    """
    _check(q, k, v, cos_sin, positions, slot_mapping, k_cache, v_cache, kv_scales)
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if q.shape[0]:
        rope_and_cache_launch(
            *(q_out, k_out, q, k, v, cos_sin, positions, slot_mapping, k_cache, v_cache),
            kv_scales=kv_scales,
        ).run()
    return q_out, k_out


def rope_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_scales: KvScales | None = None,
    *,
    norms: tuple[Tensor, Tensor, float] | None = None,
    pdl: bool = False,
) -> Tensor:
    """As `rope_and_cache`, but returns q alone; `norms`: RMSNorm of each head of q and k before
    they rotate: (weight of q [D], of k [D], eps)."""
    _check(q, k, v, cos_sin, positions, slot_mapping, k_cache, v_cache, kv_scales)
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.shape[0]:
        rope_and_cache_launch(
            *(q_out, k, q, k, v, cos_sin, positions, slot_mapping, k_cache, v_cache, kv_scales),
            norms=norms,
            keep_k=False,
            pdl=pdl,
        ).run()
    return q_out


def _rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    x1, x2, rest = x.float().split((half, half, x.shape[-1] - 2 * half), dim=-1)
    rotated = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest), dim=-1)
    return rotated.to(x.dtype)


def rope_and_cache_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_scales: KvScales | None = None,
) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin[positions].unsqueeze(2).unbind(1)  # each [T, 1, R / 2]
    q, k = _rotate_reference(q, cos, sin), _rotate_reference(k, cos, sin)
    live = slot_mapping >= 0
    slots = slot_mapping[live]
    block_size = k_cache.shape[2]
    for cache, x, scale in zip((k_cache, v_cache), (k, v), kv_scales or (None, None), strict=True):
        stored = x[live]
        if scale is not None:
            stored = (stored.float() / scale[:, None]).nan_to_num(0.0).clamp(-448.0, 448.0)
        bits = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
        values = stored.to(cache.dtype)
        values = values.view(torch.uint8) if cache.dtype.itemsize == 1 else values
        bits[slots // block_size, :, slots % block_size] = values
    return q, k
