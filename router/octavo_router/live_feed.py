"""Pictures of every connected cell, relayed to those who look at the status page.

One watch per cell is shared by all viewers; the first viewer begins the watches, the last one
ends them. A viewer that reads slowly misses pictures, it never holds anything up: what waits for
it is the newest of each cell.

Must not know: HTTP, what a picture shows. Entry points: `LiveFeed.viewing`, `Viewer.news`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import grpc.aio

from octavo.errors import OctavoError, OverloadedError, UnavailableError

log = logging.getLogger(__name__)
INTERVAL_MS = 500
MAX_VIEWERS = 64
# How often sessions are compared with watches; a watch that failed is tried again then.
_LOOK_S = 0.5
_RETRY_MS = 5000


class Watched(Protocol):
    """A connected scheduler: `octavo_router.session.Session`."""

    @property
    def address(self) -> str: ...
    @property
    def scheduler_id(self) -> str: ...

    def watch(self, interval_ms: int) -> AsyncIterator[bytes]: ...


@dataclass(frozen=True, slots=True)
class CellNews:
    """A cell's newest picture (UTF-8 JSON), or None: it isn't connected any more."""

    scheduler_id: str
    address: str
    picture_json: bytes | None


class Viewer:
    """One who looks; made by `LiveFeed.viewing`."""

    def __init__(self) -> None:
        self.is_over = False
        # By address; in the order of arrival.
        self._pending: dict[str, CellNews] = {}
        self._has_news = asyncio.Event()

    async def news(self) -> list[CellNews]:
        """Wait for what came since the last call; nothing if the feed is over."""
        await self._has_news.wait()
        self._has_news.clear()
        pending, self._pending = self._pending, {}
        return list(pending.values())

    def tell(self, news: CellNews) -> None:
        self._pending[news.address] = news
        self._has_news.set()

    def end(self) -> None:
        self.is_over = True
        self._has_news.set()


class LiveFeed:
    """One per router. `connected` tells the sessions that live."""

    def __init__(self, connected: Callable[[], Iterable[Watched]]) -> None:
        self._connected = connected
        self._viewers: set[Viewer] = set()
        # By address: the news that a new viewer gets at once.
        self._last: dict[str, CellNews] = {}
        self._keeper: asyncio.Task[None] | None = None
        self._is_closed = False

    @contextmanager
    def viewing(self) -> Generator[Viewer]:
        """Look until the block ends. Raises OverloadedError, UnavailableError."""
        if self._is_closed:
            raise UnavailableError("the router is shutting down", retry_after_ms=_RETRY_MS)
        if len(self._viewers) >= MAX_VIEWERS:
            raise OverloadedError(
                f"{MAX_VIEWERS} look at this router's status page already",
                retry_after_ms=_RETRY_MS,
            )
        viewer = Viewer()
        for news in self._last.values():
            viewer.tell(news)
        self._viewers.add(viewer)
        if len(self._viewers) == 1:
            self._keeper = asyncio.create_task(self._keep_watching())
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)
            if not self._viewers and self._keeper is not None:
                self._keeper.cancel()
                self._last = {}

    def close(self) -> None:
        """The router drains: nobody looks any more."""
        self._is_closed = True
        for viewer in self._viewers:
            viewer.end()

    async def _keep_watching(self) -> None:
        """A watch for each connected cell, until cancelled."""
        watches: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                connected = {session.address: session for session in self._connected()}
                for address in [a for a, task in watches.items() if task.done()]:
                    del watches[address]
                for address, session in connected.items():
                    if address not in watches:
                        watches[address] = asyncio.create_task(self._watch(session))
                for address in self._last.keys() - connected.keys():
                    gone = self._last.pop(address)
                    self._tell(CellNews(gone.scheduler_id, address, None))
                await asyncio.sleep(_LOOK_S)
        finally:
            for task in watches.values():
                task.cancel()
            await asyncio.gather(*watches.values(), return_exceptions=True)

    async def _watch(self, session: Watched) -> None:
        """Relay until the stream ends, however it does: a lost scheduler is its session's to
        report."""
        try:
            async for picture_json in session.watch(INTERVAL_MS):
                news = CellNews(session.scheduler_id, session.address, picture_json)
                self._last[session.address] = news
                self._tell(news)
        except (grpc.RpcError, grpc.aio.UsageError, OctavoError) as error:
            log.debug("scheduler %s: no pictures: %s", session.scheduler_id, error)

    def _tell(self, news: CellNews) -> None:
        for viewer in self._viewers:
            viewer.tell(news)
