"""Products of 8-bit floats on a card: a kernel of our own for few tokens, cuBLAS for many.

Must not know: layers, files. Entry point: `CudaProduct`.
"""

import torch
from torch import Tensor

from octavo_kernels import e4m3_weight
from octavo_kernels.fp8_gemm import fp8_gemm, new_arrivals, quantize_rows

# Up to so many tokens libraries' kernels leave much of the card idle. To measure it again:
# `octavo bench kernels fp8`.
MAX_SKINNY_ROWS = 64
_LIBRARY_MULTIPLE = 16  # of inputs and of outputs: what torch._scaled_mm takes


class CudaProduct:
    """One layer's: it owns the counters of its kernel, and knows its weight's order."""

    def __init__(self) -> None:
        self._arrivals: Tensor | None = None
        self._is_arranged = False

    def __call__(self, x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        rounded, x_scales = quantize_rows(x, arranged=self._is_arranged)
        if x.shape[0] > MAX_SKINNY_ROWS and _library_takes(x, weight):
            return library_product(rounded, x_scales, weight, scales)
        if self._arrivals is None:
            self._arrivals = new_arrivals(weight.shape[0], weight.device)
        return fp8_gemm(rounded, x_scales, weight, scales, self._arrivals, x.dtype)

    def arrange(self, weight: Tensor) -> Tensor | None:
        """For `skinny_gemm`, which decode steps of few rows take; both products here read rows of
        x that are arranged alike."""
        if weight.shape[1] % e4m3_weight.GROUP:
            return None
        self._is_arranged = True
        return e4m3_weight.arrange(weight)


def library_product(x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """bf16 [M, N]: scales a row of both are taken with bf16 results only. Sums in float32."""
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        x,
        weight.t(),
        scale_a=x_scales[:, None],
        scale_b=scales[None, :],
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )


def _library_takes(x: Tensor, weight: Tensor) -> bool:
    is_aligned = all(size % _LIBRARY_MULTIPLE == 0 for size in weight.shape)
    return is_aligned and x.dtype == torch.bfloat16
