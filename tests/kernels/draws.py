"""The kernels' random numbers against the specification in `octavo.philox`, on any device."""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo import philox as spec
from octavo_kernels.philox import exponential32, exponentials, log32


@triton.jit
def _exponentials_kernel(
    out, seed, position, sequence_index, draw_round, first_group, GROUPS: tl.constexpr
):
    e = exponentials(
        tl.load(seed),
        first_group,
        tl.load(position),
        tl.load(sequence_index),
        tl.load(draw_round),
        GROUPS,
    )
    tl.store(out + tl.arange(0, 4 * GROUPS), e)


@triton.jit
def _edges_kernel(log_out, exponential_out, value, word, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(log_out + index, log32(tl.load(value + index)))
    tl.store(exponential_out + index, exponential32(tl.load(word + index).to(tl.uint32)))


def _ulps(actual: Tensor, expected: np.ndarray) -> float:
    """Largest distance in units of the last place of float32."""
    exact = expected.astype(np.float64)
    spacing = np.spacing(np.abs(expected).astype(np.float32)).astype(np.float64)
    return float(np.max(np.abs(actual.cpu().double().numpy() - exact) / spacing))


def check_exponentials(device: str) -> None:
    """Equal words give equal exponentials to 2 ulp; a wrong word would be off by far more."""
    groups, first_group = 64, 96
    places = [
        (0, 0, 0, 0),
        (1, 17, 0, 0),
        (2**32, 1, 2, 3),
        (2**63 + 12345, 2**32 - 1, 127, 9),
        (2**64 - 1, 131_071, 1, 40),
    ]
    for seed, position, sequence_index, draw_round in places:
        out = torch.empty(4 * groups, device=device)
        bits = seed - 2**64 if seed >= 2**63 else seed
        scalars = [torch.tensor([x], device=device) for x in (bits, position)]
        scalars += [
            torch.tensor([x], device=device, dtype=torch.int32)
            for x in (sequence_index, draw_round)
        ]
        _exponentials_kernel[(1,)](
            out, *scalars, first_group, GROUPS=groups, num_warps=1, enable_fp_fusion=False
        )
        end = 4 * (first_group + groups)
        expected = spec.exponentials(seed, end, position, sequence_index, draw_round)
        assert _ulps(out, expected[4 * first_group :]) <= 2


def check_edges(device: str) -> None:
    """Logarithms and exponentials to 2 ulp over the whole range, both ends included."""
    size = 1024
    words = np.linspace(0, 2**32 - 1, size).astype(np.int64)
    words[:32] = 2 ** np.arange(32)
    words[32:40] = [0, 1, 2, 3, 2**32 - 4, 2**32 - 3, 2**32 - 2, 2**32 - 1]
    uniform = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    uniform = np.minimum(uniform, spec.MAX_UNIFORM).astype(np.float64)
    values = np.geomspace(1e-10, 20.0, size).astype(np.float32)
    values[:5] = [1.0, np.nextafter(np.float32(1), np.float32(0)), 1.0000001, 0.70710677, 2.0]
    log_out, exponential_out = (torch.empty(size, device=device) for _ in range(2))
    _edges_kernel[(1,)](
        log_out,
        exponential_out,
        torch.from_numpy(values).to(device),
        torch.from_numpy(words).to(device),
        SIZE=size,
        num_warps=4,
        enable_fp_fusion=False,
    )
    assert _ulps(log_out, np.log(values.astype(np.float64))) <= 2
    assert _ulps(exponential_out, -np.log1p(-uniform)) <= 2
