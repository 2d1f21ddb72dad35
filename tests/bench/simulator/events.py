"""Virtual time: what is to happen, in order. Entry point: `Events`."""

import heapq
from collections.abc import Callable
from itertools import count


class Events:
    """A clock that jumps from event to event; equal times keep the order of scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + delay_s, next(self._number), what))

    def run(self, is_over: Callable[[], bool]) -> None:
        """Until `is_over`, or nothing is left to happen."""
        while self._heap and not is_over():
            self.now, _, what = heapq.heappop(self._heap)
            what()
