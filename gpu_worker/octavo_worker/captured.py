"""A step as one CUDA graph.

Must not know: what the step computes. Entry points: `capture`, `Drawn`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

# Launches a step on the device: int64 tokens and events of the newest launch, at a fixed address.
Step: TypeAlias = Callable[[], torch.Tensor]
# Makes a step one that is launched as a whole.
Capture: TypeAlias = Callable[[Step], Step]


class Drawn(NamedTuple):
    """What a launched step will have drawn: the step's entries are `num_entries` columns of
    `columns`, from `first` on. To be copied before the next launch."""

    columns: torch.Tensor  # int64 [2, padded]: tokens and events
    first: int
    num_entries: int


def capture(step: Step, pool: Any, error_mode: str) -> Step:
    """`step`, which never waits for the device, captured into `pool`.

    Captured steps that share a pool share memory: none may run beside another, and what one drew
    is to be copied before the next is launched. `pool`, `error_mode`: see `torch.cuda.graph`.
    """
    step()  # compiles what its shapes need; a capture can't
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode=error_mode):
        drawn = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return drawn

    return replay
