"""Who a worker is: what it is doing, how its KV is named, whether it serves what a cell does.

Must not know: protobuf, tensors on devices. Entry points: `Phase`, `require_same`, `kv_scheme_of`.
"""

from dataclasses import fields
from enum import IntEnum

import torch

from octavo.errors import FailedPreconditionError
from octavo.model_spec import ModelSpec


class Phase(IntEnum):
    """Values of `WorkerPhase` in worker.proto."""

    LOADING = 1
    COMPILING = 2
    CAPTURING = 3
    RUNNING = 4
    DRAINING = 5


def require_same(own: ModelSpec, required: ModelSpec) -> None:
    """Raise FailedPreconditionError naming the first field in which `required` differs."""
    for item in fields(own):
        mine, theirs = getattr(own, item.name), getattr(required, item.name)
        if mine != theirs:
            raise FailedPreconditionError(
                f"this worker's {item.name} is {mine!r}, the cell's is {theirs!r}; "
                "workers of one cell must serve the same model in the same way"
            )


_KV_SCHEMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4m3-head",  # a scale a kv head
}


def kv_scheme_of(dtype: torch.dtype) -> str:
    """Name of a KV cache that stores values of `dtype`."""
    return _KV_SCHEMES[dtype]
