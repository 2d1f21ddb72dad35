"""Products of a few rows, compiled for sm_90 with the tiles that models get: do they fit?"""

import re

import pytest
import torch
from torch import Tensor

from octavo_kernels.e4m3_weight import E4m3Weight
from octavo_kernels.skinny_gemm import Scratch, skinny_gemm_launch
from octavo_kernels.skinny_tiles import choose_config
from octavo_kernels.skinny_weight import Weight
from octavo_kernels.w4_weight import W4Weight
from tests.kernels.compiled import MAX_SHARED_BYTES, compile_launch

HOPPER = 90
# (rows, outputs, inputs, gated): narrow, split and wide.
SHAPES = (
    (1, 14_336, 4096, True),
    (64, 6144, 4096, False),
    (128, 4096, 14_336, False),
    (128, 14_336, 4096, True),
)


# (rows, dtype): narrow weights of 6144 outputs and 4096 inputs.
NARROW = ((1, torch.bfloat16), (64, torch.float16), (128, torch.bfloat16))


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(("num_rows", "num_n", "num_k", "is_gated"), SHAPES)
def test_fits(num_rows: int, num_n: int, num_k: int, is_gated: bool) -> None:
    """What follows a norm, or is split and ends in the residual stream; started early."""
    weight = _empty(num_n * (1 + is_gated), num_k)
    config = choose_config(num_rows, weight, gated=is_gated)
    assert config is not None
    squares = _empty(64, num_rows, dtype=torch.float32)
    out = _empty(num_rows, num_n)
    ends = {"residual": out, "next_norm": _empty(num_n), "scaled": out, "squares_out": squares}
    launch = skinny_gemm_launch(
        *(out, _empty(num_rows, num_k), weight),
        *(Scratch(torch.device("meta")), config),
        gated=is_gated,
        pdl=True,
        **(ends if config.split_k > 1 else {"squares_in": squares}),
    )
    used = compile_launch(launch, HOPPER)
    assert (used.local_bytes, used.stack_bytes) == (0, 0), used.registers
    assert used.shared_bytes <= MAX_SHARED_BYTES[HOPPER]
    assert "wgmma" in used.ptx
    assert "cp.async.cg.shared.global" in used.ptx
    assert "griddepcontrol.wait" in used.ptx
    assert "griddepcontrol.launch_dependents" in used.ptx


@pytest.mark.parametrize(("num_rows", "dtype"), NARROW, ids=str)
@pytest.mark.parametrize("form", ["e4m3", "w4"])
def test_narrow_weights_go_to_tensor_cores_from_registers(
    form: str, num_rows: int, dtype: torch.dtype
) -> None:
    weight = _narrow(form)
    config = choose_config(num_rows, weight)
    if config is None:
        assert (form, num_rows) == ("e4m3", 128)
        return
    launch = skinny_gemm_launch(
        *(_empty(num_rows, 6144, dtype=dtype), _empty(num_rows, 4096, dtype=dtype), weight),
        *(Scratch(torch.device("meta")), config),
        squares_in=_empty(64, num_rows, dtype=torch.float32),
        pdl=True,
    )
    used = compile_launch(launch, HOPPER)
    assert (used.local_bytes, used.stack_bytes) == (0, 0), used.registers
    assert used.shared_bytes <= MAX_SHARED_BYTES[HOPPER]
    assert re.search(r"wgmma\.mma_async\S+ \{[^}]*\}, *\{", used.ptx)
    # Sixteen bytes at a time come in, and no number is converted on its own, nor moved about.
    assert re.search(r"cp\.async\.cg\.shared\.global.*0x10, ", used.ptx)
    loop = used.ptx[used.ptx.index("lop3.b32") : used.ptx.rindex("lop3.b32")]
    assert not re.search(r"\bcvt\.\w+\.\w+\.(e4m3|f16|[su]8|[su]16|[su]32)", loop)
    assert "prmt" not in loop


def _narrow(form: str) -> Weight:
    if form == "e4m3":
        return E4m3Weight(_empty(6144, 1024, dtype=torch.int32), _empty(6144, dtype=torch.float32))
    return W4Weight(
        words=_empty(32, 6144, 16, dtype=torch.int32),
        groups=_empty(32, 6144, dtype=torch.int32),
        arrivals=_empty(48, dtype=torch.int32),
        out_size=6144,
        in_size=4096,
        group_size=128,
        scale_dtype=torch.float16,
    )
