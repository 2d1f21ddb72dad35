"""Markdown that arrives piece by piece: whole blocks to print, the unfinished rest to redraw.

Must not know: where the text comes from. Entry points: `BlockSplitter`, `AnswerLines`.
"""

import re

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Markdown
from rich.segment import Segment

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
# All control characters but tab and newline: an answer must not steer the terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class BlockSplitter:
    """Cuts a growing text where Markdown's meaning can't change any more: at a blank line outside
    code that is followed by a line without indentation."""

    def __init__(self) -> None:
        self.rest = ""
        self._fence = ""
        # Lines of `rest` before this index were looked at.
        self._seen = 0
        self._is_after_blank = False

    def push(self, text: str) -> str:
        """Add `text`; returns the blocks that it completed ("" if none)."""
        self.rest += printable(text)
        cut = 0
        while (end := self.rest.find("\n", self._seen)) >= 0:
            line = self.rest[self._seen : end]
            if self._begins_block(line):
                cut = self._seen
            self._look_at(line)
            self._seen = end + 1
        # An unfinished line's first character decides already.
        if self._begins_block(self.rest[self._seen :]):
            cut = self._seen
        done, self.rest = self.rest[:cut], self.rest[cut:]
        self._seen -= cut
        if cut and self._seen == 0:
            self._is_after_blank = False
        return done

    def _begins_block(self, line: str) -> bool:
        return self._is_after_blank and not self._fence and line[:1].strip() != ""

    def _look_at(self, line: str) -> None:
        found = _FENCE.match(line)
        if found and not self._fence:
            self._fence = found[1]
        elif found and found[1].startswith(self._fence) and not line[found.end() :].strip():
            self._fence = ""
        self._is_after_blank = not line.strip() and not self._fence


class AnswerMarkdown(Markdown):
    """Markdown as chat models mean it: a newline is a newline, and tags are text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
        self.parsed = parser.parse(text)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"


class AnswerLines:
    """A text's lines as shown, without blank ones around them; if asked for, the last few only
    (a region that is redrawn can't be longer than the screen)."""

    def __init__(self, text: str, num_lines: int | None = None) -> None:
        self._text = text
        self._num_lines = num_lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(AnswerMarkdown(self._text), options, pad=False)
        while lines and _is_blank(lines[0]):
            lines.pop(0)
        while lines and _is_blank(lines[-1]):
            lines.pop()
        for line in lines if self._num_lines is None else lines[-self._num_lines :]:
            yield from line
            yield Segment.line()


def _is_blank(line: list[Segment]) -> bool:
    """Nothing to see, not even a background."""
    return all(not text.strip() and not (style and style.bgcolor) for text, style, _ in line)


def printable(text: str) -> str:
    """`text` without control characters (tab and newline stay)."""
    return _CONTROL.sub("", text)
