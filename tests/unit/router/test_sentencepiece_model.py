"""SentencePiece model files against SentencePiece itself, for every kind of file."""

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sentencepiece

from octavo.errors import ConfigurationError
from octavo_router.sentencepiece_model import SentencePieceModel, read_sentencepiece
from tests.unit.router.original_folders import train_sentencepiece
from tests.unit.router.trained_tokenizers import SAMPLES

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "no prefix": {"add_dummy_prefix": False},
    "no bytes": {"byte_fallback": False},
    "nfkc": {"normalization_rule_name": "nmt_nfkc"},
    "condensed": {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
    "symbols": {"user_defined_symbols": "<|user|>,<|us,▁▁▁,the"},
    "unigram": {"model_type": "unigram"},
    "unigram symbols": {"model_type": "unigram", "user_defined_symbols": "<|user|>,the"},
}
TEXTS = (
    "",
    " ",
    "   ",
    "\n\n",
    " hello",
    "   leading and   trailing   ",
    "\u2581x \u2581\u2581 y",
    "a\x00b",
    "<|user|>the other<|user|>   the<|us",
    "aaaaaaaa abababababa          12345",
    "ﬁ Ⅳ ｆｕｌｌ\u3000width",
    *SAMPLES,
)


class Pair(NamedTuple):
    ours: SentencePieceModel
    theirs: sentencepiece.SentencePieceProcessor


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    file = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model"
    file.write_bytes(train_sentencepiece(tuple(KINDS[request.param].items())))
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(file))
    return Pair(read_sentencepiece(file), theirs)


def texts() -> list[str]:
    """The texts above, and letters of all scripts in a fixed random order."""
    draw = random.Random(1)
    # Without combining marks: `tokenizers` normalizes by what a reader sees as one letter.
    letters = "".join(SAMPLES[:9]).replace("\u0301", "") + " " * 40
    return [*TEXTS, *("".join(draw.choices(letters, k=draw.randrange(1, 40))) for _ in range(300))]


def test_ids_are_sentencepieces(pair: Pair) -> None:
    for text in texts():
        assert pair.ours.backend.encode(text).ids == pair.theirs.encode(text), text


def test_texts_are_sentencepieces(pair: Pair) -> None:
    unknown = pair.theirs.unk_id()
    for text in texts():
        ids = [token_id for token_id in pair.theirs.encode(text) if token_id != unknown]
        assert pair.ours.backend.decode(ids) == pair.theirs.decode(ids), text


def test_every_piece_keeps_its_id(pair: Pair) -> None:
    for token_id in range(pair.theirs.vocab_size()):
        assert pair.ours.backend.token_to_id(pair.theirs.id_to_piece(token_id)) == token_id
    assert pair.ours.backend.get_vocab_size() == pair.theirs.vocab_size()


def test_a_byte_pieces_name_in_a_text_is_text(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.model"
    file.write_bytes(train_sentencepiece())
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(file))
    assert read_sentencepiece(file).backend.encode("<0x41>").ids == theirs.encode("<0x41>")


def test_symbols_are_in_the_files_of_that_kind() -> None:
    model = train_sentencepiece((("user_defined_symbols", "<|user|>,the"),))
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert theirs.encode("the<|user|>", out_type=str) == ["▁", "the", "<|user|>"]


def test_control_pieces_are_special_tokens(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.model"
    file.write_bytes(train_sentencepiece((("control_symbols", "<sep>"),)))
    found = read_sentencepiece(file)
    assert (found.bos_token, found.eos_token, found.unk_token) == ("<s>", "</s>", "<unk>")
    ids = found.backend.encode("<s>a<sep></s>").ids
    assert (ids[0], ids[-2:]) == (1, [3, 2])
    assert found.backend.decode(ids) == "a"


@pytest.mark.parametrize(("each", "expected"), [(True, "▁b"), (False, "b")])
def test_a_space_begins_the_text_or_each_segment(tmp_path: Path, each: bool, expected: str) -> None:
    file = tmp_path / "tokenizer.model"
    file.write_bytes(train_sentencepiece())
    tokens = read_sentencepiece(file, prefix_each_segment=each).backend.encode("a</s>b").tokens
    assert "".join(tokens) == f"▁a</s>{expected}"


def test_the_space_can_be_forbidden(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.model"
    file.write_bytes(train_sentencepiece())
    backend = read_sentencepiece(file, may_prefix=False).backend
    assert "".join(backend.encode("a b").tokens) == "a▁b"
    assert backend.decode(backend.encode(" a").ids) == " a"


@pytest.mark.parametrize("content", [b"", b"\xff\xff", b"aGVsbG8= 0\n"])
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "tokenizer.model"
    file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"tokenizer\.model is no SentencePiece model"):
        read_sentencepiece(file)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"model_type": "word", "split_digits": False}, "is a WORD model"),
        ({"treat_whitespace_as_suffix": True}, "keeps spaces in a way"),
    ],
)
def test_other_kinds_are_refused(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    file = tmp_path / "tokenizer.model"
    file.write_bytes(train_sentencepiece(tuple(options.items())))
    with pytest.raises(ConfigurationError, match=reason):
        read_sentencepiece(file)
