"""The README's table of models lists the architectures that there are."""

import re
from pathlib import Path

from octavo_worker.models import FAMILIES
from octavo_worker.models.text_part import TEXT_PARTS

README = Path(__file__).parents[3] / "README.md"


def test_the_readme_lists_exactly_the_families() -> None:
    section = README.read_text(encoding="utf-8").split("\n## Models\n")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    native = [re.findall(r"`(\w+)`", cells[1]) for cells in rows if cells[2] == "native"]
    families = [[family.architecture, *family.aliases] for family in FAMILIES]
    assert sorted(native) == sorted([*families, list(TEXT_PARTS)])
    assert all(len(cells) == 4 for cells in rows)
