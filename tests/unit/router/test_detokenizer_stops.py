"""Stop strings over token borders: exact texts, counts, and what is held back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_router.detokenizer import Detokenizer
from octavo_router.stop_strings import StopStrings
from tests.unit.router.trained_tokenizers import byte_ids, tokenizer_of


def the_ids(count: int) -> list[int]:
    """`count` times the one token " the" of the demo model."""
    (token_id,) = tokenizer_of("demo").encode(" the").tolist()
    return [token_id] * count


def answer(
    token_ids: list[int],
    *stops: str,
    kind: str = "demo",
    group: int = 1,
    include_stop: bool = False,
) -> tuple[str, int, str | None]:
    """(whole text, tokens counted, stop matched) of ids pushed in groups."""
    detokenizer = Detokenizer(tokenizer_of(kind), stop=stops, include_stop=include_stop)
    text = ""
    for start in range(0, len(token_ids), group):
        delta = detokenizer.push(token_ids[start : start + group])
        text += delta.text
        if delta.matched_stop is not None:
            return text, delta.num_tokens, delta.matched_stop
    delta = detokenizer.finish()
    return text + delta.text, delta.num_tokens, delta.matched_stop


@pytest.mark.parametrize("group", [1, 2, 8])
@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (("e t",), (" th", 2, "e t")),
        (("e tx",), (" the the the the", 4, None)),
        ((" the the the",), ("", 3, " the the the")),
        ((" the the the the the",), (" the the the the", 4, None)),
        (("x" * 1000,), (" the the the the", 4, None)),
        ((" the" * 3 + "!", "e the"), (" th", 2, "e the")),
        (("he t", "e"), (" th", 1, "e")),
        ((" ",), ("", 1, " ")),
    ],
)
def test_exact_cuts(
    stops: tuple[str, ...], expected: tuple[str, int, str | None], group: int
) -> None:
    assert answer(the_ids(4), *stops, group=group) == expected


def test_the_stop_may_stay_in_the_output() -> None:
    assert answer(the_ids(4), "e t", include_stop=True) == (" the t", 2, "e t")


def test_text_before_the_stop_flows() -> None:
    detokenizer = Detokenizer(tokenizer_of("demo"), stop=("e tx",))
    texts = [detokenizer.push([token_id]).text for token_id in the_ids(3)]
    assert texts == [" th", "e th", "e th"]
    assert detokenizer.finish().text == "e"


def test_nothing_follows_a_match() -> None:
    detokenizer = Detokenizer(tokenizer_of("demo"), stop=("e t",))
    assert detokenizer.push(the_ids(5)) == (" th", 2, "e t")
    assert detokenizer.push(the_ids(5)) == ("", 2, "e t")
    assert detokenizer.finish() == ("", 2, "e t")


def test_choices_may_share_the_compiled_stops() -> None:
    stops = StopStrings(("e t",))
    first, second = (Detokenizer(tokenizer_of("demo"), stop=stops) for _ in range(2))
    assert first.push(the_ids(1)).text == " th"
    assert second.push(the_ids(2)) == (" th", 2, "e t")
    assert first.finish().text == "e"


def test_a_stop_inside_characters_of_many_tokens() -> None:
    emoji = "\U0001f9ff"
    token_ids = tokenizer_of("demo").encode(f"a{emoji}{emoji}b").tolist()
    split = tokenizer_of("demo").encode(f"a{emoji}").tolist()
    assert len(split) > 2
    assert answer(token_ids, emoji) == ("a", len(split), emoji)


@pytest.mark.parametrize("kind", ["demo", "llama2"])
def test_a_stop_never_matches_bytes_still_held(kind: str) -> None:
    first = byte_ids(kind)[0xF0]
    detokenizer = Detokenizer(tokenizer_of(kind), stop=("\ufffd",))
    # One byte may still become a character; with the second it is known that it can't.
    assert detokenizer.push([first]) == ("", 1, None)
    assert detokenizer.push([first, first]) == ("", 2, "\ufffd")


def test_settled_at_finish_is_matched_at_finish() -> None:
    first = byte_ids("demo")[0xF0]
    assert answer([first], "\ufffd") == ("", 1, "\ufffd")
    # The run of bytes is text only when the answer is over.
    run = [byte_ids("llama2")[byte] for byte in "é!".encode() if byte in byte_ids("llama2")]
    assert answer(run, "é", kind="llama2")[2] == "é"


def test_stops_see_the_visible_text_only() -> None:
    tokenizer = tokenizer_of("demo")
    end = tokenizer.encode("<|im_end|>").tolist()
    token_ids = [*the_ids(1), *end, *the_ids(1)]
    assert answer(token_ids, "<|im_end|>") == (" the the", 3, None)
    assert answer(token_ids, "e t") == (" th", 3, "e t")


@settings(max_examples=200, deadline=None)
@given(
    token_ids=st.lists(st.integers(0, 49_160), max_size=30),
    at=st.integers(0, 60),
    length=st.integers(1, 8),
    group=st.integers(1, 7),
)
def test_any_slice_of_the_text_stops_it_at_its_first_place(
    token_ids: list[int], at: int, length: int, group: int
) -> None:
    tokenizer = tokenizer_of("demo")
    whole = tokenizer.decode(token_ids)
    stop = whole[at : at + length]
    if not stop:
        return
    text, num_tokens, matched = answer(token_ids, stop, group=group)
    assert (text, matched) == (whole[: whole.index(stop)], stop)
    # One id less, and what is settled of the text doesn't hold the stop yet.
    assert stop not in tokenizer.decode(token_ids[: num_tokens - 1]).rstrip("\ufffd")
