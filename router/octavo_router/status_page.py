"""The status page: its files, and the stream of events that feeds it.

The files (`ui/`) hold no state and need no key; the feed does, as every API path. Nothing that
the page loads comes from elsewhere, and its policy for the browser says so.

    event      data
    router     who serves: id, version, model names, connected cells; first and once
    cell       a cell's picture: {"scheduler_id", "address", "picture"}
    lost       a cell is not connected any more: {"scheduler_id", "address"}

Must not know: schedulers, what a picture shows. Entry points: `add_status_page`, `OPEN_PATHS`.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from importlib.resources import files

from fastapi import FastAPI, Request
from starlette.responses import RedirectResponse, Response
from starlette.types import Receive, Scope, Send

import octavo
from octavo_router.live_feed import CellNews, LiveFeed, Viewer
from octavo_router.service import Service
from octavo_router.sse import KEEP_ALIVE, KEEP_ALIVE_S, dumps

PAGE = "index.html"
_FOLDER = "ui"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_NAMES = (
    *(PAGE, "style.css", "icon.svg", "main.js", "feed.js", "dom.js", "cells.js", "charts.js"),
    *("block_map.js", "requests.js", "chat.js", "key.js", "events.js"),
)
# What needs no key: the page must be there to ask for one.
OPEN_PATHS = frozenset({"/ui", "/ui/", *(f"/ui/{name}" for name in _NAMES if name != PAGE)})
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_FEED_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def add_status_page(app: FastAPI, service: Service) -> None:
    """Add `/ui`, its files and `/ui/feed` to the application."""
    folder = files(__package__ or "octavo_router").joinpath(_FOLDER)
    contents = {name: folder.joinpath(name).read_bytes() for name in _NAMES}

    def answer(name: str, request: Request) -> Response:
        body = contents[name]
        tag = f'"{hashlib.blake2b(body, digest_size=8).hexdigest()}"'
        headers = {**_HEADERS, "ETag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=_TYPES[name.rpartition(".")[2]], headers=headers)

    @app.get("/ui", include_in_schema=False)
    async def page(request: Request) -> Response:
        return answer(PAGE, request)

    @app.get("/ui/", include_in_schema=False)
    async def elsewhere() -> Response:
        # Links of the page are relative, so that it works behind a proxy's prefix.
        return RedirectResponse("../ui")

    @app.get("/ui/feed", include_in_schema=False)
    async def feed() -> Response:
        return FeedStream(service)

    def add_file(name: str) -> None:
        async def file(request: Request) -> Response:
            return answer(name, request)

        app.get(f"/ui/{name}", include_in_schema=False)(file)

    for name in contents.keys() - {PAGE}:
        add_file(name)


class FeedStream(Response):
    """The ASGI response that shows one viewer the feed until either leaves."""

    def __init__(self, service: Service) -> None:
        super().__init__(headers=_FEED_HEADERS, media_type="text/event-stream")
        del self.headers["content-length"]
        self._feed: LiveFeed = service.feed
        self._first = _event(
            "router",
            dumps(
                {
                    "router_id": service.sessions.router_id,
                    "version": octavo.__version__,
                    "models": list(service.model_names),
                    "cells": [
                        {"scheduler_id": session.scheduler_id, "address": session.address}
                        for session in service.sessions.connected()
                    ],
                }
            ).encode(),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        with self._feed.viewing() as viewer:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            writing = asyncio.create_task(self._write(viewer, send))
            leaving = asyncio.create_task(_disconnected(receive))
            try:
                await asyncio.wait([writing, leaving], return_when=asyncio.FIRST_COMPLETED)
            finally:
                leaving.cancel()
                writing.cancel()
                await asyncio.gather(writing, leaving, return_exceptions=True)
            if not writing.cancelled():
                writing.result()

    async def _write(self, viewer: Viewer, send: Send) -> None:
        async for data in self._events(viewer):
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, viewer: Viewer) -> AsyncIterator[bytes]:
        yield self._first
        while not viewer.is_over:
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    news = await viewer.news()
            except TimeoutError:
                yield KEEP_ALIVE
                continue
            if news:
                yield b"".join(map(_news_event, news))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _news_event(news: CellNews) -> bytes:
    who = dumps({"scheduler_id": news.scheduler_id, "address": news.address}).encode()
    if news.picture_json is None:
        return _event("lost", who)
    return _event("cell", b'%s,"picture":%s}' % (who[:-1], news.picture_json))


def _event(name: str, data: bytes) -> bytes:
    # JSON has line ends only between its tokens.
    one_line = data.replace(b"\r", b" ").replace(b"\n", b" ")
    return b"event: %s\ndata: %s\n\n" % (name.encode(), one_line)
