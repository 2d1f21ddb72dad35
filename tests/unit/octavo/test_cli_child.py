"""octavo.cli.child and restart: real processes, kept running until they are stopped."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from octavo.cli.child import Child, ChildSpec, CrashLoopError
from octavo.cli.console import Console
from octavo.cli.parent import DIE_WITH_PARENT
from octavo.cli.restart import MAX_FAST_EXITS, RestartPolicy
from octavo.errors import ConfigurationError

# Announces itself as services do, then waits for SIGTERM.
SERVICE = """
import signal, sys, time
from octavo.serving import announce_ready
signal.signal(signal.SIGTERM, lambda *_: (print("bye", flush=True), sys.exit(0)))
print("up", flush=True)
announce_ready(port=1234)
while True: time.sleep(60)
"""
# Refuses to end when asked.
STUBBORN = SERVICE.replace('(print("bye", flush=True), sys.exit(0))', "None")


class Log(Console):
    """Keeps the lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def log(self, name: str, line: str) -> None:
        self.lines.append((name, line))


def _child(tmp_path: Path, code: str, log: Log | None = None) -> Child:
    spec = ChildSpec("service", (sys.executable, "-c", code))
    return Child(spec, log or Log(), tmp_path)


async def _until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("did not come true")


def _run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario()

    asyncio.run(main())


def test_starts_passes_lines_on_and_stops(tmp_path: Path) -> None:
    log = Log()
    child = _child(tmp_path, SERVICE, log)

    async def scenario() -> None:
        running = asyncio.create_task(child.run())
        await _until(lambda: child.ports is not None)
        assert child.ports is not None
        assert child.ports["port"] == 1234
        await child.stop(10)
        await running

    _run(scenario)
    assert log.lines == [("service", "up"), ("service", "bye")]
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_is_started_again(tmp_path: Path) -> None:
    log = Log()
    child = _child(tmp_path, SERVICE, log)

    async def scenario() -> None:
        running = asyncio.create_task(child.run())
        await _until(lambda: child.ports is not None)
        first = child.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await _until(lambda: child.pid not in (None, first) and child.ports is not None)
        await child.stop(10)
        await running

    _run(scenario)
    (notice,) = [line for name, line in log.lines if name == "octavo"]
    assert "(signal 9); again in 0.5 s" in notice


def test_one_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    log = Log()
    child = _child(tmp_path, STUBBORN, log)

    async def scenario() -> None:
        running = asyncio.create_task(child.run())
        await _until(lambda: child.ports is not None)
        await child.stop(0.2)
        await running

    _run(scenario)
    assert "did not end within 0 s: killed" in log.lines[-1][1]


def test_stop_between_two_lives_does_not_wait_for_the_next(tmp_path: Path) -> None:
    log = Log()
    child = _child(tmp_path, "raise SystemExit(7)", log)

    async def scenario() -> None:
        running = asyncio.create_task(child.run())
        await _until(lambda: any("status 7" in line for _, line in log.lines))
        await child.stop(10)
        await running

    _run(scenario)
    assert len(log.lines) == 1


def test_a_configuration_mistake_is_not_tried_again(tmp_path: Path) -> None:
    code = "print('OCTAVO_PORT=x is wrong'); raise SystemExit(2)"
    with pytest.raises(ConfigurationError, match=r"(?s)refused to start.*OCTAVO_PORT=x"):
        asyncio.run(_child(tmp_path, code).run())


def test_a_mistake_that_a_service_names_is_told_without_its_log(tmp_path: Path) -> None:
    lines = (
        "12:00:00 INFO    worker octavo_worker: loading",
        "octavo worker: A=x: wrong",
        "or: so",
    )
    code = f"print({chr(10).join(lines)!r}); raise SystemExit(2)"
    with pytest.raises(ConfigurationError) as caught:
        asyncio.run(_child(tmp_path, code).run())
    _, *said = caught.value.message.splitlines()
    assert said == ["    octavo worker: A=x: wrong", "    or: so"]


def test_a_crash_loop_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.cli.restart._FIRST_DELAY_S", 0.01)
    code = "print('out of memory'); raise SystemExit(1)"
    with pytest.raises(CrashLoopError, match=r"(?s)5 times in a row.*out of memory"):
        asyncio.run(_child(tmp_path, code).run())


def test_long_lines_and_broken_bytes_do_not_stop_the_log(tmp_path: Path) -> None:
    log = Log()
    code = (
        "import sys; out = sys.stdout.buffer\n"
        "out.write(b'x' * (3 << 20) + b'\\n'); out.write(b'caf\\xe9\\n')\n"
        "out.write(b' 10 %\\r 90 %\\r100 %\\n'); out.flush(); sys.exit(2)"
    )
    with pytest.raises(ConfigurationError):
        asyncio.run(_child(tmp_path, code, log).run())
    assert [line for _, line in log.lines][-2:] == ["caf\ufffd", "100 %"]


@pytest.mark.parametrize("platform", [sys.platform, "darwin"])
def test_a_child_dies_with_its_parent(platform: str, tmp_path: Path) -> None:
    """kill -9 of the parent: no signal handler of its can tell the child."""
    service = tmp_path / "octavo_sleeper.py"
    service.write_text(
        "import os, sys, time\n"
        "def main(argv):\n    print(os.getpid(), flush=True)\n    time.sleep(600)\n"
    )
    parent = (
        "import os, subprocess, sys, time\n"
        "code = 'import os, sys; sys.platform = os.environ[\"PLATFORM\"];'"
        "'from octavo.cli.main import COMMANDS, Command, main;'"
        ' \'COMMANDS["sleep"] = Command("octavo_sleeper", "", ""); main(["sleep"])\'\n'
        f"env = {{**os.environ, {DIE_WITH_PARENT!r}: str(os.getpid())}}\n"
        "subprocess.Popen([sys.executable, '-c', code], env=env)\n"
        "time.sleep(600)\n"
    )
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "PLATFORM": platform}
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        assert process.stdout is not None
        child_pid = int(process.stdout.readline())
        process.kill()
        # The pipe closes when its last writer, the child, is gone.
        assert process.stdout.read() == ""
    for _ in range(500):
        if not _is_running(child_pid):
            return
        time.sleep(0.01)
    raise AssertionError(f"process {child_pid} outlived its parent")


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_back_off_doubles_up_to_its_bound_and_then_gives_up() -> None:
    policy = RestartPolicy()
    delays = [policy.delay_s(status=1, lived_s=1, was_ready=True) for _ in range(MAX_FAST_EXITS)]
    assert delays == [0.5, 1.0, 2.0, 4.0, None]


def test_a_long_life_forgives_earlier_exits() -> None:
    policy = RestartPolicy()
    for _ in range(3):
        policy.delay_s(status=1, lived_s=1, was_ready=True)
    for _ in range(20):
        assert policy.delay_s(status=-9, lived_s=3600, was_ready=True) == 0.5


def test_the_configuration_status_of_one_that_was_ready_is_a_crash_like_others() -> None:
    assert RestartPolicy().delay_s(status=2, lived_s=1, was_ready=True) == 0.5
    assert RestartPolicy().delay_s(status=2, lived_s=1, was_ready=False) is None
