"""The detokenizer's law: what it gives out, joined, is the decode of all ids; and what it costs."""

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_router import token_text
from octavo_router.detokenizer import Detokenizer
from tests.unit.router.trained_tokenizers import EXACT_STYLES, SAMPLES, byte_ids, tokenizer_of

KINDS = ("demo", *EXACT_STYLES)
many = settings(max_examples=200, deadline=None)
every_kind = pytest.mark.parametrize("kind", KINDS)


@st.composite
def id_lists(draw: st.DrawFn, kind: str) -> list[int]:
    """Any ids, with more special ones, unknown ones and loose bytes than chance would give."""
    tokenizer = tokenizer_of(kind)
    loose = [token_id for byte, token_id in byte_ids(kind).items() if byte >= 0x80]
    special = [i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)]
    any_id = st.integers(0, tokenizer.vocab_size + 2)
    kinds = [any_id, st.sampled_from(special)]
    if loose:
        kinds += [st.sampled_from(loose), st.sampled_from(loose)]
    return draw(st.lists(st.one_of(kinds), max_size=24))


def run(detokenizer: Detokenizer, token_ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
    """The texts of all deltas, the ids pushed in groups that end at `cuts`."""
    texts: list[str] = []
    start = 0
    for end in [*sorted({cut for cut in cuts if cut < len(token_ids)}), len(token_ids)]:
        delta = detokenizer.push(token_ids[start:end])
        assert (delta.num_tokens, delta.matched_stop) == (end, None)
        texts.append(delta.text)
        start = end
    return [*texts, detokenizer.finish().text]


@every_kind
@many
@given(data=st.data(), skip=st.booleans(), cuts=st.lists(st.integers(0, 24)))
def test_joined_deltas_are_the_decode_of_all_ids(
    kind: str, data: st.DataObject, skip: bool, cuts: list[int]
) -> None:
    tokenizer = tokenizer_of(kind)
    token_ids = data.draw(id_lists(kind))
    texts = run(Detokenizer(tokenizer, skip_special_tokens=skip), token_ids, cuts)
    assert "".join(texts) == tokenizer.decode(token_ids, skip_special_tokens=skip)
    for text in texts:
        text.encode()  # no half of a character


@every_kind
@pytest.mark.parametrize("text", SAMPLES)
def test_real_text_survives_every_split(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    token_ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    whole = tokenizer.decode(token_ids)
    for cut in range(len(token_ids) + 1):
        texts = run(Detokenizer(tokenizer), token_ids, [cut])
        assert "".join(texts) == whole
        assert [delta.count("\ufffd") for delta in texts] == [0] * len(texts)


@pytest.mark.parametrize("kind", ["demo", "qwen", "llama3"])
def test_nothing_is_delayed_more_than_one_character(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    for sample in SAMPLES:
        detokenizer, data, text = Detokenizer(tokenizer), b"", ""
        for token_id in tokenizer.encode(sample, add_special_tokens=False).tolist():
            data += tokenizer.token_bytes(token_id)
            text += detokenizer.push([token_id]).text
            assert text == data.decode("utf-8", "ignore")


@pytest.mark.parametrize("kind", ["demo", "llama2"])
def test_broken_bytes_show_as_many_marks_as_the_full_decode(kind: str) -> None:
    """All sequences over the borders of UTF-8's byte classes: too long, surrogates, cut off."""
    tokenizer = tokenizer_of(kind)
    id_of = byte_ids(kind)
    leads = [0xC2, 0xDF, 0xE0, 0xE1, 0xED, 0xEE, 0xF0, 0xF1, 0xF4]
    others = [0x41, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF]
    classes = [byte for byte in (*others, *leads, 0xC0, 0xF5, 0xFF) if byte in id_of]
    tails = [t for length in range(4) for t in product(others[1:], repeat=length)]
    ends = [(), (id_of[0xE1],), (id_of[0x80],)]
    ends += [(tokenizer.encode("z", add_special_tokens=False).tolist()[-1],)]
    for lead in classes:
        for tail in tails:
            for end in ends:
                token_ids = [id_of[lead], *(id_of[byte] for byte in tail), *end]
                texts = run(Detokenizer(tokenizer), token_ids, range(len(token_ids)))
                assert "".join(texts) == tokenizer.decode(token_ids), (lead, tail, end)


def emoji_ids(kind: str) -> list[int]:
    token_ids = tokenizer_of(kind).encode("\U0001f9ff", add_special_tokens=False).tolist()
    assert len(token_ids) >= 2
    return token_ids


@pytest.mark.parametrize("kind", ["demo", "qwen", "llama2", "gemma"])
@pytest.mark.parametrize("count", [1, 3, 50])
def test_an_endless_first_half_of_an_emoji(kind: str, count: int) -> None:
    tokenizer = tokenizer_of(kind)
    token_ids = [next(i for i in emoji_ids(kind) if tokenizer.token_bytes(i) >= b"\x80")] * count
    texts = run(Detokenizer(tokenizer), token_ids, range(count))
    assert "".join(texts) == tokenizer.decode(token_ids)
    assert "".join(texts).count("\ufffd") == count


def test_held_bytes_are_released_at_finish() -> None:
    detokenizer = Detokenizer(tokenizer_of("demo"))
    assert detokenizer.push(emoji_ids("demo")[:-1]).text == ""
    assert detokenizer.finish().text == "\ufffd"
    assert detokenizer.finish().text == ""


def test_a_run_of_byte_tokens_is_judged_as_a_whole() -> None:
    tokenizer, id_of = tokenizer_of("llama2"), byte_ids("llama2")
    euro = [id_of[byte] for byte in "€".encode()]
    word = tokenizer.encode("dog", add_special_tokens=False).tolist()
    good = run(Detokenizer(tokenizer), [*word, *euro, *word], [2, 4])
    assert "".join(good) == "dog€ dog"
    broken = run(Detokenizer(tokenizer), [*word, *euro, id_of[0x80], *word], [])
    assert "".join(broken) == "dog" + "\ufffd" * 4 + " dog"


# --- cost -------------------------------------------------------------------------------------


@pytest.fixture
def decoded_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of bytes that each call of Python's UTF-8 decoder was given."""
    sizes: list[int] = []
    decode = token_text.utf_8_decode

    def counted(data: bytes, errors: str, final: bool) -> tuple[str, int]:
        sizes.append(len(data))
        return decode(data, errors, final)

    monkeypatch.setattr(token_text, "utf_8_decode", counted)
    return sizes


@pytest.mark.parametrize("kind", ["demo", "llama2"])
@pytest.mark.parametrize("pattern", [b"\xf0", b"\xf0\x9f\x98", b"\xf0\x9f\x98\x80", b"\x80"])
def test_work_per_id_is_bounded_however_long_the_broken_bytes(
    kind: str, pattern: bytes, decoded_bytes: list[int]
) -> None:
    tokenizer, id_of = tokenizer_of(kind), byte_ids(kind)
    num_ids = 20_000
    token_ids = [id_of[pattern[index % len(pattern)]] for index in range(num_ids)]
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.push([token_id]).text for token_id in token_ids)
    assert len(decoded_bytes) <= num_ids
    assert max(decoded_bytes, default=0) <= 4
    assert text + detokenizer.finish().text == tokenizer.decode(token_ids)


def test_an_unknown_decoder_sees_short_windows_only() -> None:
    tokenizer = tokenizer_of("wordpiece")
    sizes: list[int] = []

    def decode(token_ids: list[int]) -> str:
        sizes.append(len(token_ids))
        return tokenizer.decode(token_ids) + "\ufffd"  # never satisfied

    decoder = token_text.WindowText(decode)
    token_ids = tokenizer.encode("the quick brown fox " * 500).tolist()
    for token_id in token_ids:
        decoder.push([token_id])
    assert max(sizes) <= token_text.WindowText.CONTEXT + token_text.WindowText.MAX_WAIT
    assert len(sizes) <= 2 * len(token_ids)


@many
@given(data=st.data(), skip=st.booleans())
def test_windows_follow_word_pieces(data: st.DataObject, skip: bool) -> None:
    tokenizer = tokenizer_of("wordpiece")
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size), max_size=30))
    texts = run(Detokenizer(tokenizer, skip_special_tokens=skip), token_ids, range(30))
    assert "".join(texts) == tokenizer.decode(token_ids, skip_special_tokens=skip)
