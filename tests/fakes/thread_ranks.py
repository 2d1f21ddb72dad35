"""Ranks that are threads of one process: the exchange of tensor parallelism without processes."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from octavo_worker.parallel.shares import Share

ResultT = TypeVar("ResultT")
_TIMEOUT_S = 60.0


class _Meeting:
    """Where the ranks lay down their tensors and take up everybody's."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._laid: list[torch.Tensor] = [torch.empty(0)] * size

    def meet(self, rank: int, x: torch.Tensor) -> Sequence[torch.Tensor]:
        self._laid[rank] = x.clone()
        self._barrier.wait(_TIMEOUT_S)
        laid = tuple(self._laid)
        self._barrier.wait(_TIMEOUT_S)
        return laid

    def leave(self) -> None:
        """A rank failed: nobody waits for it."""
        self._barrier.abort()


class ThreadExchange:
    """See `octavo_worker.parallel.sharded.Exchange`."""

    def __init__(self, share: Share, meeting: _Meeting) -> None:
        self.share = share
        self._meeting = meeting
        self.num_reduced = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.num_reduced += 1
        return x.copy_(torch.stack(list(self._meeting.meet(self.share.rank, x))).sum(dim=0))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(list(self._meeting.meet(self.share.rank, x)))


def run_ranks(size: int, run: Callable[[ThreadExchange], ResultT]) -> list[ResultT]:
    """What `run` gives on each of `size` ranks."""
    meeting = _Meeting(size)

    def run_rank(rank: int) -> ResultT:
        try:
            return run(ThreadExchange(Share(rank, size), meeting))
        except BaseException:
            meeting.leave()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run_rank, rank) for rank in range(size)]
        errors = [future.exception() for future in futures]
    # The first one that isn't merely left behind by another's.
    causes = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    for cause in (*causes, *errors):
        if cause is not None:
            raise cause
    return [future.result() for future in futures]
