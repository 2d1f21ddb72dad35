"""What norms, gates and rope with the cache write must fulfil, on whatever device."""

from typing import Any

import torch
from torch import Tensor

from octavo_kernels.gated_mul import (
    gelu_mul,
    gelu_mul_reference,
    silu_mul,
    silu_mul_reference,
)
from octavo_kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from octavo_kernels.rope_and_cache import (
    rope_and_cache,
    rope_and_cache_reference,
    rope_and_store,
)
from tests.kernels.cases import far_apart, normal, poisoned_outputs, strided_rows
from tests.kernels.checks import EPS, assert_near


def check_rms_norm(case: dict[str, Any], device: str) -> None:
    """With weights of x's dtype, and in float32."""
    shape = (case["num_rows"], case["width"])
    x = normal(*shape, dtype=case["dtype"], device=device, seed=1) * 3
    x = strided_rows(x) if case["is_strided"] else x
    for dtype in (case["dtype"], torch.float32):
        weight = normal(case["width"], dtype=dtype, device=device, seed=2)
        with poisoned_outputs():
            out = rms_norm(x, weight, EPS)
        assert_near(out, rms_norm_reference(x, weight, EPS))


def check_add_rms_norm(case: dict[str, Any], device: str) -> None:
    shape = (case["num_rows"], case["width"])
    x = normal(*shape, dtype=case["dtype"], device=device, seed=1)
    residual = normal(*shape, dtype=case["dtype"], device=device, seed=3) * 5
    if case["is_strided"]:
        x, residual = strided_rows(x), strided_rows(residual)
    inputs = x.clone(), residual.clone()
    for dtype in (case["dtype"], torch.float32):
        weight = normal(case["width"], dtype=dtype, device=device, seed=2)
        with poisoned_outputs():
            out, total = add_rms_norm(x, residual, weight, EPS)
        expected_out, expected_total = add_rms_norm_reference(x, residual, weight, EPS)
        assert torch.equal(total, expected_total)
        assert_near(out, expected_out)
    assert torch.equal(x, inputs[0])
    assert torch.equal(residual, inputs[1])


def check_gated_mul(case: dict[str, Any], device: str) -> None:
    shape = (case["num_rows"], 2 * case["width"])
    gate_up = normal(*shape, dtype=case["dtype"], device=device, seed=4) * 4
    gate_up = strided_rows(gate_up) if case["is_strided"] else gate_up
    with poisoned_outputs():
        silu, gelu = silu_mul(gate_up), gelu_mul(gate_up)
    assert_near(silu, silu_mul_reference(gate_up))
    assert_near(gelu, gelu_mul_reference(gate_up))


def check_rope_and_cache(case: dict[str, Any], device: str) -> None:
    """As two outputs; and q alone, its heads and k's normalised first."""
    dtype, head_dim, block_size = case["dtype"], case["head_dim"], case["block_size"]
    num_kv_heads = case["num_kv_heads"]
    num_heads = num_kv_heads * case["group_size"]
    half = int(head_dim * case["rotated"]) // 2
    num_tokens, num_blocks, num_positions = 5, 4, 50
    heads = normal(
        num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, device=device, seed=5
    )
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    angle = normal(num_positions, half, dtype=torch.float32, device=device, seed=6) * 3
    cos_sin = torch.stack((angle.cos(), angle.sin()), dim=1)
    positions = torch.tensor([0, 49, 7, 8, 23], device=device)
    # Two dead rows; the last slot of all; the others in one block.
    slots = [-1, num_blocks * block_size - 1, block_size, 2 * block_size - 1, -1]
    where = (cos_sin, positions, torch.tensor(slots, device=device))
    cache = torch.full((num_blocks, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    caches = [cache.clone().to(device) for _ in range(8)]
    weights = [normal(head_dim, dtype=dtype, device=device, seed=seed) for seed in (7, 8)]
    with poisoned_outputs():
        actual = rope_and_cache(q, k, v, *where, *caches[:2])
        alone = rope_and_store(q, k, v, *where, *caches[4:6], norms=(*weights, EPS))
    expected = rope_and_cache_reference(q, k, v, *where, *caches[2:4])
    for x, y in zip(actual, expected, strict=True):
        assert_near(x, y)
    normed = [rms_norm_reference(x, w, EPS) for x, w in zip((q, k), weights, strict=True)]
    of_normed, _ = rope_and_cache_reference(*normed, v, *where, *caches[6:])
    assert_near(alone, of_normed)
    for mine, theirs in ((0, 2), (1, 3), (4, 6), (5, 7)):
        # Equal NaNs: nothing was written but the live slots.
        assert_near(caches[mine], caches[theirs], equal_nan=True)


def check_far_rows(device: str) -> None:
    """Rows times row strides beyond 32 bits."""
    x = far_apart(3, 128, dtype=torch.float16, device=device)
    x.copy_(normal(3, 128, dtype=torch.float16, device=device, seed=12))
    weight = normal(128, dtype=torch.float16, device=device, seed=13)
    assert_near(rms_norm(x, weight, EPS), rms_norm_reference(x, weight, EPS))
    assert_near(silu_mul(x), silu_mul_reference(x))
    assert_near(gelu_mul(x), gelu_mul_reference(x))
    for out, expected in zip(
        add_rms_norm(x, x, weight, EPS), add_rms_norm_reference(x, x, weight, EPS), strict=True
    ):
        assert_near(out, expected)


def check_empty_rows(device: str) -> None:
    """No token, no row: empty results of the right shape."""

    def empty(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    weight, cache = empty(64), empty(2, 1, 16, 64)
    q, kv, none = empty(0, 4, 64), empty(0, 1, 64), empty(0, dtype=torch.int64)
    cos_sin = empty(8, 2, 32, dtype=torch.float32)
    assert rms_norm(empty(0, 64), weight, EPS).shape == (0, 64)
    assert add_rms_norm(empty(0, 64), empty(0, 64), weight, EPS)[1].shape == (0, 64)
    assert silu_mul(empty(0, 64)).shape == (0, 32)
    assert rope_and_cache(q, kv, kv, cos_sin, none, none, cache, cache)[0].shape == q.shape
