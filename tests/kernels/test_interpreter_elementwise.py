"""Norms, SwiGLU and rope with the cache write, in Triton's interpreter."""

from typing import Any

import pytest
import torch

from octavo_kernels.read_probe import TILE, read_probe, read_probe_reference
from tests.kernels import elementwise_checks as checks
from tests.kernels.cases import case_id, elementwise_factors, pairwise, rope_factors

pytestmark = pytest.mark.interpreter

# Not bfloat16: the interpreter computes it silently wrong.
DTYPES = (torch.float16, torch.float32)
ELEMENTWISE = pairwise(elementwise_factors(DTYPES), count=24)


@pytest.mark.parametrize("case", ELEMENTWISE, ids=case_id)
def test_rms_norm(case: dict[str, Any]) -> None:
    checks.check_rms_norm(case, "cpu")


@pytest.mark.parametrize("case", ELEMENTWISE, ids=case_id)
def test_add_rms_norm(case: dict[str, Any]) -> None:
    checks.check_add_rms_norm(case, "cpu")


@pytest.mark.parametrize("case", ELEMENTWISE, ids=case_id)
def test_gated_mul(case: dict[str, Any]) -> None:
    checks.check_gated_mul(case, "cpu")


@pytest.mark.parametrize("case", pairwise(rope_factors(DTYPES), count=24), ids=case_id)
def test_rope_and_cache(case: dict[str, Any]) -> None:
    checks.check_rope_and_cache(case, "cpu")


@pytest.mark.parametrize("head_dim", [64, 80, 192])
def test_rope_of_one_pair(head_dim: int) -> None:
    """As models use it that bring queries and keys rotated: the smallest table there is."""
    case = {"head_dim": head_dim, "group_size": 3, "num_kv_heads": 2, "block_size": 16}
    checks.check_rope_and_cache(case | {"rotated": 2 / head_dim, "dtype": torch.float32}, "cpu")


def test_offsets_beyond_32_bits() -> None:
    checks.check_far_rows("cpu")


def test_read_probe() -> None:
    x = torch.arange(3 * TILE, dtype=torch.int32).flip(0)
    assert torch.equal(read_probe(x), read_probe_reference(x))


def test_empty_inputs_launch_nothing() -> None:
    checks.check_empty_rows("cpu")
