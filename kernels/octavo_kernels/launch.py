"""What every launcher shares: a launch as a value, and 64-bit offsets.

A launcher builds a `Launch` (kernel, grid, arguments, constants, options) and runs it. Keeping it
a value lets the tests compile, without a card, exactly what a launcher would run on one.

`enable_fp_fusion` is always passed: whether a multiply and an add may fuse into one rounding
changes results, so it is never left to a compiler's default.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

# Grids are sized for the card's multiprocessors, tiles for its generation; without a card (compile
# checks, interpreter) for a Hopper's.
_DEFAULT_NUM_SMS = 132
_DEFAULT_CAPABILITY = 90


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch on the current device and stream.

    `args` are positional and come first in the kernel's signature; `constants` are its
    `tl.constexpr` parameters by name.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int = 1
    enable_fp_fusion: bool = True
    # Programmatic dependent launch: the kernel starts before the one ahead of it has ended, and
    # waits by itself (gdc_wait) before it touches what that one wrote.
    pdl: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Compiler options, the same for a launch and for an ahead-of-time compilation."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": self.enable_fp_fusion,
            **({"launch_pdl": True} if self.pdl else {}),
        }

    def run(self) -> None:
        self.kernel[self.grid](*self.args, **self.constants, **self.options)


def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device."""
    if device.type != "cuda":
        return _DEFAULT_NUM_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def compute_capability(device: torch.device) -> int:
    """80 for an Ampere, 90 for a Hopper."""
    if device.type != "cuda":
        return _DEFAULT_CAPABILITY
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= n: what `tl.arange` takes."""
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


@triton.jit
def offset64(index, stride):
    """index * stride in 64 bits: block ids times block strides, rows times vocabularies and
    tokens times wide hidden sizes all overflow 32."""
    return index.to(tl.int64) * stride
