"""When a kernel's result is its reference's: within its dtype's tolerance.

What kernels must fulfil, on whatever device, stands in the `*_checks` modules; the interpreter's
and the card's tests call them with the cases of `cases`.
"""

import torch
from torch import Tensor

EPS = 1e-5
# (rtol, atol): two roundings of the dtype, on values of about 1.
_TOLERANCE = {
    torch.float32: (1e-5, 1e-5),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.6e-2, 1.6e-2),
}


def assert_near(actual: Tensor, expected: Tensor, *, equal_nan: bool = False) -> None:
    rtol, atol = _TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=equal_nan)
