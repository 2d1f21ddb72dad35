"""`octavo chat` against the real services: in a pipe, and typed at a terminal."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import pytest

from tests.e2e.stack import Stack

COMMAND = [sys.executable, "-m", "octavo", "chat"]
TIMEOUT_S = 60.0
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class Terminal:
    """A chat on a terminal of its own: type, and wait for what must show."""

    def __init__(self, flags: Sequence[str], cache: Path) -> None:
        self._flags = flags
        self._environ = {**os.environ, "OCTAVO_CACHE": str(cache), "TERM": "xterm"}
        self._shown = ""
        self._read_to = 0

    def __enter__(self) -> Self:
        self._terminal, inner = pty.openpty()
        try:
            self.process = subprocess.Popen(
                [*COMMAND, *self._flags],
                stdin=inner,
                stdout=inner,
                stderr=inner,
                env=self._environ,
                start_new_session=True,
            )
        finally:
            os.close(inner)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        os.close(self._terminal)

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def interrupt(self) -> None:
        # What the terminal does at Ctrl-C for the session that it controls.
        os.killpg(self.process.pid, signal.SIGINT)

    def until(self, pattern: str) -> str:
        """Read on until `pattern` shows; what showed since the last match."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (found := re.compile(pattern).search(self._shown, self._read_to)):
            assert time.monotonic() < deadline, self._shown
            if select.select([self._terminal], [], [], 0.1)[0]:
                self._shown += _ESCAPE.sub("", self._read())
        text = self._shown[self._read_to : found.end()]
        self._read_to = found.end()
        return text

    def _read(self) -> str:
        try:
            return os.read(self._terminal, 1 << 16).decode(errors="replace")
        except OSError:  # the other end is closed
            raise AssertionError(f"the chat ended:\n{self._shown}") from None


def test_a_piped_chat_knows_what_was_said(demo_stack: Stack) -> None:
    answer = subprocess.run(
        [*COMMAND, "--url", demo_stack.url, "--temperature", "0", "--max-tokens", "20"],
        input="What is the capital of France?\nAnd of Spain?\n",
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    assert answer.stderr == ""
    france, spain = answer.stdout.splitlines()
    assert "Paris" in france
    # Only with the first question in mind is the second one about a capital.
    assert "Madrid" in spain


def test_ctrl_c_stops_an_answer_and_ctrl_d_leaves(demo_stack: Stack, tmp_path: Path) -> None:
    flags = ("--url", demo_stack.url, "--temperature", "0")
    with Terminal(flags, tmp_path) as chat:
        chat.until("SmolLM2-135M-Instruct")
        chat.until("> ")
        chat.type("Tell me a very long story about a dragon\r")
        # Redrawn as it grows, so it shows before it ends.
        chat.until("dragon.*dragon")
        chat.interrupt()
        numbers = chat.until("stopped\n")
        assert re.search(r"\d+ tokens · [\d.]+ tokens/s · first after \d+ ms · stopped", numbers)
        chat.until("> ")
        chat.type("/clear\r")
        chat.until("cleared")
        chat.type("What is the capital of France?\r")
        shown = chat.until(r"\d+ tokens · [^\n]* · prompt \d+ \(\d+ cached\)\n")
        assert "The capital of France is Paris." in shown
        chat.until("> ")
        chat.type("half a line")
        chat.until("half a line")
        # Python sees a signal while it waits for a key, which it does again in a moment.
        time.sleep(0.5)
        chat.interrupt()
        chat.until("Ctrl-D leaves")
        chat.type("\x04")
        assert chat.process.wait(TIMEOUT_S) == 0
    typed = tmp_path / "chat_history"
    assert "What is the capital of France?" in typed.read_text()
    assert typed.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("argument", ["--model", "--max-tokens"])
def test_what_the_server_refuses_is_said(argument: str, demo_stack: Stack) -> None:
    value = {"--model": "absent", "--max-tokens": "100000"}[argument]
    ended = subprocess.run(
        [*COMMAND, "--url", demo_stack.url, argument, value, "hello"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 1
    assert re.fullmatch(r"octavo chat: the server answers 40[04]: .*\n", ended.stderr)
    assert value in ended.stderr
