"""octavo.cli.chat_markdown and chat_screen: what a terminal shows while an answer streams."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from octavo.cli.chat_markdown import AnswerLines, BlockSplitter, printable
from octavo.cli.chat_screen import TerminalScreen
from octavo.errors import OctavoError

PIECES = st.lists(
    st.sampled_from(["\n", "\n\n", "a", "word ", "  in", "```", "```py\n", "~~~~", "- x", "1. y"])
)


def _split(pieces: list[str]) -> list[str]:
    splitter = BlockSplitter()
    done = [block for piece in pieces if (block := splitter.push(piece))]
    return [*done, splitter.rest]


@given(PIECES)
def test_blocks_together_are_the_text_however_it_is_cut(pieces: list[str]) -> None:
    text = "".join(pieces)
    blocks = _split(pieces)
    assert "".join(blocks) == text
    # Where the text was cut doesn't show.
    assert [b for b in _split(list(text)) if b] == [b for b in blocks_one_by_one(text) if b]
    for block in blocks[1:-1]:
        assert re.match(r"\S", block)


def blocks_one_by_one(text: str) -> list[str]:
    """The plain rule, on a whole text."""
    blocks, block, fence, blank = [], "", "", False
    for line in text.splitlines(keepends=True):
        if blank and not fence and line.strip() and not line[0].isspace():
            blocks.append(block)
            block = ""
        block += line
        found = re.match(r" {0,3}(`{3,}|~{3,})", line)
        if found and not fence:
            fence = found[1]
        elif found and found[1].startswith(fence) and not line[found.end() :].strip():
            fence = ""
        blank = not line.strip() and not fence and line.endswith("\n")
    return [*blocks, block]


def test_blank_lines_in_code_and_items_do_not_cut() -> None:
    code = "```\na\n\nb\n```\n"
    assert _split(list(f"{code}\nafter")) == [f"{code}\n", "after"]
    item = "- one\n\n  more\n"
    assert _split(list(f"{item}\nafter")) == [f"{item}\n", "after"]


def _shown(renderable: object, width: int = 40) -> str:
    out = Console(file=io.StringIO(), width=width, force_terminal=False)
    out.print(renderable)
    return "\n".join(line.rstrip() for line in out.file.getvalue().splitlines())


def test_newlines_and_tags_are_what_the_model_wrote() -> None:
    assert _shown(AnswerLines("roses\nviolets <b>bold</b> <div>")) == (
        "roses\nviolets <b>bold</b> <div>"
    )
    assert _shown(AnswerLines("**bold** and `code`")) == "bold and code"


def test_an_answer_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x07\x00\tc\n\x9bd\x7f") == "a[2Jb\tc\nd"
    screen = TerminalScreen(Console(file=(out := io.StringIO()), width=60, height=10))
    screen.answer(iter(["evil \x1b]0;title\x07 text"]))
    assert "\x1b" not in out.getvalue()
    assert "evil ]0;title text" in out.getvalue()


def test_the_end_of_a_long_block_stays_on_the_screen() -> None:
    lines = [f"line {number}" for number in range(30)]
    assert _shown(AnswerLines("\n".join(lines), 4)) == "\n".join(lines[-4:])


def test_blocks_have_no_blank_lines_around_them() -> None:
    assert _shown(AnswerLines("1. one\n\n")).strip("\n") == _shown(AnswerLines("1. one\n\n"))
    assert _shown(AnswerLines("\n\n")) == ""


def test_what_came_before_a_failure_is_shown_once() -> None:
    def pieces():
        yield "first block\n\nsecond "
        yield "block"
        raise OctavoError("gone")

    screen = TerminalScreen(Console(file=(out := io.StringIO()), width=60, height=10))
    with pytest.raises(OctavoError, match="gone"):
        screen.answer(pieces())
    text = out.getvalue()
    assert (text.count("first block"), text.count("second block")) == (1, 1)
