"""What the products of a few rows must fulfil, on whatever device, for given tiles."""

from typing import Any

import torch
from torch import Tensor

from octavo_kernels import e4m3_weight
from octavo_kernels.e4m3_weight import E4m3Weight
from octavo_kernels.fp8_gemm import quantize_rows_reference
from octavo_kernels.skinny_gemm import (
    Scratch,
    skinny_gemm,
    skinny_gemm_add,
    skinny_gemm_add_reference,
    skinny_gemm_reference,
)
from octavo_kernels.skinny_tiles import Config
from octavo_kernels.skinny_weight import Weight
from tests.kernels import w4a16_checks
from tests.kernels.cases import normal, poisoned_outputs
from tests.kernels.checks import EPS

FACTORS: dict[str, Any] = {
    "num_rows": (1, 3, 17, 40),
    "num_n": (64, 80, 192),
    "num_k": (128, 384),
    "split_k": (1, 2, 3),
    "is_gated": (False, True),
    "has_bias": (False, True),
    "has_norm": (False, True),
    "form": ("dense",),
    "joint": (False, True),
}
# Weights in 8-bit floats, and in 4-bit codes with groups of so many inputs (-1: of all).
NARROW = FACTORS | {"num_n": (64, 192), "form": ("e4m3", 32, 64, 128, -1)}


def check_skinny_gemm(case: dict[str, Any], config: Config, device: str) -> None:
    """The tickets end as they began, and rows may be strided."""
    num_rows, num_n, num_k = case["num_rows"], case["num_n"], case["num_k"]
    dtype = case["dtype"]
    height = num_n * (2 if case["is_gated"] else 1)
    x = normal(num_rows, num_k, dtype=dtype, device=device, seed=60)
    weight, twin = weight_of(case, height, device)
    bias = normal(height, dtype=dtype, device=device, seed=62) if case["has_bias"] else None
    squares = None
    if case["has_norm"]:
        # As three tiles of whoever wrote x counted them.
        squares = x.float().pow(2).unflatten(1, (-1, 64)).sum(-1).T.contiguous() * 4
    scratch = Scratch(x.device)
    options = {"bias": bias, "squares": squares, "eps": EPS, "gated": case["is_gated"]}
    with poisoned_outputs():
        out = skinny_gemm(x, weight, scratch, config, **options)
    expected = skinny_gemm_reference(x, twin, **options)
    if dtype == torch.float32:
        options["bias"] = None if bias is None else bias.abs()
        magnitudes = skinny_gemm_reference(x.abs(), twin.abs(), **options)
        _assert_summed(out, expected, magnitudes, num_k, is_gated=case["is_gated"])
    else:
        _assert_rounded(out, expected, is_gated=case["is_gated"])
    assert not scratch.tickets.any()


def check_skinny_gemm_add(case: dict[str, Any], config: Config, device: str) -> None:
    num_rows, num_n, num_k = case["num_rows"], case["num_n"], case["num_k"]
    dtype = case["dtype"]
    x = normal(num_rows, num_k, dtype=dtype, device=device, seed=63)
    weight, twin = weight_of(case, num_n, device)
    residual = normal(num_rows, num_n, dtype=dtype, device=device, seed=65)
    norm = normal(num_n, dtype=dtype, device=device, seed=66)
    before = residual.clone()
    scratch = Scratch(x.device)
    with poisoned_outputs():
        done = skinny_gemm_add(x, weight, scratch, config, residual, norm)
    total, _, _ = skinny_gemm_add_reference(x, twin, residual, norm)
    if dtype == torch.float32:
        absolute = (x.abs(), twin.abs(), residual.abs(), norm)
        _assert_summed(done.total, total, skinny_gemm_add_reference(*absolute)[0], num_k)
    else:
        # The product's last bit may differ, and the sum rounds once more.
        _assert_rounded(done.total, total, others=(total - residual).abs().amax())
    # From the total on nothing but single roundings happens.
    assert torch.equal(done.scaled, (done.total.float() * norm.float()).to(dtype))
    squares = done.total.float().pow(2).sum(-1)
    torch.testing.assert_close(done.squares.sum(0), squares, rtol=1e-4, atol=1e-4)
    assert torch.equal(residual, before)
    assert not scratch.tickets.any()


def weight_of(case: dict[str, Any], num_n: int, device: str) -> tuple[Weight, Tensor]:
    """One of the case's form, and the matrix that it stands for."""
    num_k, form = case["num_k"], case["form"]
    values = normal(num_n, num_k, dtype=torch.float32, device=device, seed=61) * num_k**-0.5
    if form == "dense":
        values = values.to(case["dtype"])
        return values, values
    if form == "e4m3":
        rounded, scales = quantize_rows_reference(values)
        twin = rounded.float() * scales[:, None]
        return E4m3Weight.of(e4m3_weight.arrange(rounded), scales), twin
    layer = w4a16_checks.quantized(num_n, num_k, num_k if form < 0 else form, device=device)
    return layer.pack(), layer.formula()


# A unit in the last place, relative.
_UNIT = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def _assert_rounded(
    actual: Tensor, expected: Tensor, *, is_gated: bool = False, others: Tensor | float = 0.0
) -> None:
    """Within a unit in the last place of the value, and of `others` that went into it.

    A gate that rounds the other way moves silu(gate) * up by some units.
    """
    unit = _UNIT[expected.dtype] * (4 if is_gated else 1)
    _assert_within(actual, expected, unit * (expected.double().abs() + others) + unit / 4)


def _assert_summed(
    actual: Tensor, expected: Tensor, magnitudes: Tensor, num_k: int, *, is_gated: bool = False
) -> None:
    """Within what a float32 sum of num_k products keeps, in whatever order it is taken.

    Roundings are as good as independent, so they add up to about sqrt(K) units of the sum of the
    terms' `magnitudes` (Higham and Mary 2019, doi 10.1137/18M1226312), however near zero the sum
    itself is. silu(gate) * up has the errors of both factors.
    """
    unit = num_k**0.5 * 2.0**-24 * (4 if is_gated else 1)
    _assert_within(actual, expected, unit * magnitudes.double())


def _assert_within(actual: Tensor, expected: Tensor, bound: Tensor) -> None:
    error = (actual.double() - expected.double()).abs()
    assert bool((error <= bound).all()), float(error.max())
