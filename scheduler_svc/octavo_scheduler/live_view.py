"""Pictures of the cell for those who watch it; nothing is done while nobody does.

The first watcher makes the cell keep a chronicle, the last one ends that. Pictures are shared:
however many watch, one is composed at most every `_SHARED_S`.

Must not know: protos, streams. Entry points: `LiveView.watching`, `LiveView.picture_json`.
"""

import asyncio
import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from octavo_scheduler.chronicle import Chronicle
from octavo_scheduler.core import Cell
from octavo_scheduler.picture import Seat, picture_of

# Just under the shortest interval that watchers may ask for.
_SHARED_S = 0.09


class LiveView:
    """One per cell. `seats` tells the workers that the scheduler leads or wants to lead."""

    def __init__(self, cell: Cell, scheduler_id: str, seats: Callable[[], Sequence[Seat]]) -> None:
        self._cell = cell
        self._scheduler_id = scheduler_id
        self._seats = seats
        self._num_watchers = 0
        self._composing = asyncio.Lock()
        self._picture_json = b""
        self._composed_at = float("-inf")

    @contextmanager
    def watching(self) -> Generator[None]:
        """Somebody watches, until the block ends."""
        if self._num_watchers == 0:
            self._cell.begin_chronicle()
        self._num_watchers += 1
        try:
            yield
        finally:
            self._num_watchers -= 1
            if self._num_watchers == 0:
                self._cell.book.chronicle = None
                self._picture_json = b""
                self._composed_at = float("-inf")

    async def picture_json(self) -> bytes:
        """The cell now, or some hundredths of a second ago; only while watching."""
        async with self._composing:
            chronicle = self._cell.book.chronicle
            assert chronicle is not None, "pictures are for watchers"
            if self._cell.clock() - self._composed_at >= _SHARED_S:
                picture = await self._compose(chronicle)
                self._picture_json = json.dumps(picture, separators=(",", ":")).encode()
                self._composed_at = self._cell.clock()
            return self._picture_json

    async def _compose(self, chronicle: Chronicle) -> dict[str, object]:
        return await picture_of(self._cell, chronicle, self._scheduler_id, self._seats())
