"""tiktoken files against tiktoken itself."""

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from octavo.errors import ConfigurationError
from octavo_router.tiktoken_ranks import read_tiktoken
from tests.unit.router.original_folders import QWEN_PATTERN, qwen_oracle, train_ranks, write_ranks
from tests.unit.router.trained_tokenizers import SAMPLES

TEXTS = ("", " ", "\n\n  x", "a\x00b", "123 4567", "aaaaaaa bababab", "it's I'LL", *SAMPLES)


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    file = tmp_path_factory.mktemp("tiktoken") / "qwen.tiktoken"
    write_ranks(file, train_ranks())
    return read_tiktoken(file, pattern=QWEN_PATTERN, special_tokens=["<|endoftext|>"])


def test_ids_and_texts_are_tiktokens(backend: Tokenizer) -> None:
    oracle = qwen_oracle()
    draw = random.Random(1)
    letters = "".join(SAMPLES) + " " * 40
    drawn = ("".join(draw.choices(letters, k=draw.randrange(1, 40))) for _ in range(500))
    for text in (*TEXTS, *drawn):
        ids = oracle.encode(text, disallowed_special=())
        assert backend.encode(text).ids == ids, text
        assert backend.decode(ids) == text


def test_special_tokens_follow_the_ranks(backend: Tokenizer) -> None:
    assert backend.encode("a<|endoftext|>").ids[-1] == len(train_ranks())


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("YQ==", "line 1: expected base64"),
        ("Y 0", "line 1: expected base64"),
        ("YQ== zero", "line 1: expected base64"),
        ("YQ== 0\nYg== 2", "without a gap"),
        ("", "without a gap"),
        ("YQ== 0", "no token stands for byte 0x00"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, lines: str, reason: str) -> None:
    file = tmp_path / "qwen.tiktoken"
    file.write_text(lines)
    with pytest.raises(ConfigurationError, match=rf"qwen\.tiktoken.*{reason}"):
        read_tiktoken(file, pattern=QWEN_PATTERN, special_tokens=())
