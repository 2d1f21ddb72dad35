"""What the 4-bit kernels must fulfil, on whatever device: all ways = the formula."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo_kernels.launch import Launch
from octavo_kernels.w4_dequantize import dequantize, dequantize_reference
from octavo_kernels.w4_weight import W4Weight, pack
from octavo_kernels.w4a16 import Way, gemm_launch, matmul, matmul_reference
from tests.kernels.cases import normal, poisoned_outputs, strided_rows

# Relative to the norm of the result: a rounding of it, and sums in another order.
_TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


class Quantized(NamedTuple):
    """A layer as checkpoints hold it."""

    codes: Tensor  # uint8 [N, K]
    scales: Tensor  # [N, G]
    zeros: Tensor  # float32 [N, G]
    group_size: int

    def pack(self) -> W4Weight:
        return pack(self.codes, self.scales, self.zeros, self.group_size)

    def formula(self) -> Tensor:
        """float32 [N, K]."""
        scales = self.scales.float().repeat_interleave(self.group_size, dim=1)
        zeros = self.zeros.repeat_interleave(self.group_size, dim=1)
        return (self.codes.float() - zeros) * scales


def quantized(
    out_size: int,
    in_size: int,
    group_size: int,
    *,
    scale_dtype: torch.dtype = torch.float16,
    device: str = "cpu",
    seed: int = 40,
) -> Quantized:
    """All codes and all zeros, 16 among them; scales of either sign."""
    generator = torch.Generator().manual_seed(seed)
    groups = (out_size, in_size // group_size)
    codes = torch.randint(0, 16, (out_size, in_size), dtype=torch.uint8, generator=generator)
    zeros = torch.randint(0, 17, groups, generator=generator).float()
    scales = torch.randn(groups, generator=generator) * 0.02
    return Quantized(codes.to(device), scales.to(device, scale_dtype), zeros.to(device), group_size)


def factors(dtypes: Sequence[torch.dtype]) -> dict[str, Sequence[Any]]:
    return {
        "group_size": (32, 64, 128, 256, -1),
        "in_size": (256, 512),
        "out_size": (8, 128),
        "num_rows": (1, 2, 17),
        "dtype": dtypes,
        "scale_dtype": (torch.float16, torch.bfloat16),
    }


def check_w4a16(case: dict[str, Any], device: str) -> None:
    """Every way that takes so many rows; `group_size` -1 is one group a row."""
    in_size, num_rows, dtype = case["in_size"], case["num_rows"], case["dtype"]
    group_size = in_size if case["group_size"] < 0 else case["group_size"]
    layer = quantized(
        case["out_size"], in_size, group_size, scale_dtype=case["scale_dtype"], device=device
    )
    weight = layer.pack()
    assert torch.equal(dequantize_reference(weight, torch.float32), layer.formula())
    with poisoned_outputs():
        assert torch.equal(dequantize(weight, dtype), layer.formula().to(dtype))
    x = strided_rows(normal(num_rows, in_size, dtype=dtype, device=device, seed=41))
    for way in Way:
        with poisoned_outputs():
            y = matmul(x, weight, way=way)
        assert_close(y, matmul_reference(x, weight), way)
        assert int(weight.arrivals.abs().max()) == 0


def assert_close(actual: Tensor, expected: Tensor, what: object) -> None:
    assert actual.shape == expected.shape
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert float(error) < _TOLERANCE[expected.dtype], (what, float(error))


def check_odd_sizes(device: str) -> None:
    """K that is no multiple of a tile: one short group, one long, many; and strange N."""
    for out_size, in_size, group_size in ((1, 32, 32), (5, 96, 96), (130, 160, 32), (3, 576, 64)):
        weight = quantized(out_size, in_size, group_size, device=device).pack()
        x = normal(2, in_size, dtype=torch.float32, device=device, seed=42)
        with poisoned_outputs():
            y = matmul(x, weight, way=Way.GEMM)
        assert_close(y, matmul_reference(x, weight), (out_size, in_size))


def check_columns_alone(device: str) -> None:
    """One input at a time picks one column of W, exactly: no column is in another's place."""
    layer = quantized(16, 256, 64, device=device)
    x = torch.eye(256, dtype=torch.float16, device=device)
    expected = layer.formula().t().half()
    weight = layer.pack()
    assert torch.equal(matmul(x, weight, way=Way.GEMM), expected)


def check_no_rows(device: str) -> None:
    weight = quantized(16, 128, 128, device=device).pack()
    x = torch.empty(0, 128, dtype=torch.float16, device=device)
    assert matmul(x, weight).shape == (0, 16)


def launch(out: Tensor, x: Tensor, weight: W4Weight, *, twin: bool) -> Launch:
    """`twin`: plain Triton in place of the assembly."""
    launch = gemm_launch(out, x, weight)
    return replace(launch, constants=launch.constants | {"ASM": ""}) if twin else launch
