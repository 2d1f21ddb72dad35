"""What the kernels for 8-bit floats must fulfil, on whatever device."""

from typing import Any

import torch

from octavo_kernels.fp8_gemm import (
    E4M3,
    fp8_gemm,
    fp8_gemm_reference,
    new_arrivals,
    quantize_rows,
    quantize_rows_reference,
)
from tests.kernels.cases import normal, poisoned_outputs, strided_rows

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
