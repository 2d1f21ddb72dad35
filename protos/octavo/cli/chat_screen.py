"""What a chat shows: formatted on a terminal, plain text in a pipe.

Must not know: HTTP, commands. Entry points: `TerminalScreen`, `PlainScreen`, both `Screen`s.
"""

import contextlib
import sys
import termios
from collections.abc import Generator, Iterable
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from octavo.cli.chat_markdown import AnswerLines, BlockSplitter, printable

_REDRAWS_PER_S = 10
# Longer lines are hard to read, however wide the terminal.
_MAX_WIDTH = 100


class Screen(Protocol):
    """Where a chat's lines go."""

    def greet(self, model: str, base: str) -> None: ...

    def answer(self, pieces: Iterable[str]) -> None:
        """Show an answer as it comes. Whatever `pieces` raises passes through, after what came
        before it was shown."""
        ...

    def note(self, text: str) -> None:
        """A remark of the chat itself."""
        ...

    def error(self, text: str) -> None: ...


class PlainScreen:
    """Answers alone on stdout, as they come; errors and remarks on stderr."""

    def greet(self, model: str, base: str) -> None:
        """Nothing: a pipe wants answers only."""

    def answer(self, pieces: Iterable[str]) -> None:
        try:
            for piece in pieces:
                sys.stdout.write(printable(piece) if sys.stdout.isatty() else piece)
                sys.stdout.flush()
        finally:
            sys.stdout.write("\n")
            sys.stdout.flush()

    def note(self, text: str) -> None:
        # Numbers and hints are for people who watch.
        if sys.stderr.isatty():
            print(text, file=sys.stderr, flush=True)

    def error(self, text: str) -> None:
        print(f"octavo chat: {text}", file=sys.stderr, flush=True)


class TerminalScreen:
    """Markdown while it streams: finished blocks scroll, the last one is redrawn in place."""

    def __init__(self, console: Console | None = None) -> None:
        self._out = console or Console(highlight=False)
        if self._out.width > _MAX_WIDTH:
            self._out.width = _MAX_WIDTH

    def greet(self, model: str, base: str) -> None:
        self._out.print(
            Text.assemble(("Octavo chat", "bold cyan"), (" · ", "dim"), (model, "bold")),
            Text.assemble((base, "dim")),
            Text("/help lists the commands. Ctrl-C stops an answer, Ctrl-D leaves.\n", "dim"),
            sep="\n",
        )

    def answer(self, pieces: Iterable[str]) -> None:
        splitter = BlockSplitter()
        self._out.print()
        try:
            with _no_echo(), self._live() as live:
                for piece in pieces:
                    if block := splitter.push(piece):
                        self._print_block(block)
                    live.update(AnswerLines(splitter.rest, self._out.height - 2))
        finally:
            self._print_block(splitter.rest)

    def _live(self) -> Live:
        waiting = Spinner("dots", Text("thinking", "dim"), style="cyan")
        return Live(waiting, console=self._out, transient=True, refresh_per_second=_REDRAWS_PER_S)

    def _print_block(self, block: str) -> None:
        if block.strip():
            self._out.print(AnswerLines(block))
            self._out.print()

    def note(self, text: str) -> None:
        self._out.print(Text(text, "dim"))
        self._out.print()

    def error(self, text: str) -> None:
        self._out.print(Text(text, "red"))
        self._out.print()


@contextlib.contextmanager
def _no_echo() -> Generator[None]:
    """What is typed meanwhile (Ctrl-C too) must not show within the answer; it isn't lost."""
    try:
        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
    except (OSError, termios.error):
        yield
        return
    during = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(terminal, termios.TCSANOW, during)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)
