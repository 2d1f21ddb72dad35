"""What `octavo top` knows of the cells: the newest picture of each, and what is wrong with others.

Must not know: how pictures come, terminals. Entry point: `Board`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Picture = Mapping[str, Any]


@dataclass(slots=True)
class Sight:
    """One scheduler as it was seen last. `problem`: why nothing newer comes; "" = it does."""

    address: str
    scheduler_id: str = ""
    picture: Picture | None = None
    num_pictures: int = 0
    problem: str = ""


@dataclass(slots=True)
class Board:
    """All sights by address, in the order in which they turned up."""

    sights: dict[str, Sight] = field(default_factory=dict[str, Sight])
    # What is wrong with the source of all.
    problem: str = ""

    def expect(self, address: str) -> None:
        """Pictures will come from there, or a problem."""
        self._sight(address)

    def show(self, address: str, scheduler_id: str, picture: Picture) -> None:
        """A picture came. The first of two says little of rates: they are means since then."""
        sight = self._sight(address)
        sight.scheduler_id, sight.picture, sight.problem = scheduler_id, picture, ""
        sight.num_pictures += 1
        self.problem = ""

    def fail(self, address: str, problem: str) -> None:
        """No pictures come from there now."""
        self._sight(address).problem = problem

    def forget(self, address: str) -> None:
        self.sights.pop(address, None)

    @property
    def pictures(self) -> list[Picture]:
        """Of the cells that are seen now."""
        sights = self.sights.values()
        return [s.picture for s in sights if s.picture is not None and not s.problem]

    @property
    def is_complete(self) -> bool:
        """Whether every cell told its rates, or why it can't."""
        sights = self.sights.values()
        return bool(sights) and all(s.problem or s.num_pictures > 1 for s in sights)

    def _sight(self, address: str) -> Sight:
        return self.sights.setdefault(address, Sight(address))
