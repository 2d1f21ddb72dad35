"""`octavo top`: what the cells do, live in the terminal or once for a script.

Read first: `_run`. Must not know: services; pictures come over gRPC or from a router.
Entry point: `main`.
"""

import argparse
import asyncio
import os
import sys
import termios
import tty
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live

from octavo.cli.openai_url import DEFAULT_URL, api_base, api_key
from octavo.cli.top_board import Board
from octavo.cli.top_screen import screen_of
from octavo.cli.top_sources import watch_registry, watch_router, watch_schedulers
from octavo.errors import ConfigurationError, UnavailableError
from octavo.registry import open_registry
from octavo.security import Security
from octavo.settings import CommonSettings, load

_REDIS_VARIABLE = "OCTAVO_REDIS_URL"
# How long --once waits for every cell.
_ONCE_S = 5.0
_ONCE_INTERVAL_MS = 500
_POLL_S = 0.05


def main(argv: list[str] | None = None) -> int:
    """Show the cells until `q` or Ctrl-C; with --once their state, and 1 if one isn't seen."""
    arguments = _parse(argv)
    if not 0.1 <= arguments.interval <= 60:
        raise ConfigurationError(f"--interval {arguments.interval:g}: must be 0.1 to 60 seconds")
    board = Board()
    console = Console()
    if arguments.once:
        asyncio.run(_until_complete(_source(arguments, board, _ONCE_INTERVAL_MS), board))
        console.print(screen_of(board, console.width))
        return int(any(sight.problem for sight in board.sights.values()))
    if not (console.is_terminal and sys.stdin.isatty()):
        raise ConfigurationError("this is no terminal: say --once for one picture")
    source = _source(arguments, board, int(1000 * arguments.interval))
    asyncio.run(_run(source, board, console, arguments.interval))
    return 0


def _source(
    arguments: argparse.Namespace, board: Board, interval_ms: int
) -> Coroutine[Any, Any, None]:
    """What fills the board, for ever."""
    if arguments.schedulers:
        addresses = [part.strip() for part in arguments.schedulers.split(",") if part.strip()]
        return watch_schedulers(addresses, board, interval_ms, _security())
    if arguments.redis_url is not None:
        url = arguments.redis_url or os.environ.get(_REDIS_VARIABLE, "")
        if not url:
            raise ConfigurationError(f"--redis-url: say a URL, or set ${_REDIS_VARIABLE}")
        return watch_registry(open_registry(url, arguments.fleet), board, interval_ms, _security())
    base = api_base(arguments.url).removesuffix("/v1")
    return watch_router(base, api_key(arguments.api_key), board)


def _security() -> Security:
    """Certificates and token as services have them: from the environment."""
    return Security.of(load(CommonSettings))


async def _until_complete(source: Coroutine[Any, Any, None], board: Board) -> None:
    """Fill the board until every cell is seen. Raises UnavailableError if none is in time."""
    task = asyncio.create_task(source)
    try:
        async with asyncio.timeout(_ONCE_S):
            while not (board.is_complete or task.done()):  # noqa: ASYNC110 - any source's state
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        if not board.pictures:
            raise UnavailableError(board.problem or "no cell is seen") from None
    finally:
        await _end(task)


async def _run(
    source: Coroutine[Any, Any, None], board: Board, console: Console, interval_s: float
) -> None:
    """Fill the board and draw it, until somebody wants to leave or the source fails."""
    task = asyncio.create_task(source)
    is_leaving = asyncio.Event()
    try:
        with (
            _keys(is_leaving),
            Live(console=console, screen=True, auto_refresh=False) as live,
        ):
            while not (is_leaving.is_set() or task.done()):
                live.update(screen_of(board, console.width, console.height), refresh=True)
                try:
                    async with asyncio.timeout(min(interval_s, 1.0)):
                        await is_leaving.wait()
                except TimeoutError:
                    continue
    finally:
        await _end(task)


async def _end(task: "asyncio.Task[None]") -> None:
    """Stop the source; what ended it by itself is raised."""
    is_failed = task.done()
    task.cancel()
    await asyncio.wait([task])
    if is_failed:
        task.result()


@contextmanager
def _keys(is_leaving: asyncio.Event) -> Generator[None]:
    """Keys are read one by one until the block ends: `q` leaves."""
    descriptor = sys.stdin.fileno()
    loop = asyncio.get_running_loop()
    before = termios.tcgetattr(descriptor)

    def read() -> None:
        typed = os.read(descriptor, 64)
        # Nothing: the terminal is gone.
        if not typed or b"q" in typed.lower():
            is_leaving.set()

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="octavo top",
        description="Watch workers, queue and requests of running cells. q leaves.",
        epilog="Schedulers are asked with the certificates and the token of the environment "
        "(OCTAVO_TLS_..., OCTAVO_INTERNAL_TOKEN).",
    )
    sources = parser.add_mutually_exclusive_group()
    sources.add_argument(
        "--url", default=DEFAULT_URL, help=f"all cells of this router [{DEFAULT_URL}]"
    )
    sources.add_argument("--schedulers", metavar="ADDRESS,...", help="these schedulers")
    sources.add_argument(
        "--redis-url",
        nargs="?",
        const="",
        metavar="URL",
        help=f"all schedulers registered there [${_REDIS_VARIABLE}]",
    )
    parser.add_argument("--fleet", default="default", help="the fleet's name in Redis [default]")
    parser.add_argument("--api-key", help="the router's key [$OCTAVO_API_KEY or $OPENAI_API_KEY]")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="between pictures [1]"
    )
    parser.add_argument("--once", action="store_true", help="print one picture and end")
    return parser.parse_args(argv)
