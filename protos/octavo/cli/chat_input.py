"""Where a chat's questions come from: a line editor on a terminal, lines of a pipe otherwise.

Entry points: `TerminalInput`, `lines_of`.
"""

import atexit
import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

_CYAN, _DIM, _RESET = "\033[1;36m", "\033[2m", "\033[0m"
_NUM_REMEMBERED = 1000


class TerminalInput:
    """Questions typed at a prompt, with editing, history and Tab for commands.

    Iterate for questions; ends at Ctrl-D. Ctrl-C drops the line that is being typed. A line that
    ends in a backslash goes on in the next.
    """

    def __init__(self, history_file: Path, commands: Iterable[str]) -> None:
        self._commands = sorted(commands)
        # Without readline (some Pythons are built so) the terminal's own editing remains.
        with contextlib.suppress(ImportError):
            self._set_up_readline(history_file)

    def __iter__(self) -> Iterator[str]:
        while True:
            try:
                lines = [input(_prompt("> ", _CYAN))]
                while lines[-1].endswith("\\"):
                    lines[-1] = lines[-1][:-1]
                    lines.append(input(_prompt(". ", _DIM)))
            except KeyboardInterrupt:
                print("\n(Ctrl-D leaves)")
                continue
            except EOFError:
                print()
                return
            yield "\n".join(lines)

    def _set_up_readline(self, history_file: Path) -> None:
        import readline

        def complete(text: str, state: int) -> str | None:
            found = [name for name in self._commands if name.startswith(text)]
            return f"{found[state]} " if text and state < len(found) else None

        readline.set_completer(complete)
        readline.set_completer_delims(" \t\n")
        readline.parse_and_bind("tab: complete")
        with contextlib.suppress(OSError):
            readline.read_history_file(history_file)
        readline.set_history_length(_NUM_REMEMBERED)
        atexit.register(_remember, history_file)


def lines_of(stream: Iterable[str]) -> Iterator[str]:
    """The lines of a pipe or file, one question each."""
    for line in stream:
        yield line.rstrip("\r\n")


def _remember(history_file: Path) -> None:
    """What was typed is private: readable by its owner only."""
    import readline

    with contextlib.suppress(OSError):
        history_file.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(history_file, os.O_CREAT | os.O_WRONLY, 0o600))
        readline.write_history_file(history_file)


def _prompt(mark: str, colour: str) -> str:
    """`mark` is ASCII: readline prints no other in a C locale. The control characters around
    the colour tell it what takes no room."""
    if os.environ.get("NO_COLOR") or not sys.stdout.isatty():
        return mark
    return f"\001{colour}\002{mark}\001{_RESET}\002"
