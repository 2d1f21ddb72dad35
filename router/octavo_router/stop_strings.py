"""Stop strings in a text that arrives in pieces.

`StopStrings` is the compiled set (an Aho-Corasick automaton, shared by a request's choices),
`StopMatcher` one choice's place in it. The rule, whatever the borders of the pieces: the match
that is complete first wins; of those that end at the same character, the longest. Text is held
back only while it is the proper prefix of a stop. Must not know: tokens.
"""

import re
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from octavo.errors import InvalidRequestError


class StopStrings:
    """The automaton: state 0 is "nothing matched", a state's depth is the matched length."""

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise InvalidRequestError("a stop string must not be empty", param="stop")
        self.edges: list[dict[str, int]] = [{}]
        self.fallbacks = [0]
        self.depths = [0]
        self.matches: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._link()
        first = "".join(re.escape(char) for char in sorted(self.edges[0]))
        self.first_char = re.compile(f"[{first}]") if first else None

    def __bool__(self) -> bool:
        return self.first_char is not None

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            following = self.edges[state].get(char)
            if following is None:
                following = len(self.edges)
                self.edges[state][char] = following
                self.edges.append({})
                self.fallbacks.append(0)
                self.depths.append(self.depths[state] + 1)
                self.matches.append(None)
            state = following
        self.matches[state] = stop

    def _link(self) -> None:
        """Breadth first: where to go on when a state has no edge for the next character."""
        states = deque(self.edges[0].values())
        while states:
            state = states.popleft()
            fallback = self.fallbacks[state]
            if self.matches[state] is None:
                self.matches[state] = self.matches[fallback]
            for char, following in self.edges[state].items():
                self.fallbacks[following] = self.step(fallback, char)
                states.append(following)

    def step(self, state: int, char: str) -> int:
        """The longest suffix of (state's text + char) that begins a stop, as a state."""
        while (following := self.edges[state].get(char)) is None:
            if state == 0:
                return 0
            state = self.fallbacks[state]
        return following


class Scan(NamedTuple):
    """Text that no stop can take back any more, and the stop that ended it (None = go on)."""

    text: str
    matched: str | None


class StopMatcher:
    """One choice's text against the stops. `push` until a match, else `finish`."""

    __slots__ = ("_held", "_include_stop", "_state", "_stops")

    def __init__(self, stops: StopStrings, *, include_stop: bool = False) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._state = 0
        self._held = ""

    def push(self, text: str) -> Scan:
        """Take the next piece. After a match nothing may be pushed any more."""
        stops = self._stops
        index = 0
        if self._state == 0:
            first = stops.first_char.search(text) if stops.first_char is not None else None
            if first is None:
                return Scan(text, None)
            index = first.start()
        for end in range(index, len(text)):
            self._state = stops.step(self._state, text[end])
            matched = stops.matches[self._state]
            if matched is not None:
                seen = self._held + text[: end + 1]
                self._held = ""
                kept = seen if self._include_stop else seen[: len(seen) - len(matched)]
                return Scan(kept, matched)
        seen = self._held + text
        border = len(seen) - stops.depths[self._state]
        self._held = seen[border:]
        return Scan(seen[:border], None)

    def finish(self) -> str:
        """The text is over: what was held back is no stop."""
        held, self._held, self._state = self._held, "", 0
        return held
