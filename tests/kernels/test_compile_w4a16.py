"""The 4-bit kernels, compiled for sm_80 and sm_90: resources, and the instructions meant."""

import re

import pytest
import torch
from torch import Tensor

from octavo_kernels import launch
from octavo_kernels.w4_dequantize import dequantize_launch
from octavo_kernels.w4_weight import W4Weight
from octavo_kernels.w4a16 import gemm_launch
from tests.kernels.compiled import MAX_SHARED_BYTES, Resources, compile_launch

SLOW = pytest.mark.slow
# rows, group size, dtype: each shape of program, each way to scale.
GEMMS = [
    (8, 128, torch.bfloat16),
    (128, 64, torch.float16),
    pytest.param(1, 32, torch.float16, marks=SLOW),
    pytest.param(32, 128, torch.float16, marks=SLOW),
    pytest.param(64, 32, torch.bfloat16, marks=SLOW),
    pytest.param(192, 256, torch.bfloat16, marks=SLOW),
]
CAPABILITIES = [90, pytest.param(80, marks=SLOW)]


def _meta(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _weight(group_size: int, *, in_size: int = 4096) -> W4Weight:
    padded_k = -(-in_size // 128) * 128
    return W4Weight(
        words=_meta(padded_k // 128, 6144, 16),
        groups=_meta(padded_k // group_size, 6144),
        arrivals=_meta(512),
        out_size=6144,
        in_size=in_size,
        group_size=group_size,
        scale_dtype=torch.float16,
    )


def _check(used: Resources, capability: int) -> None:
    assert used.stack_bytes == used.local_bytes == 0, (capability, used.registers)
    assert used.shared_bytes <= MAX_SHARED_BYTES[capability], capability


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("num_rows", "group_size", "dtype"), GEMMS)
def test_gemm(
    num_rows: int,
    group_size: int,
    dtype: torch.dtype,
    capability: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "_DEFAULT_CAPABILITY", capability)
    x, out = _meta(num_rows, 4096, dtype=dtype), _meta(num_rows, 6144, dtype=dtype)
    used = compile_launch(gemm_launch(out, x, _weight(group_size)), capability)
    _check(used, capability)
    # Weights come 16 bytes at a time, asynchronously, and are dequantised in pairs.
    assert re.search(r"cp\.async\.cg\.shared\.global.*0x10, ", used.ptx)
    assert "lop3.b32" in used.ptx
    assert ("wgmma.mma_async" in used.ptx) == (capability >= 90)
    assert not re.search(r"cvt\.\w+\.\w+\.[su](16|32) ", _loop(used.ptx))
    if capability >= 90:
        # The dequantised weights go to the tensor cores from registers.
        assert re.search(r"wgmma\.mma_async\S+ \{[^}]*\}, *\{", used.ptx)


def _loop(ptx: str) -> str:
    """From the first dequantised pair to the last."""
    return ptx[ptx.index("lop3.b32") : ptx.rindex("lop3.b32")]


@SLOW
@pytest.mark.parametrize("capability", MAX_SHARED_BYTES)
@pytest.mark.parametrize("in_size", [4096, 576])
def test_dequantize(in_size: int, capability: int) -> None:
    out = _meta(6144, in_size, dtype=torch.bfloat16)
    _check(
        compile_launch(dequantize_launch(out, _weight(64, in_size=in_size)), capability),
        capability,
    )


@SLOW
def test_inputs_that_are_no_multiple_of_a_tile() -> None:
    weight = _weight(64, in_size=576)
    x, y = (_meta(16, size, dtype=torch.bfloat16) for size in (576, 6144))
    _check(compile_launch(gemm_launch(y, x, weight), 90), 90)
