"""Who a worker is: what it serves, how much it holds, what it is doing.

Must not know: protobuf, tensors on devices.
"""

from dataclasses import dataclass, fields
from enum import IntEnum

import torch

from octavo.errors import FailedPreconditionError


class Phase(IntEnum):
    """Values of `WorkerPhase` in worker.proto."""

    LOADING = 1
    COMPILING = 2
    CAPTURING = 3
    RUNNING = 4
    DRAINING = 5


@dataclass(frozen=True, slots=True)
class Spec:
    """What a worker serves; see `ModelSpec` in common.proto."""

    name: str
    revision: str
    block_size: int
    kv_scheme: str
    hash_version: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def require(self, other: "Spec") -> None:
        """Raise FailedPreconditionError naming the first field in which `other` differs."""
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if mine != theirs:
                raise FailedPreconditionError(
                    f"this worker's {item.name} is {mine!r}, the cell's is {theirs!r}; "
                    "workers of one cell must serve the same model in the same way"
                )


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much a worker holds; see `WorkerCapacity` in worker.proto."""

    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    backend: str
    device: str
    kv_bytes_per_token: int


_KV_SCHEMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4m3-head",  # a scale a kv head
}


def kv_scheme_of(dtype: torch.dtype) -> str:
    """Name of a KV cache that stores values of `dtype`."""
    return _KV_SCHEMES[dtype]
