"""The mixture of experts in Triton's interpreter."""

from typing import Any

import pytest
import torch

from tests.kernels import moe_checks
from tests.kernels.cases import case_id, pairwise
from tests.kernels.cases_moe import moe_factors

pytestmark = pytest.mark.interpreter

CASES = pairwise(moe_factors((torch.float16, torch.float32)), count=15)
# Several chunks of tokens, most experts empty or overfull.
CHUNKED = {"experts": (128, 8), "num_tokens": 70, "widths": (24, 16), "dtype": torch.float32}


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_moe(case: dict[str, Any]) -> None:
    moe_checks.check_moe(case, "cpu")


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_routing(case: dict[str, Any]) -> None:
    moe_checks.check_routing(case, "cpu")


@pytest.mark.parametrize("skew", ["even", "one", "few"])
def test_routing_of_several_chunks(skew: str) -> None:
    case = CHUNKED | {"skew": skew, "tile": 16, "renormalise": True}
    moe_checks.check_routing(case, "cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_token_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    moe_checks.check_batch_independence("cpu", dtype, tile=16)


def test_bad_tokens_stay_alone() -> None:
    moe_checks.check_bad_tokens("cpu")


def test_ties_go_to_the_lower_expert() -> None:
    moe_checks.check_ties("cpu")


def test_offsets_beyond_32_bits() -> None:
    moe_checks.check_far_experts("cpu")


def test_no_tokens_launch_nothing() -> None:
    moe_checks.check_no_tokens("cpu")
