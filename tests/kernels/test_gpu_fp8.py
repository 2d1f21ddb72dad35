"""8-bit floats on a card."""

from typing import Any

import pytest
import torch

from octavo_kernels.fp8_gemm import E4M3
from octavo_worker.quant.fp8 import exact_product, quantize_rows
from octavo_worker.quant.fp8_cuda import MAX_SKINNY_ROWS, CudaProduct
from tests.kernels import fp8_checks as checks
from tests.kernels.cases import case_id, normal, pairwise

pytestmark = pytest.mark.gpu

LAYERS = [(6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336)]


def test_quantize_rows() -> None:
    checks.check_quantize_rows("cuda", E4M3)
    checks.check_arranged_rows("cuda", E4M3)


@pytest.mark.parametrize("case", pairwise(checks.FACTORS, count=36), ids=case_id)
def test_fp8_gemm(case: dict[str, Any]) -> None:
    checks.check_fp8_gemm(case, "cuda")


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("num_rows", [1, 8, 32, 128, 300])
def test_layers_of_a_model(num_rows: int, layer: tuple[int, int]) -> None:
    out_size, in_size = layer
    case = {"num_rows": num_rows, "out_size": out_size, "in_size": in_size}
    checks.check_fp8_gemm(case, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(1024, 512), (200, 300)], ids=str)
@pytest.mark.parametrize("num_rows", [1, MAX_SKINNY_ROWS, MAX_SKINNY_ROWS + 1, 300])
def test_both_products_are_the_exact_one(
    num_rows: int, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    out_size, in_size = sizes
    x = normal(num_rows, in_size, dtype=dtype, device="cuda", seed=53)
    weight = normal(out_size, in_size, dtype=torch.float32, device="cuda", seed=54)
    codes, scales = quantize_rows(weight)
    product = CudaProduct()
    arranged = product.arrange(codes)
    assert (arranged is None) == (in_size == 300)
    y = product(x, codes if arranged is None else arranged, scales)
    expected = exact_product(x.float(), codes, scales)
    assert y.dtype == dtype
    assert float((y - expected).norm() / expected.norm()) < 5e-3


def test_a_graph_holds_it() -> None:
    product = CudaProduct()
    codes, scales = quantize_rows(torch.randn(4096, 4096, device="cuda"))
    for num_rows in (1, 300):
        x = normal(num_rows, 4096, dtype=torch.bfloat16, device="cuda", seed=55)
        product(x, codes, scales)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = product(x, codes, scales)
        x.copy_(normal(num_rows, 4096, dtype=torch.bfloat16, device="cuda", seed=56))
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, product(x, codes, scales))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_attention_over_a_cache_of_8_bits(head_dim: int, dtype: torch.dtype) -> None:
    checks.check_attention("cuda", dtype, head_dim)


@pytest.mark.parametrize("window", [None, 20], ids=str)
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_lone_queries_over_a_cache_of_8_bits(
    head_dim: int, dtype: torch.dtype, block_size: int, window: int | None
) -> None:
    checks.check_lone_queries("cuda", dtype, head_dim, block_size, window)


def test_what_a_cache_of_8_bits_stores() -> None:
    checks.check_store("cuda", E4M3)
