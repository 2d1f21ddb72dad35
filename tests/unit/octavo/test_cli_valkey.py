"""octavo.cli.valkey: a server that ends comes back; one that can't is said, and tried again."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import redis

from octavo import embedded_valkey
from octavo.cli import valkey as keeper_module
from octavo.cli.console import Console
from octavo.cli.valkey import ValkeyKeeper
from octavo.embedded_valkey import EmbeddedValkey


class Log(Console):
    """Keeps the lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def log(self, name: str, line: str) -> None:
        self.lines.append(f"{name}: {line}")

    def count(self, text: str) -> int:
        return sum(text in line for line in self.lines)


def _pid(url: str) -> int:
    with redis.Redis(unix_socket_path=url.removeprefix("unix://")) as client:
        return int(client.info("server")["process_id"])


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.01)


def _run(scenario: Callable[[ValkeyKeeper, Log], Awaitable[None]]) -> Log:
    log = Log()

    async def main() -> None:
        keeper = ValkeyKeeper(log)
        try:
            await scenario(keeper, log)
        finally:
            await keeper.stop()

    asyncio.run(main())
    return log


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "_FIRST_DELAY_S", 0.05)
    monkeypatch.setattr(keeper_module, "_POLL_S", 0.02)


def test_it_is_tried_again_until_it_runs() -> None:
    made: list[EmbeddedValkey] = []
    restart = EmbeddedValkey.restart

    def counted(self: EmbeddedValkey) -> None:
        made.append(self)
        if len(made) < 3:
            self._binary = Path("/bin/false")
        else:
            self._binary = embedded_valkey.find_binary()
        restart(self)

    async def scenario(keeper: ValkeyKeeper, log: Log) -> None:
        url = await keeper.start()
        os.kill(_pid(url), signal.SIGKILL)
        await _until(lambda: log.count(f"ready: valkey on {url}") == 2)
        assert _pid(url)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmbeddedValkey, "restart", counted)
        log = _run(scenario)
    assert len(made) == 3
    assert log.count("octavo: WARNING valkey doesn't start again: /bin/false doesn't start") == 2
    delays = [line.rsplit(" ", 2)[1] for line in log.lines if "valkey ended" in line]
    assert delays == ["0.1", "0.1", "0.2"]
    folders = [line.removeprefix("valkey: ready: valkey on unix://") for line in log.lines]
    assert not any(Path(folder).exists() for folder in folders if folder.startswith("/"))


def test_without_a_binary_there_is_no_url_and_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_valkey, "files", lambda _: [])
    monkeypatch.setenv("PATH", "")

    async def scenario(keeper: ValkeyKeeper, log: Log) -> None:
        assert await keeper.start() == ""

    log = _run(scenario)
    assert len(log.lines) == 1
    assert log.lines[0].startswith("octavo: WARNING going on without Redis: no Valkey server")


def test_stopping_while_it_is_down_starts_nothing() -> None:
    async def scenario(keeper: ValkeyKeeper, log: Log) -> None:
        url = await keeper.start()
        os.kill(_pid(url), signal.SIGKILL)
        await _until(lambda: log.count("valkey ended") == 1)
        await keeper.stop()
        assert not Path(url.removeprefix("unix://")).parent.exists()

    assert _run(scenario).count("ready") == 1
