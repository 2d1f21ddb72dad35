"""Paged attention, decode and prefill, in Triton's interpreter."""

from typing import Any

import pytest
import torch

from tests.kernels import attention_checks as checks
from tests.kernels.cases import attention_factors, case_id, pairwise, window_factors

pytestmark = pytest.mark.interpreter

# Not bfloat16: the interpreter computes it silently wrong.
CASES = pairwise(attention_factors((torch.float16, torch.float32)), count=24)
WINDOWED = pairwise(window_factors((torch.float16,)) | {"num_kv_heads": (1,)}, count=8)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_paged_decode(case: dict[str, Any]) -> None:
    checks.check_paged_decode(case, "cpu", min_chunk=48, long=150)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_paged_prefill(case: dict[str, Any]) -> None:
    block_size = case["block_size"]
    ragged = [(0, 1), (5, 0), (0, block_size + 1), (block_size, block_size), (70, 2), (31, 45)]
    checks.check_paged_prefill(case, "cpu", ragged, num_padding=77)


@pytest.mark.parametrize("case", WINDOWED, ids=case_id)
def test_windows_and_soft_caps(case: dict[str, Any]) -> None:
    """Keys before a window are NaN: they are never read, or never multiplied."""
    checks.check_paged_decode(case, "cpu", min_chunk=48, long=150)
    checks.check_paged_prefill(case, "cpu", [(5, 0), (0, 17), (70, 2), (31, 45)])


@pytest.mark.parametrize("group_size", [24, 71])
def test_many_query_heads_on_a_kv_head(group_size: int) -> None:
    case = {
        "head_dim": 64,
        "group_size": group_size,
        "num_kv_heads": 1,
        "block_size": 16,
        "dtype": torch.float32,
    }
    checks.check_paged_decode(case, "cpu", min_chunk=48, long=100)
    checks.check_paged_prefill(case, "cpu", [(0, 3), (31, 5)])


@pytest.mark.parametrize("window", [1, 64, 100])
def test_tiles_that_some_rows_do_not_see(window: int) -> None:
    """A program's last rows see none of its first tiles if it has more tokens than a tile."""
    case = {
        "head_dim": 64,
        "group_size": 1,
        "num_kv_heads": 1,
        "block_size": 16,
        "dtype": torch.float16,
        "window": window,
        "soft_cap": None,
    }
    checks.check_paged_prefill(case, "cpu", [(0, 130), (37, 129)])


def test_prefill_over_several_programs_of_one_query_head() -> None:
    case = {
        "head_dim": 64,
        "group_size": 1,
        "num_kv_heads": 1,
        "block_size": 16,
        "dtype": torch.float16,
    }
    checks.check_paged_prefill(case, "cpu", [(3, 130), (16, 129)])


def test_offsets_beyond_32_bits() -> None:
    checks.check_far_caches(torch.float16, "cpu")


def test_work_list_covers_every_token_once() -> None:
    checks.check_work_list("cpu")
    checks.check_even_cuts("cpu")
    checks.check_prefill_work_list("cpu")


def test_no_queries_launch_nothing() -> None:
    checks.check_no_queries("cpu")
