"""What the kernels for 8-bit floats must fulfil, on whatever device."""

from typing import Any

import torch

from octavo_kernels.decode_work import decode_work_list
from octavo_kernels.e4m3_weight import arrange
from octavo_kernels.fp8_gemm import (
    E4M3,
    fp8_gemm,
    fp8_gemm_reference,
    new_arrivals,
    quantize_rows,
    quantize_rows_reference,
)
from octavo_kernels.paged_decode import paged_decode, paged_decode_reference
from octavo_kernels.paged_kv import KvScales
from octavo_kernels.paged_prefill import paged_prefill, paged_prefill_reference
from octavo_kernels.rope_and_cache import rope_and_cache, rope_and_cache_reference
from tests.kernels.cases import PagedKv, normal, paged_kv, poisoned_outputs, strided_rows
from tests.kernels.checks import assert_near

FACTORS: dict[str, Any] = {
    "num_rows": (1, 3, 17, 130),
    "out_size": (8, 128, 200),
    "in_size": (128, 300, 512),
}


def check_quantize_rows(device: str, dtype: torch.dtype) -> None:
    """Odd widths, rows of zeros, of tiny and of huge numbers, a NaN: each row for itself."""
    for width in (2, 100, 5000):
        x = normal(6, width, dtype=torch.float32, device=device, seed=50)
        x[1] = 0.0
        x[2] *= 1e-8
        x[3] *= 1e8
        x[4, width // 2] = torch.nan
        with poisoned_outputs():
            rounded, scales = quantize_rows(strided_rows(x), dtype)
        expected, expected_scales = quantize_rows_reference(x, dtype)
        others = [0, 1, 2, 3, 5]
        assert torch.equal(scales[others], expected_scales[others])
        assert torch.equal(rounded[others].float(), expected[others].float())
        assert bool(rounded[4].float().isnan().any())
        assert float(rounded[others].float().abs().max()) == 448.0


def check_arranged_rows(device: str, dtype: torch.dtype) -> None:
    """The same numbers in the order of an arranged weight's inputs, widths beyond one tile too."""
    for width in (16, 112, 5008):
        x = normal(3, width, dtype=torch.float32, device=device, seed=49)
        rounded, scales = quantize_rows(x, dtype)
        with poisoned_outputs():
            arranged, same_scales = quantize_rows(x, dtype, arranged=True)
        assert torch.equal(same_scales, scales)
        assert torch.equal(arranged.float(), arrange(rounded.float()))


def check_fp8_gemm(case: dict[str, Any], device: str, dtype: torch.dtype = E4M3) -> None:
    """With and without a split K; the counters end as they began."""
    num_rows, out_size, in_size = case["num_rows"], case["out_size"], case["in_size"]
    x = normal(num_rows, in_size, dtype=torch.float32, device=device, seed=51)
    weight = normal(out_size, in_size, dtype=torch.float32, device=device, seed=52)
    x, x_scales = quantize_rows_reference(x, dtype)
    weight, w_scales = quantize_rows_reference(weight, dtype)
    arrivals = new_arrivals(out_size, x.device)
    arguments = (x, x_scales, weight, w_scales)
    with poisoned_outputs():
        y = fp8_gemm(*arguments, arrivals, torch.float32)
    expected = fp8_gemm_reference(*arguments, torch.float32)
    # Tensor cores keep fewer bits of sums of e4m3 than float32 has.
    limit = 1e-6 if device == "cpu" else 2e-4
    assert float((y - expected).norm() / expected.norm()) < limit
    assert int(arrivals.abs().max()) == 0


def check_attention(device: str, dtype: torch.dtype, head_dim: int) -> None:
    """Decode and prefill over a cache of e4m3, each head with scales of its own."""
    num_kv_heads, group_size = 2, 3
    lengths = [1, 40, 150]
    kv, caches, scales = _e4m3_cache(lengths, head_dim, 16, device)
    shape = (num_kv_heads * group_size, head_dim)
    q = normal(3, *shape, dtype=dtype, device=device, seed=57)
    context_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    arguments = (q, *caches, kv.block_table, context_lens, head_dim**-0.5)
    work = decode_work_list(context_lens, num_kv_heads, num_sms=8, min_chunk=48)
    with poisoned_outputs():
        out = paged_decode(*arguments, kv_scales=scales, work=work)
    assert_near(out, paged_decode_reference(*arguments, kv_scales=scales))

    borders = torch.tensor([0, 1, 21, 24], dtype=torch.int32, device=device)
    q = normal(24, *shape, dtype=dtype, device=device, seed=58)
    arguments = (q, *caches, kv.block_table, borders, context_lens, head_dim**-0.5)
    with poisoned_outputs():
        out = paged_prefill(*arguments, kv_scales=scales)
    assert_near(out, paged_prefill_reference(*arguments, kv_scales=scales))


def check_lone_queries(
    device: str, dtype: torch.dtype, head_dim: int, block_size: int, window: int | None
) -> None:
    """Decode with one query head a kv head: contexts around blocks, whole and in parts."""
    lengths = [0, 1, block_size - 1, block_size, block_size + 1, 70, 150]
    first_seen = None if window is None else [length - window for length in lengths]
    kv, caches, scales = _e4m3_cache(lengths, head_dim, block_size, device, first_seen)
    q = normal(len(lengths), 2, head_dim, dtype=dtype, device=device, seed=62)
    context_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    arguments = (q, *caches, kv.block_table, context_lens, head_dim**-0.5)
    for soft_cap, min_chunk in ((None, 48), (3.0, 2**20)):
        options: dict[str, Any] = {"window": window, "soft_cap": soft_cap, "kv_scales": scales}
        work = decode_work_list(context_lens, 2, window=window, num_sms=8, min_chunk=min_chunk)
        with poisoned_outputs():
            out = paged_decode(*arguments, **options, work=work)
        assert_near(out, paged_decode_reference(*arguments, **options))
        assert not bool(out[0].any())


def _e4m3_cache(
    lengths: list[int],
    head_dim: int,
    block_size: int,
    device: str,
    first_seen: list[int] | None = None,
) -> tuple[PagedKv, list[torch.Tensor], KvScales]:
    """Two kv heads' keys and values, NaN where nobody looks."""
    kv = paged_kv(
        lengths,
        num_kv_heads=2,
        head_dim=head_dim,
        block_size=block_size,
        dtype=torch.float32,
        device=device,
        first_seen=first_seen,
    )
    scales = KvScales(*torch.tensor([[0.5, 2.0], [3.0, 0.25]], device=device))
    return kv, [cache.to(E4M3) for cache in (kv.k_cache, kv.v_cache)], scales


def check_store(device: str, cache_dtype: torch.dtype) -> None:
    """Divided, within +-448, 0 for NaN; the rest of the cache stays."""
    num_kv_heads, head_dim = 2, 64
    shape = (3, num_kv_heads, 16, head_dim)
    k, v = (
        200 * normal(4, num_kv_heads, head_dim, dtype=torch.float32, device=device, seed=seed)
        for seed in (59, 60)
    )
    v[1, 0, 3], v[1, 1, 4], k[2, 1, 60] = torch.nan, torch.inf, -1e30
    angle = normal(8, 24, dtype=torch.float32, device=device, seed=61)
    cos_sin = torch.stack((angle.cos(), angle.sin()), dim=1)  # 48 of 64 dims rotate
    positions = torch.tensor([3, 0, 7, 1], device=device)
    slots = torch.tensor([47, 33, 16, -1], device=device)
    scales = KvScales(*torch.tensor([[0.5, 2.0], [3.0, 0.25]], device=device))
    caches = [torch.ones(shape, device=device).to(cache_dtype) for _ in range(4)]
    arguments = (k, k, v, cos_sin, positions, slots)
    rope_and_cache(*arguments, *caches[:2], kv_scales=scales)
    rope_and_cache_reference(*arguments, *caches[2:], kv_scales=scales)
    for actual, expected in zip(caches[:2], caches[2:], strict=True):
        assert not bool(actual.float().isnan().any())
        assert float(actual.float().abs().max()) == 448.0
        # A rotation may be rounded to the next float32, and that to the next of 8 bits.
        torch.testing.assert_close(actual.float(), expected.float(), rtol=0.13, atol=2e-2)
        assert float((actual.float() != expected.float()).float().mean()) < 0.05
