"""How much a worker holds: what it tells its leader, and what the leader plans with.

`worker.proto`'s WorkerCapacity as plain data, with its translation. Must not know: any service.
Entry points: `Capacity`, `capacity_from_proto`, `capacity_to_proto`.
"""

from dataclasses import dataclass

from octavo.v1 import worker_pb2


@dataclass(frozen=True, slots=True)
class Capacity:
    """A worker's size: KV blocks (the null block included), rows, tokens a step.

    What follows them is for people to read; 0 and "" where nobody said.
    """

    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    backend: str = ""
    device: str = ""
    kv_bytes_per_token: int = 0


def capacity_from_proto(message: worker_pb2.WorkerCapacity) -> Capacity:
    """The capacity of a message."""
    return Capacity(
        num_blocks=message.num_blocks,
        max_num_seqs=message.max_num_seqs,
        max_num_batched_tokens=message.max_num_batched_tokens,
        backend=message.backend,
        device=message.device,
        kv_bytes_per_token=message.kv_bytes_per_token,
    )


def capacity_to_proto(capacity: Capacity) -> worker_pb2.WorkerCapacity:
    """The message of a capacity."""
    return worker_pb2.WorkerCapacity(
        num_blocks=capacity.num_blocks,
        max_num_seqs=capacity.max_num_seqs,
        max_num_batched_tokens=capacity.max_num_batched_tokens,
        backend=capacity.backend,
        device=capacity.device,
        kv_bytes_per_token=capacity.kv_bytes_per_token,
    )
