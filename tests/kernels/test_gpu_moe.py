"""The mixture of experts on a card, at small shapes and at Qwen3-30B-A3B's."""

from typing import Any

import pytest
import torch

from tests.kernels import moe_checks
from tests.kernels.cases import case_id, pairwise
from tests.kernels.cases_moe import moe_factors

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CASES = pairwise(moe_factors(DTYPES) | {"tile": (16, 64, 128)}, count=60)
CASES = [case for case in CASES if case["dtype"] != torch.float32 or case["tile"] == 16]
QWEN3 = {"experts": (128, 8), "widths": (2048, 768), "renormalise": True, "dtype": torch.bfloat16}


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_moe(case: dict[str, Any]) -> None:
    moe_checks.check_moe(case, "cuda")


@pytest.mark.parametrize("skew", ["even", "one", "few"])
@pytest.mark.parametrize("num_tokens", [1, 5, 32, 256, 700, 1500])
def test_qwen3_30b_a3b(num_tokens: int, skew: str) -> None:
    case = QWEN3 | {"num_tokens": num_tokens, "skew": skew}
    moe_checks.check_moe(case | {"tile": None}, "cuda")
    moe_checks.check_routing(case | {"tile": 64}, "cuda")


@pytest.mark.parametrize("tile", [16, 64, 128])
def test_a_token_does_not_depend_on_its_batch(tile: int) -> None:
    moe_checks.check_batch_independence("cuda", torch.bfloat16, tile)


def test_a_graph_replays_with_other_tokens() -> None:
    """Nothing is asked of the host: a captured step computes whatever lies in its inputs."""
    moe_checks.check_captured("cuda")


def test_bad_tokens_stay_alone() -> None:
    moe_checks.check_bad_tokens("cuda")


def test_ties_go_to_the_lower_expert() -> None:
    moe_checks.check_ties("cuda")


def test_offsets_beyond_32_bits() -> None:
    moe_checks.check_far_experts("cuda")


def test_no_tokens_launch_nothing() -> None:
    moe_checks.check_no_tokens("cuda")
