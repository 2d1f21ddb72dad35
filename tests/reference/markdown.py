"""Markdown from words: what the reference pages are put together with."""

from collections.abc import Iterable, Sequence


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table; columns without a single word are left out."""
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    if not cells:
        return []
    kept = [number for number in range(len(heads)) if any(row[number] for row in cells)]
    lines = [[heads[number] for number in kept], ["---"] * len(kept)]
    lines += [[row[number] for number in kept] for row in cells]
    return [f"| {' | '.join(line)} |" for line in lines]


def link(name: str) -> str:
    """To the heading of that name on the same page."""
    return f"[{name}](#{name.lower().replace('.', '')})"


def page(paragraphs: Iterable[Sequence[str]]) -> str:
    """Blocks of lines with blank lines between them."""
    return "\n\n".join("\n".join(block) for block in paragraphs if block) + "\n"
