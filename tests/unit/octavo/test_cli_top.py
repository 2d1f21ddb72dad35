"""`octavo top`: pictures from schedulers, a registry or a router, on 80 columns."""

import asyncio
import os
import pty
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from octavo.cli.top import main
from octavo.cli.top_board import Board
from octavo.cli.top_screen import screen_of
from octavo.cli.top_sources import watch_registry, watch_router, watch_schedulers
from octavo.errors import AuthenticationError, ConfigurationError, OctavoError, UnavailableError
from octavo.registry import MemoryRegistry, MemoryStore, SchedulerRecord
from octavo.security import OPEN
from tests.fakes.fake_scheduler import FakeScheduler
from tests.fakes.router_process import GUARD_S, byte_scheduler, running_router, until

REPOSITORY = Path(__file__).parents[3]


def worker(worker_id: str, **changes: Any) -> dict[str, Any]:
    numbers = {
        "worker_id": worker_id,
        "phase": "running",
        "address": "10.0.0.1:8200",
        "epoch": 2,
        "num_rows": 12,
        "max_num_seqs": 256,
        "num_blocks": 1000,
        "num_used_blocks": 300,
        "num_shared_blocks": 100,
        "num_cached_blocks": 200,
        "decode_tokens_per_s": 1234.5,
        "prefill_tokens_per_s": 99.0,
        "decode_step_ms": 7.25,
    }
    return {**numbers, **changes}


PICTURE = {
    "scheduler_id": "cell-1",
    "num_running": 12,
    "num_waiting": 3,
    "queue_tokens": 4096,
    "oldest_wait_s": 2.5,
    "prefix_queries": 200,
    "prefix_hits": 150,
    "num_preemptions": 1,
    "num_moves": 4,
    "workers": [worker("worker-1"), worker("worker-0", phase="leaving")],
    "requests": [
        {
            "request_id": "req-1",
            "phase": "decode",
            "worker_id": "worker-0",
            "why": "cached prefix",
            "num_prompt_tokens": 100,
            "num_cached_tokens": 64,
            "num_generated_tokens": 5,
            "ttft_ms": 12.0,
            "queue_ms": 1.0,
            "age_s": 3.0,
        },
        {"request_id": "req-2", "phase": "ended", "outcome": "length", "age_s": 1.0},
    ],
}


def shown(board: Board, width: int = 80, height: int | None = None) -> list[str]:
    console = Console(width=width, record=True, file=open(os.devnull, "w"), force_terminal=False)  # noqa: SIM115
    with console.file:
        console.print(screen_of(board, width, height))
        return console.export_text().splitlines()


def board_of(*pictures: dict[str, Any]) -> Board:
    board = Board()
    for number, picture in enumerate(pictures):
        board.show(f"10.0.0.9:{number}", f"cell-{number}", picture)
    return board


# ---- the screen


def test_a_cell_on_80_columns() -> None:
    lines = shown(board_of(PICTURE))
    assert max(map(len, lines)) <= 80
    assert lines[0] == (
        "octavo  2,469 tok/s  198 prompt/s  12 running  3 waiting  30 % KV  75 % hits"
    )
    cell = next(line for line in lines if line.startswith("cell-0"))
    assert "serving  4,096 tokens queued, oldest 2.5 s  1 preempted  4 moved" in cell
    table = [line.split() for line in lines if line.startswith("worker-")]
    assert table[0][:5] == ["worker-0", "leaving", "2", "12/256", "██▓▒▒░░░░░░░"]
    assert table[0][5:] == ["30", "%", "1,234", "99", "7.2", "ms"]
    requests = [line.split()[:4] for line in lines if line.startswith("req-")]
    assert requests == [
        ["req-2", "length", "–", "0"],
        ["req-1", "decode", "worker-0", "cached"],
    ]


@pytest.mark.parametrize("width", [80, 100, 132, 200])
def test_long_names_and_large_numbers_stay_within_the_width(width: int) -> None:
    large = worker(
        "worker-of-a-very-long-name-indeed-0",
        **{"num_rows": 4096, "max_num_seqs": 4096, "decode_tokens_per_s": 123_456.0},
        **{"prefill_tokens_per_s": 1_234_567.0, "epoch": 12_345, "decode_step_ms": 123_456.0},
    )
    request = {**PICTURE["requests"][0], "request_id": "r" * 128, "num_prompt_tokens": 1_000_000}  # type: ignore[index]
    picture = {**PICTURE, "workers": [large], "requests": [request], "queue_tokens": 10**12}
    assert max(map(len, shown(board_of(picture), width))) <= width


def test_requests_fill_what_the_terminal_has_left() -> None:
    requests = [{"request_id": f"req-{i}", "age_s": i} for i in range(50)]
    board = board_of({**PICTURE, "requests": requests})
    assert len(shown(board, height=24)) <= 24
    assert sum(line.startswith("req-") for line in shown(board, height=24)) >= 8
    assert sum(line.startswith("req-") for line in shown(board)) == 50
    assert not any(line.startswith("req-") for line in shown(board, height=8))


def test_lost_workers_and_cells_are_shown_as_such() -> None:
    gone = {"worker_id": "worker-9", "phase": "gone", "loss": "crash", "gone_s": 12.4}
    awaited = {"worker_id": "", "phase": "awaited", "address": "10.0.0.7:8200"}
    board = board_of({**PICTURE, "workers": [gone, awaited]}, PICTURE)
    board.fail("10.0.0.9:1", "connection\x1b[31m refused")
    text = "\n".join(shown(board))
    assert "worker-9" in text
    assert "crash, 12 s ago" in text
    assert "awaited" in text
    assert "cell-1  10.0.0.9:1  connection[31m refused" in text
    assert "\x1b" not in text
    # Its numbers are old: they count no more.
    assert " 12 running" in text


def test_an_unknown_picture_shows_what_it_has() -> None:
    lines = shown(board_of({}, {"workers": [{"worker_id": "w", "phase": "running"}]}))
    assert any(line.startswith("w ") for line in lines)
    assert shown(Board())[-1] == "no cell yet"


# ---- sources


async def filled(source: Any, board: Board, is_done: Callable[[], bool]) -> None:
    task = asyncio.create_task(source)
    try:
        await until(lambda: is_done() or task.done())
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def guarded() -> None:
        async with asyncio.timeout(GUARD_S):
            await test()

    asyncio.run(guarded())


def fake_cell(name: str) -> FakeScheduler:
    fake = byte_scheduler(scheduler_id=name)
    fake.picture = {**PICTURE, "scheduler_id": name}
    return fake


def test_schedulers_are_watched_and_one_that_is_not_there_is_told() -> None:
    async def test() -> None:
        async with fake_cell("a") as fake:
            board = Board()
            source = watch_schedulers([fake.address, "127.0.0.1:9"], board, 100, OPEN)
            await filled(source, board, lambda: board.is_complete)
            assert board.pictures == [fake.picture]
            assert "connect" in board.sights["127.0.0.1:9"].problem
            await until(lambda: fake.num_watching == 0)

    run(test)


def test_registered_schedulers_come_and_go() -> None:
    async def test() -> None:
        store = MemoryStore()
        board = Board()
        async with fake_cell("a") as fake:
            cell = MemoryRegistry(store)
            cell.announce_scheduler(SchedulerRecord("a", fake.address, "m", 1, 0, 0, False))
            source = watch_registry(MemoryRegistry(store), board, 100, OPEN)

            def came() -> bool:
                return board.is_complete and fake.num_watching == 1

            task = asyncio.create_task(source)
            await until(came)
            await cell.close()
            await until(lambda: not board.sights and fake.num_watching == 0)
            assert board.problem == "no scheduler is registered"
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run(test)


def test_a_router_shows_all_its_cells() -> None:
    async def test() -> None:
        fakes = [fake_cell("a"), fake_cell("b")]
        async with running_router(*fakes, api_keys="k1") as router:
            url = f"http://127.0.0.1:{router.http_port}"
            board = Board()
            await filled(watch_router(url, "k1", board), board, lambda: len(board.pictures) == 2)
            assert {sight.scheduler_id for sight in board.sights.values()} == {"a", "b"}
            with pytest.raises(AuthenticationError, match="--api-key"):
                await filled(watch_router(url, None, Board()), board, lambda: False)
        async with running_router(ui=False, wait_ready=False) as router:
            url = f"http://127.0.0.1:{router.http_port}"
            with pytest.raises(OctavoError, match="--ui false"):
                await filled(watch_router(url, None, Board()), board, lambda: False)

    run(test)


# ---- the command


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "octavo", "top", *flags]


def test_once_prints_and_ends() -> None:
    async def test() -> None:
        async with fake_cell("a") as fake:
            process = await asyncio.create_subprocess_exec(
                *command("--once", "--schedulers", fake.address),
                stdout=subprocess.PIPE,
                cwd=REPOSITORY,
                env={**os.environ, "COLUMNS": "80"},
            )
            output, _ = await process.communicate()
            assert process.returncode == 0
            text = output.decode()
            assert "\x1b" not in text
            assert "worker-0 leaving" in text
            assert "75 % hits" in text

    run(test)


def test_once_without_a_cell_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.cli.top._ONCE_S", 2.0)
    with pytest.raises(UnavailableError, match="All connection attempts failed"):
        main(["--once", "--url", "127.0.0.1:9"])


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--interval", "0"], "--interval 0: must be 0.1 to 60 seconds"),
        (["--redis-url"], "--redis-url: say a URL"),
        ([], "say --once"),
    ],
)
def test_mistakes_are_named(
    flags: list[str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OCTAVO_REDIS_URL", raising=False)
    with pytest.raises(ConfigurationError, match=problem):
        main(["--once", *flags] if flags == ["--redis-url"] else flags)


def test_live_in_a_terminal_until_q() -> None:
    async def test() -> None:
        async with fake_cell("a") as fake:
            ours, its = pty.openpty()
            process = await asyncio.create_subprocess_exec(
                *command("--schedulers", fake.address, "--interval", "0.1"),
                stdin=its,
                stdout=its,
                cwd=REPOSITORY,
                env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"},
            )
            os.close(its)
            seen = bytearray()

            def read() -> None:
                try:
                    seen.extend(os.read(ours, 4096))
                except OSError:  # the other end is closed
                    asyncio.get_running_loop().remove_reader(ours)

            asyncio.get_running_loop().add_reader(ours, read)
            try:
                await until(lambda: b"worker-1" in seen)
                fake.picture = {**fake.picture, "workers": [worker("worker-7")]}
                await until(lambda: b"worker-7" in seen)
                os.write(ours, b"q")
                assert await process.wait() == 0
                # The screen from before is back.
                await until(lambda: b"\x1b[?1049l" in seen)
            finally:
                asyncio.get_running_loop().remove_reader(ours)
                if process.returncode is None:
                    process.kill()
                    await process.wait()
                os.close(ours)

    run(test)
