"""Which linear layers of a model are quantised, as the lists in a configuration say.

Must not know: formats, tensors. Entry point: `ModuleRules`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

Match = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class ModuleRules:
    """Layers that match `skipped` stay as they are; with `only`, so do those outside it."""

    skipped: tuple[Match, ...] = ()
    only: tuple[Match, ...] | None = None

    def cover(self, module: str) -> bool:
        """Whether the layer of this full name is quantised."""
        if any(match(module) for match in self.skipped):
            return False
        return self.only is None or any(match(module) for match in self.only)


def contains(text: str) -> Match:
    """`text` anywhere in the name, AutoAWQ's rule."""
    return lambda module: text in module


def equals(name: str) -> Match:
    """The full name."""
    return lambda module: module == name


def ends_with(name: str) -> Match:
    """The last components of the name."""
    return lambda module: module == name or module.endswith(f".{name}")


def matches(pattern: str) -> Match:
    """The regular expression matches from the name's start. Raises ValueError: no expression."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
    return lambda module: compiled.match(module) is not None
