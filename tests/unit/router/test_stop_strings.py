"""Stop strings against a plain reference on the whole text."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from octavo.errors import InvalidRequestError
from octavo_router.stop_strings import StopMatcher, StopStrings


def reference(text: str, stops: list[str]) -> tuple[int, str] | None:
    """(end, stop) of the match complete first, the longest of those; None without a match."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


def num_held(text: str, stops: list[str]) -> int:
    """Length of the longest suffix that is a proper prefix of a stop."""
    lengths = range(min(len(text), max(map(len, stops)) - 1), 0, -1)
    fits = (n for n in lengths if any(len(s) > n and text.endswith(s[:n]) for s in stops))
    return next(fits, 0)


ab_text = st.text(alphabet="ab", min_size=1, max_size=6)


@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=5), max_size=12),
    stops=st.lists(ab_text, min_size=1, max_size=4),
    include_stop=st.booleans(),
)
@example(pieces=["abc"], stops=["abc", "b"], include_stop=False)
@example(pieces=["a", "aab"], stops=["aab"], include_stop=False)
def test_matches_and_holds_like_the_reference(
    pieces: list[str], stops: list[str], include_stop: bool
) -> None:
    matcher = StopMatcher(StopStrings(stops), include_stop=include_stop)
    seen = released = ""
    for piece in pieces:
        seen += piece
        scan = matcher.push(piece)
        released += scan.text
        expected = reference(seen, stops)
        if expected is not None:
            end, stop = expected
            assert scan.matched == stop
            assert released == seen[: end if include_stop else end - len(stop)]
            return
        assert scan.matched is None
        assert released == seen[: len(seen) - num_held(seen, stops)]
    assert released + matcher.finish() == seen


def test_a_long_stop_is_held_and_released_whole() -> None:
    stop = "x" * 999 + "y"
    matcher = StopMatcher(StopStrings([stop]))
    assert matcher.push("a" + "x" * 999).text == "a"
    assert matcher.push("x").text == "x"
    assert matcher.push("z").text == "x" * 999 + "z"
    assert matcher.push("x" * 500).text == ""
    assert matcher.finish() == "x" * 500


def test_overlapping_halves_are_not_lost() -> None:
    matcher = StopMatcher(StopStrings(["abab!"]))
    assert [matcher.push(piece).text for piece in ("ab", "ab", "ab")] == ["", "", "ab"]
    scan = matcher.push("!tail")
    assert scan == ("", "abab!")


def test_metacharacters_are_plain_text() -> None:
    scan = StopMatcher(StopStrings(["]^-\\", "[.*]"])).push("a.*]b]^-\\c")
    assert scan == ("a.*]b", "]^-\\")


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        StopStrings(["x", ""])
    assert caught.value.param == "stop"


def test_no_stops_are_falsy_and_match_nothing() -> None:
    assert not StopStrings([])
    assert StopStrings(["x"])
    assert StopMatcher(StopStrings([])).push("text") == ("text", None)
