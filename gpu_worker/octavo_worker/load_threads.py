"""Threads that load weights side by side. Must not know: files, tensors. Entry: `in_threads`."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

import torch

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def in_threads(
    function: Callable[[ItemT], ResultT], items: Sequence[ItemT], num_threads: int
) -> Iterator[ResultT]:
    """`function`'s results as they come, in any order; with one thread in this one, in order.

    The first error ends it: what hasn't begun is dropped, what runs is waited for.
    """
    if num_threads == 1:
        yield from map(function, items)
        return
    card = torch.cuda.current_device() if torch.cuda.is_available() else None
    # The threads' streams start after what this one launched, and it goes on after theirs.
    _synchronize(card)
    threads = ThreadPoolExecutor(num_threads, "load", initializer=_enter, initargs=(card,))
    try:
        futures = [threads.submit(function, item) for item in items]
        for future in as_completed(futures):
            yield future.result()
    finally:
        threads.shutdown(cancel_futures=True)
        _synchronize(card)


def _synchronize(card: int | None) -> None:
    if card is not None:
        torch.cuda.synchronize(card)


def _enter(card: int | None) -> None:
    """Each thread copies on a stream of its own: one's wait holds nobody up."""
    if card is not None:
        torch.cuda.set_device(card)
        torch.cuda.set_stream(torch.cuda.Stream())
