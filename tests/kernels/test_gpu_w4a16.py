"""Products with 4-bit weights, on a card."""

from typing import Any

import pytest
import torch

from octavo_kernels.w4a16 import Way, matmul, matmul_reference
from tests.kernels import w4a16_checks as checks
from tests.kernels.cases import case_id, normal, pairwise

pytestmark = pytest.mark.gpu

HALVES = (torch.bfloat16, torch.float16)
CASES = pairwise(checks.factors((*HALVES, torch.float32)), count=60)
# Llama 3.1 8B's: qkv, o, gate and up, down.
LAYERS = [(6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336)]
NUM_ROWS = (1, 2, 3, 8, 17, 32, 64, 100, 128, 192, 193, 256)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_every_way_is_the_formula(case: dict[str, Any]) -> None:
    checks.check_w4a16(case, "cuda")


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_layers_of_a_model(layer: tuple[int, int], group_size: int, dtype: torch.dtype) -> None:
    out_size, in_size = layer
    weight = checks.quantized(
        out_size, in_size, group_size, scale_dtype=dtype, device="cuda"
    ).pack()
    for num_rows in NUM_ROWS:
        x = normal(num_rows, in_size, dtype=dtype, device="cuda", seed=num_rows)
        expected = matmul_reference(x, weight)
        for way in Way:
            y = matmul(x, weight, way=way)
            checks.assert_close(y, expected, (way, num_rows))
            # Whoever arrives last: bit for bit the same.
            for _ in range(5):
                assert torch.equal(matmul(x, weight, way=way), y)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_assembly_computes_what_its_twin_does(dtype: torch.dtype) -> None:
    weight = checks.quantized(512, 1024, 64, device="cuda").pack()
    x = normal(2, 1024, dtype=dtype, device="cuda", seed=43)
    outs = [torch.full((2, 512), torch.nan, dtype=dtype, device="cuda") for _ in range(2)]
    for out, twin in zip(outs, (False, True), strict=True):
        checks.launch(out, x, weight, twin=twin).run()
    assert torch.equal(*outs)


def test_a_graph_holds_it() -> None:
    weight = checks.quantized(4096, 4096, 128, device="cuda").pack()
    for num_rows in (1, 8, 64, 300):
        x = normal(num_rows, 4096, dtype=torch.bfloat16, device="cuda", seed=44)
        matmul(x, weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = matmul(x, weight)
        for seed in range(3):
            x.copy_(normal(num_rows, 4096, dtype=torch.bfloat16, device="cuda", seed=seed))
            y.fill_(torch.nan)
            graph.replay()
            assert torch.equal(y, matmul(x, weight))


def test_odd_sizes() -> None:
    checks.check_odd_sizes("cuda")


def test_columns_stay_in_their_places() -> None:
    checks.check_columns_alone("cuda")
