"""Products of a few rows, compiled for sm_90 with the tiles that models get: do they fit?"""

import pytest
import torch
from torch import Tensor

from octavo_kernels.skinny_gemm import Scratch, skinny_gemm_launch
from octavo_kernels.skinny_tiles import choose_config
from tests.kernels.compiled import MAX_SHARED_BYTES, compile_launch

HOPPER = 90
# (rows, outputs, inputs, gated): narrow, split and wide.
SHAPES = (
    (1, 14_336, 4096, True),
    (64, 6144, 4096, False),
    (128, 4096, 14_336, False),
    (128, 14_336, 4096, True),
)


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(("num_rows", "num_n", "num_k", "is_gated"), SHAPES)
def test_fits(num_rows: int, num_n: int, num_k: int, is_gated: bool) -> None:
    """What follows a norm, or is split and ends in the residual stream; started early."""
    config = choose_config(num_rows, num_n, num_k, torch.bfloat16, gated=is_gated)
    assert config is not None
    squares = _empty(64, num_rows, dtype=torch.float32)
    out = _empty(num_rows, num_n)
    ends = {"residual": out, "next_norm": _empty(num_n), "scaled": out, "squares_out": squares}
    launch = skinny_gemm_launch(
        *(out, _empty(num_rows, num_k), _empty(num_n * (1 + is_gated), num_k)),
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
