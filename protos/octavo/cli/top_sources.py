"""Where `octavo top` has its pictures from: schedulers themselves, or a router's `/ui/feed`.

Every source runs until it is cancelled, and tries again whatever fails. Must not know: terminals.
Entry points: `watch_schedulers`, `watch_registry`, `watch_router`.
"""

import asyncio
import json
from collections.abc import Sequence

import grpc
import httpx

from octavo.cli.top_board import Board
from octavo.errors import AuthenticationError, OctavoError
from octavo.registry import Registry
from octavo.security import Security
from octavo.serving import open_channel
from octavo.v1 import scheduler_pb2, scheduler_pb2_grpc

_RETRY_S = 1.0
_DISCOVERY_S = 0.5
# A router says something every 15 s at least.
_TIMEOUT = httpx.Timeout(20.0, connect=5.0)
_MAX_PROBLEM_CHARACTERS = 200


async def watch_schedulers(
    addresses: Sequence[str], board: Board, interval_ms: int, security: Security
) -> None:
    """Watch these schedulers."""
    for address in addresses:
        board.expect(address)
    async with asyncio.TaskGroup() as tasks:
        for address in addresses:
            tasks.create_task(_watch_scheduler(address, board, interval_ms, security))


async def watch_registry(
    registry: Registry, board: Board, interval_ms: int, security: Security
) -> None:
    """Watch the schedulers that are registered; `registry` is started and closed here."""
    await registry.start()
    watches: dict[str, asyncio.Task[None]] = {}
    try:
        while True:
            known = {record.address for record in registry.schedulers()}
            for address in known - watches.keys():
                board.expect(address)
                watch = _watch_scheduler(address, board, interval_ms, security)
                watches[address] = asyncio.create_task(watch)
            for address in watches.keys() - known:
                watches.pop(address).cancel()
                board.forget(address)
            board.problem = "" if known else "no scheduler is registered"
            await asyncio.sleep(_DISCOVERY_S)
    finally:
        for watch in watches.values():
            watch.cancel()
        await asyncio.gather(*watches.values(), return_exceptions=True)
        await registry.close()


async def _watch_scheduler(
    address: str, board: Board, interval_ms: int, security: Security
) -> None:
    request = scheduler_pb2.SchedulerWatchRequest(interval_ms=interval_ms)
    while True:
        problem = "the scheduler ended the stream"
        try:
            async with open_channel(address, security) as channel:
                call = scheduler_pb2_grpc.SchedulerStub(channel).Watch(request)
                async for response in call:
                    picture = json.loads(response.picture_json)
                    board.show(address, str(picture.get("scheduler_id", "")), picture)
        except grpc.RpcError as error:
            problem = str(error.details() or error.code().name)  # type: ignore[attr-defined]
        except asyncio.CancelledError:
            # gRPC raises it too for a call that the server cancelled.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
        except ValueError:
            problem = "a picture isn't JSON"
        except OctavoError as error:
            # Certificates that are just being renewed.
            problem = error.message
        board.fail(address, _short(problem))
        await asyncio.sleep(_RETRY_S)


async def watch_router(url: str, api_key: str | None, board: Board) -> None:
    """Watch all cells that the router at `url` is connected to.

    Raises AuthenticationError if the key isn't right, OctavoError if it serves no feed.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with httpx.AsyncClient(timeout=_TIMEOUT, headers=headers) as client:
        while True:
            try:
                async with client.stream("GET", f"{url}/ui/feed") as answer:
                    _check(answer, url)
                    await _read_feed(answer, board)
                problem = "the router ended the stream"
            except httpx.HTTPError as error:
                problem = str(error) or type(error).__name__
            except ValueError:
                problem = "an event isn't JSON"
            board.problem = _short(f"{url}: {problem}")
            for address in board.sights:
                board.fail(address, "the router isn't reached")
            await asyncio.sleep(_RETRY_S)


def _check(answer: httpx.Response, url: str) -> None:
    if answer.status_code == 401:
        raise AuthenticationError(
            f"{url} wants an API key that it knows: --api-key or $OCTAVO_API_KEY"
        )
    if answer.status_code == 404:
        raise OctavoError(f"{url} has no status page (--ui false?); watch its schedulers instead")
    answer.raise_for_status()


async def _read_feed(answer: httpx.Response, board: Board) -> None:
    name = ""
    async for line in answer.aiter_lines():
        if line.startswith("event:"):
            name = line.removeprefix("event:").strip()
        elif line.startswith("data:"):
            data = json.loads(line.removeprefix("data:"))
            if name == "router":
                for cell in data.get("cells", ()):
                    board.expect(cell["address"])
            elif name == "cell":
                board.show(data["address"], data["scheduler_id"], data["picture"])
            elif name == "lost":
                board.fail(data["address"], "the router isn't connected to it")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line[:_MAX_PROBLEM_CHARACTERS]
