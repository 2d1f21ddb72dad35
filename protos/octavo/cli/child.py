"""One service as a child process: started, its output passed on, started again when it ends.

Must not know: what the service does. Entry point: `Child.run`.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from asyncio.subprocess import PIPE, STDOUT, Process
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from octavo.cli.console import Console
from octavo.cli.parent import DIE_WITH_PARENT
from octavo.cli.restart import CONFIGURATION_STATUS, RestartPolicy
from octavo.errors import ConfigurationError, OctavoError

_LINE_LIMIT_BYTES = 1 << 20
_TAIL_LINES = 15
_LAST_WORDS_S = 1.0


class CrashLoopError(OctavoError):
    """A child ended again and again, or with a mistake that a restart can't mend."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run: `command` (program and arguments), with `environment` on top of ours."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


class Child:
    """Runs a ChildSpec until `stop` or `kill`."""

    def __init__(self, spec: ChildSpec, console: Console, run_folder: Path) -> None:
        self.spec = spec
        self._console = console
        self._ready_file = run_folder / f"{spec.name}.json"
        self._policy = RestartPolicy()
        self._process: Process | None = None
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def ports(self) -> dict[str, int] | None:
        """The bound ports that the running process announced; None = not ready."""
        try:
            announced = json.loads(self._ready_file.read_text())
        except FileNotFoundError:
            return None
        return announced if announced.get("pid") == self.pid else None

    async def run(self) -> None:
        """Keep the process running; returns after `stop`, raises CrashLoopError."""
        try:
            while not self._stopping.is_set():
                status, lived_s = await self._run_once()
                if self._stopping.is_set():
                    return
                await self._wait_before_restart(status, lived_s)
        finally:
            self._ready_file.unlink(missing_ok=True)
            self._ended.set()

    async def stop(self, grace_s: float) -> None:
        """SIGTERM; SIGKILL after `grace_s`. Returns when the process is gone."""
        self._stopping.set()
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._ended.wait(), grace_s)
        except TimeoutError:
            self._console.say(f"{self.spec.name} did not end within {grace_s:.0f} s: killed")
            self._signal(signal.SIGKILL)
            await self._ended.wait()

    def kill(self) -> None:
        """SIGKILL, now and for good."""
        self._stopping.set()
        self._signal(signal.SIGKILL)

    async def _run_once(self) -> tuple[int, float]:
        started = time.monotonic()
        self._ready_file.unlink(missing_ok=True)
        environment = {
            **os.environ,
            **self.spec.environment,
            "OCTAVO_READY_FILE": str(self._ready_file),
            DIE_WITH_PARENT: str(os.getpid()),
        }
        self._process = process = await asyncio.create_subprocess_exec(
            *self.spec.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            env=environment,
            limit=_LINE_LIMIT_BYTES,
            # Its own group: Ctrl-C reaches us alone, and we choose the order of the drain.
            start_new_session=True,
        )
        if self._stopping.is_set():  # stop() came while the process was being made
            self._signal(signal.SIGTERM)
        assert process.stdout is not None
        output = asyncio.create_task(self._pass_on(process.stdout))
        try:
            status = await process.wait()
            lived_s = time.monotonic() - started
            # Its own children may hold the pipe open for longer than it lived.
            await asyncio.wait([output], timeout=_LAST_WORDS_S)
            return status, lived_s
        finally:
            output.cancel()
            self._process = None
            if process.returncode is None:  # cancelled: nobody may outlive us
                process.kill()
                await process.wait()

    async def _pass_on(self, output: asyncio.StreamReader) -> None:
        while True:
            try:
                data = await output.readline()
            except ValueError:  # a line over the limit: its rest follows as further lines
                continue
            if not data:
                return
            # Progress bars redraw a line with carriage returns: its last state is enough.
            line = data.decode(errors="replace").rstrip().rsplit("\r", 1)[-1]
            if line:
                self._tail.append(line)
                self._console.log(self.spec.name, line)

    async def _wait_before_restart(self, status: int, lived_s: float) -> None:
        was_ready = self._ready_file.exists()
        reason = f"signal {-status}" if status < 0 else f"status {status}"
        delay_s = self._policy.delay_s(status=status, lived_s=lived_s, was_ready=was_ready)
        name = self.spec.name
        if delay_s is not None:
            self._console.say(
                f"{name} ended after {lived_s:.1f} s ({reason}); again in {delay_s:.1f} s",
                is_bad=True,
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)
            return
        tail = "\n".join(f"    {line}" for line in self._tail)
        if status == CONFIGURATION_STATUS and not was_ready:
            # What it said about the mistake, without the log before it.
            said = tail[max(tail.rfind("    octavo "), 0) :]
            raise ConfigurationError(f"{name} refused to start:\n{said}")
        raise CrashLoopError(
            f"{name} ended {self._policy.num_fast_exits} times in a row, the last time with "
            f"{reason}; gave up. Its last words:\n{tail}"
        )

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)
