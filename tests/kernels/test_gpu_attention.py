"""Paged attention, decode and prefill, on a card."""

from typing import Any

import pytest
import torch

from octavo_kernels.paged_decode import paged_decode, paged_decode_reference
from tests.kernels import attention_checks as checks
from tests.kernels.cases import (
    HEAD_DIMS,
    attention_factors,
    case_id,
    paged_kv,
    pairwise,
    window_factors,
)
from tests.kernels.checks import assert_near

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CASES = pairwise(attention_factors(DTYPES), count=60)
WINDOWED = pairwise(
    window_factors(DTYPES)
    | {"head_dim": HEAD_DIMS, "window": (1, 5, 16, 17, 63, 64, 65, 100, 999)},
    count=60,
)
LLAMA = {"head_dim": 128, "group_size": 4, "num_kv_heads": 8, "block_size": 16}


@pytest.mark.parametrize("min_chunk", [64, 256])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_paged_decode(case: dict[str, Any], min_chunk: int) -> None:
    checks.check_paged_decode(case, "cuda", min_chunk=min_chunk, long=3001)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_paged_prefill(case: dict[str, Any]) -> None:
    block_size = case["block_size"]
    ragged = [(0, 1), (5, 0), (0, block_size + 1), (block_size, block_size), (70, 2), (31, 45)]
    around_tiles = [(0, 127), (0, 128), (0, 129), (63, 65), (64, 64), (65, 63), (1000, 333)]
    checks.check_paged_prefill(case, "cuda", ragged + around_tiles, num_padding=200)


@pytest.mark.parametrize("case", WINDOWED, ids=case_id)
def test_windows_and_soft_caps(case: dict[str, Any]) -> None:
    checks.check_paged_decode(case, "cuda", min_chunk=64, long=3001)
    around_tiles = [(0, 127), (0, 128), (0, 129), (63, 65), (64, 64), (65, 63), (1000, 333)]
    checks.check_paged_prefill(case, "cuda", [(5, 0), (70, 2), *around_tiles])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prefill_of_long_prompts(dtype: torch.dtype) -> None:
    checks.check_paged_prefill(LLAMA | {"dtype": dtype}, "cuda", [(0, 2048), (1537, 500)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, 64, 256])
def test_decode_split_by_the_card(dtype: torch.dtype, num_rows: int) -> None:
    """The launcher's own work list: short and long rows in one batch, dead ones between."""
    lengths = [(row * 977) % 1500 if row % 7 else 0 for row in range(num_rows)]
    lengths[0] = 4099
    kv = paged_kv(lengths, num_kv_heads=2, head_dim=128, block_size=16, dtype=dtype, device="cuda")
    q = torch.randn(num_rows, 8, 128, device="cuda").to(dtype)
    context_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    arguments = (q, kv.k_cache, kv.v_cache, kv.block_table, context_lens, 0.09)
    out = paged_decode(*arguments)
    assert_near(out, paged_decode_reference(*arguments))
    # Splits are merged in a fixed order: the same bits again.
    assert torch.equal(out, paged_decode(*arguments))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_offsets_beyond_32_bits(dtype: torch.dtype) -> None:
    checks.check_far_caches(dtype, "cuda")


def test_work_list_covers_every_token_once() -> None:
    checks.check_work_list("cuda")
    checks.check_even_cuts("cuda")
    checks.check_prefill_work_list("cuda")


def test_no_queries_launch_nothing() -> None:
    checks.check_no_queries("cuda")
