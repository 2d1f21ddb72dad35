"""What other threads have for a stream's writer on the event loop, coalesced.

However many items are put while the loop is busy, it is woken once and takes them all. Must
not know: what the items are.
"""

import asyncio
import threading
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class Outbox(Generic[ItemT]):
    """Made on the event loop; `put` from any thread, `take` on the loop, by one reader."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._has_items = asyncio.Event()
        self._lock = threading.Lock()
        self._items: list[ItemT] = []

    def put(self, item: ItemT) -> None:
        with self._lock:
            is_first = not self._items
            self._items.append(item)
        if is_first:
            self._loop.call_soon_threadsafe(self._has_items.set)

    async def take(self) -> list[ItemT]:
        """All items, at least one, in the order put."""
        await self._has_items.wait()
        self._has_items.clear()
        with self._lock:
            items, self._items = self._items, []
        return items
