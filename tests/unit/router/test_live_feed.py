"""Relaying pictures: one watch per cell however many look, none when nobody does."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.errors import OverloadedError, UnavailableError
from octavo_router import live_feed, status_page
from octavo_router.live_feed import CellNews, LiveFeed
from tests.fakes.router_process import GUARD_S, RunningRouter, byte_scheduler, running_router, until


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def guarded() -> None:
        async with asyncio.timeout(GUARD_S):
            await test()

    asyncio.run(guarded())


class FakeCell:
    """A connected scheduler whose pictures the test says."""

    def __init__(self, name: str) -> None:
        self.scheduler_id = name
        self.address = f"{name}:1"
        self.num_watching = 0
        self.pictures: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def watch(self, interval_ms: int) -> AsyncIterator[bytes]:  # noqa: ARG002
        self.num_watching += 1
        try:
            while (picture := await self.pictures.get()) is not None:
                yield picture
        finally:
            self.num_watching -= 1


# ---- the feed alone


def test_viewers_share_a_watch_which_ends_with_the_last() -> None:
    async def test() -> None:
        cell = FakeCell("a")
        feed = LiveFeed(lambda: [cell])
        with feed.viewing() as first:
            await until(lambda: cell.num_watching == 1)
            cell.pictures.put_nowait(b"1")
            assert await first.news() == [CellNews("a", "a:1", b"1")]
            with feed.viewing() as second:
                # Who comes later need not wait for the next picture.
                assert await second.news() == [CellNews("a", "a:1", b"1")]
                cell.pictures.put_nowait(b"2")
                for viewer in (first, second):
                    assert await viewer.news() == [CellNews("a", "a:1", b"2")]
                assert cell.num_watching == 1
            assert cell.num_watching == 1
        await until(lambda: cell.num_watching == 0)
        with feed.viewing() as third:
            await until(lambda: cell.num_watching == 1)
            cell.pictures.put_nowait(b"3")
            # Nothing old is left.
            assert await third.news() == [CellNews("a", "a:1", b"3")]
        await until(lambda: cell.num_watching == 0)

    run(test)


def test_a_slow_viewer_gets_the_newest_of_each_cell() -> None:
    async def test() -> None:
        cells = [FakeCell("a"), FakeCell("b")]
        feed = LiveFeed(lambda: cells)
        with feed.viewing() as slow:
            for i in range(100):
                for cell in cells:
                    cell.pictures.put_nowait(b"%d" % i)
            await until(lambda: all(cell.pictures.empty() for cell in cells))
            await asyncio.sleep(0)
            news = {item.scheduler_id: item.picture_json for item in await slow.news()}
            assert news == {"a": b"99", "b": b"99"}

    run(test)


def test_cells_come_go_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_feed, "_LOOK_S", 0.01)

    async def test() -> None:
        first, other = FakeCell("a"), FakeCell("b")
        connected = [first]
        feed = LiveFeed(lambda: connected)
        with feed.viewing() as viewer:
            first.pictures.put_nowait(b"1")
            assert await viewer.news() == [CellNews("a", "a:1", b"1")]
            connected.append(other)
            other.pictures.put_nowait(b"2")
            assert await viewer.news() == [CellNews("b", "b:1", b"2")]
            connected.remove(first)
            first.pictures.put_nowait(None)
            assert await viewer.news() == [CellNews("a", "a:1", None)]
            connected.append(first)
            first.pictures.put_nowait(b"3")
            assert await viewer.news() == [CellNews("a", "a:1", b"3")]
            # A watch that ended while its session lives is begun again.
            first.pictures.put_nowait(None)
            first.pictures.put_nowait(b"4")
            assert await viewer.news() == [CellNews("a", "a:1", b"4")]

    run(test)


def test_viewers_are_bounded_and_end_with_the_router() -> None:
    async def test() -> None:
        feed = LiveFeed(list)
        with ExitStack() as stack:
            viewers = [stack.enter_context(feed.viewing()) for _ in range(live_feed.MAX_VIEWERS)]
            with pytest.raises(OverloadedError, match="64"), feed.viewing():
                pass
            feed.close()
            assert await viewers[0].news() == []
            assert viewers[0].is_over
        with pytest.raises(UnavailableError), feed.viewing():
            pass

    run(test)


# ---- over HTTP


@asynccontextmanager
async def looking(
    router: RunningRouter, **headers: str
) -> AsyncGenerator[AsyncIterator[tuple[str, Any]]]:
    """The feed's events, parsed."""
    async with router.http.stream("GET", "/ui/feed", headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield _events(answer)


async def _events(answer: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
    name = ""
    async for line in answer.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def test_the_feed_names_the_router_then_shows_cells() -> None:
    async def test() -> None:
        fake = byte_scheduler(scheduler_id="cell-1")
        fake.picture = {"workers": [{"worker_id": "w\u2028\n<b>"}]}
        async with running_router(fake) as router:
            assert fake.num_watches == 0
            async with looking(router) as events, looking(router) as others:
                name, who = await anext(events)
                assert (name, who["models"]) == ("router", ["byte-model"])
                assert who["cells"] == [{"scheduler_id": "cell-1", "address": fake.address}]
                for stream in (events, others):
                    news = next_of(stream, "cell")
                    assert await news == {
                        "scheduler_id": "cell-1",
                        "address": fake.address,
                        "picture": fake.picture,
                    }
                assert (fake.num_watching, fake.num_watches) == (1, 1)
                await fake.stop()
                assert await next_of(events, "lost") == {
                    "scheduler_id": "cell-1",
                    "address": fake.address,
                }
            await until(lambda: fake.num_watching == 0)

    run(test)


async def next_of(events: AsyncIterator[tuple[str, Any]], wanted: str) -> Any:
    async for name, data in events:
        if name == wanted:
            return data
    raise AssertionError(f"the stream ended before {wanted}")


def test_state_needs_the_key_and_the_page_does_not() -> None:
    async def test() -> None:
        fake = byte_scheduler()
        async with running_router(fake, api_keys="k1:alice") as router:
            for path in status_page.OPEN_PATHS:
                answer = await router.http.get(path, follow_redirects=True)
                assert answer.status_code == 200, path
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                answer = await router.http.get("/ui/feed", headers=headers)
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
            assert fake.num_watches == 0
            async with looking(router, Authorization="Bearer k1") as events:
                assert (await anext(events))[0] == "router"

    run(test)


def test_a_draining_router_ends_its_viewers() -> None:
    async def test() -> None:
        async with running_router(byte_scheduler()) as router, looking(router) as events:
            await next_of(events, "cell")
            router.service.feed.close()
            async for _ in events:
                pass
            answer = await router.http.get("/ui/feed")
            assert answer.status_code == 503

    run(test)


def test_the_page_can_be_switched_off() -> None:
    async def test() -> None:
        async with running_router(byte_scheduler(), ui=False) as router:
            for path in ("/ui", "/ui/main.js", "/ui/feed"):
                assert (await router.http.get(path)).status_code == 404

    run(test)


def test_files_are_served_with_a_strict_policy_and_known_names_only() -> None:
    async def test() -> None:
        async with running_router(byte_scheduler()) as router:
            page = await router.http.get("/ui")
            assert page.headers["content-type"] == "text/html; charset=utf-8"
            policy = dict(
                part.split(" ", 1) for part in page.headers["content-security-policy"].split("; ")
            )
            assert policy["default-src"] == policy["base-uri"] == "'none'"
            assert policy["script-src"] == policy["connect-src"] == "'self'"
            assert page.headers["x-content-type-options"] == "nosniff"
            again = await router.http.get("/ui", headers={"If-None-Match": page.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            slash = await router.http.get("/ui/")
            assert (slash.status_code, slash.headers["location"]) == (307, "../ui")
            script = await router.http.get("/ui/main.js")
            assert script.headers["content-type"] == "text/javascript; charset=utf-8"
            for path in ("/ui/index.html", "/ui/../app.py", "/ui/%2e%2e/app.py", "/ui/none.js"):
                assert (await router.http.get(path)).status_code == 404

    run(test)


FOLDER = Path(str(files("octavo_router"))) / "ui"


def test_every_file_of_the_page_is_served() -> None:
    served = {path.removeprefix("/ui/") for path in status_page.OPEN_PATHS} - {"/ui", ""}
    assert {path.name for path in FOLDER.iterdir()} == served | {status_page.PAGE}


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_no_file_makes_markup_of_data_or_loads_from_elsewhere(path: Path) -> None:
    text = path.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert word not in text
    assert "://" not in text
    assert "style=" not in text
