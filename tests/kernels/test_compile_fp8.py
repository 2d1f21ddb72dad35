"""The kernels for 8-bit floats, compiled for sm_90 (sm_80 has none)."""

import pytest
import torch
from torch import Tensor

from octavo_kernels.decode_work import WorkList
from octavo_kernels.fp8_gemm import E4M3, fp8_gemm_launch, quantize_rows_launch
from octavo_kernels.launch import Launch
from octavo_kernels.paged_decode import paged_decode_launch
from octavo_kernels.paged_kv import KvScales
from octavo_kernels.paged_prefill import paged_prefill_launch
from octavo_kernels.rope_and_cache import rope_and_cache_launch
from tests.kernels.compiled import MAX_SHARED_BYTES, compile_launch

SLOW = pytest.mark.slow


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _check(launch: Launch) -> str:
    used = compile_launch(launch, 90)
    assert used.stack_bytes == used.local_bytes == 0, used.registers
    assert used.shared_bytes <= MAX_SHARED_BYTES[90]
    return used.ptx


@pytest.mark.parametrize(
    "num_rows", [8, pytest.param(32, marks=SLOW), pytest.param(64, marks=SLOW), 300]
)
def test_fp8_gemm(num_rows: int) -> None:
    x, weight = _meta(num_rows, 4096, dtype=E4M3), _meta(6144, 4096, dtype=E4M3)
    out = _meta(num_rows, 6144, dtype=torch.bfloat16)
    arrivals = _meta(64, dtype=torch.int32)
    ptx = _check(fp8_gemm_launch(out, x, _meta(num_rows), weight, _meta(6144), arrivals))
    assert "wgmma.mma_async" in ptx
    assert ".f32.e4m3.e4m3" in ptx
    assert "cp.async.cg.shared.global" in ptx


@SLOW
def test_sizes_that_are_no_multiple_of_a_tile() -> None:
    x, weight = _meta(8, 576, dtype=E4M3), _meta(200, 576, dtype=E4M3)
    out, arrivals = _meta(8, 200, dtype=torch.float16), _meta(64, dtype=torch.int32)
    _check(fp8_gemm_launch(out, x, _meta(8), weight, _meta(200), arrivals))


@pytest.mark.parametrize("arranged", [False, True])
def test_quantize_rows(arranged: bool) -> None:
    x = _meta(8, 14_336, dtype=torch.bfloat16)
    out = _meta(8, 14_336, dtype=E4M3)
    ptx = _check(quantize_rows_launch(out, _meta(8), x, arranged=arranged))
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert "ld.global.v4.b32" in ptx


HEADS = [(32, 8, 128), pytest.param(32, 32, 128, marks=SLOW), pytest.param(8, 1, 256, marks=SLOW)]


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
def test_attention(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    q = _meta(8, num_heads, head_dim, dtype=torch.bfloat16)
    cache = _meta(100, num_kv_heads, 16, head_dim, dtype=E4M3)
    scales = KvScales(_meta(num_kv_heads), _meta(num_kv_heads))
    table, lens = _meta(8, 128, dtype=torch.int32), _meta(8, dtype=torch.int32)
    tickets = _meta(8, num_kv_heads, dtype=torch.int32)
    work = WorkList(_meta(50, 3, dtype=torch.int32), _meta(9, dtype=torch.int32), tickets)
    partial = _meta(50, num_heads, head_dim), _meta(50, num_heads)
    attend = paged_decode_launch(q, *partial, q, cache, cache, table, work, 0.1, kv_scales=scales)
    # A query alone reads whole vectors into registers.
    read = "ld.global.v4.b32" if num_heads == num_kv_heads else "cp.async.cg.shared.global"
    assert read in _check(attend)
    launch = paged_prefill_launch(
        q, q, cache, cache, table, work.items, lens, lens, 0.1, kv_scales=scales
    )
    assert "wgmma.mma_async" in _check(launch)


def test_rope_and_cache() -> None:
    q, kv = (_meta(8, heads, 128, dtype=torch.bfloat16) for heads in (32, 8))
    cache, places = _meta(100, 8, 16, 128, dtype=E4M3), _meta(8, dtype=torch.int64)
    launch = rope_and_cache_launch(
        *(q, kv, q, kv, kv, _meta(2048, 2, 64), places, places, cache, cache),
        kv_scales=KvScales(_meta(8), _meta(8)),
    )
    assert "cvt.rn.satfinite.e4m3x2.f32" in _check(launch)
