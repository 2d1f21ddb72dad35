"""The one log of `octavo serve`: for people (a prefix per process, colours), or as JSON."""

import json
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime

import rich.console
from rich.status import Status
from rich.text import Text

_COLOURS = ("cyan", "green", "magenta", "yellow", "blue")
_NAME_WIDTH = 10
# As `octavo.logs.setup_logging` writes it: time, level, service, logger, message.
_INFO_RECORD = re.compile(r"(?P<time>\d\d:\d\d:\d\d) INFO +\w+ [\w.]+: (?P<message>.*)")


class Console:
    """Prints whole lines to stderr; stdout stays free for what scripts read."""

    def __init__(self, *, is_quiet: bool = False, is_json: bool = False) -> None:
        """`is_quiet`: warnings and errors only. `is_json`: lines stay, or become, JSON objects."""
        self._is_quiet = is_quiet
        self._is_json = is_json
        # soft_wrap: a log line stays one line, however narrow the terminal.
        self._out = rich.console.Console(stderr=True, highlight=False, soft_wrap=True)
        self._colours: dict[str, str] = {}
        self._status: Status | None = None

    def log(self, name: str, line: str) -> None:
        """One line of the process `name`."""
        if self._is_json:
            print(line if line.startswith("{") else _as_json(name, line), file=sys.stderr)
            return
        line = _shortened(line)
        style = _line_style(line)
        if self._is_quiet and not style:
            return
        colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
        text = Text.assemble((f"{name:<{_NAME_WIDTH}}", colour), ("│ ", "dim"), (line, style))
        self._out.print(text)

    def say(self, line: str, *, is_bad: bool = False) -> None:
        """One line of `octavo serve` itself."""
        self.log("octavo", f"ERROR {line}" if is_bad else line)

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Show a status line (terminals only) until the block ends; see `update`."""
        if not self._out.is_terminal:
            yield
            return
        with self._out.status("starting") as status:
            self._status = status
            try:
                yield
            finally:
                self._status = None

    def update(self, text: str) -> None:
        """What is being waited for."""
        if self._status is not None:
            self._status.update(text)


def _shortened(line: str) -> str:
    """A service's INFO record without what the prefix says already; other lines as they are."""
    record = _INFO_RECORD.fullmatch(line)
    return f"{record['time']} {record['message']}" if record else line


def _as_json(name: str, line: str) -> str:
    """A line that is no record of a service's, in the form of `octavo.logs`."""
    time = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    level = "error" if line.startswith("ERROR ") else "info"
    message = line.removeprefix("ERROR ")
    fields = {"time": time, "level": level, "service": name, "logger": "", "message": message}
    return json.dumps(fields, ensure_ascii=False)


def _line_style(line: str) -> str:
    head = line[:32]
    if "ERROR" in head or "CRITICAL" in head:
        return "bold red"
    return "yellow" if "WARNING" in head else ""
