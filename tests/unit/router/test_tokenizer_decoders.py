"""Which kind of decoder a tokenizer is taken for: the fast kinds only where they are exact."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders

from octavo.hub import resolve_model
from octavo_router.token_decoder import (
    ByteFallbackDecoder,
    ByteLevelDecoder,
    MetaspaceDecoder,
    OtherDecoder,
    WholeDecoder,
    decoder_of,
)
from tests.unit.router.trained_tokenizers import ALL_STYLES

CATCH_ALL = [
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Replace("▁", " "),
    decoders.ByteLevel(),
]
SPM = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def backend_of(kind: str, folder: Path) -> Tokenizer:
    if kind != "demo":
        ALL_STYLES[kind](folder)
    else:
        folder = resolve_model("demo", weights=False)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def kind_of(backend: Tokenizer, **config: Any) -> type:
    return type(decoder_of(WholeDecoder(backend, config), frozenset()))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("demo", ByteLevelDecoder),
        ("qwen", ByteLevelDecoder),
        ("llama3", ByteLevelDecoder),
        ("llama2", ByteFallbackDecoder),
        ("gemma", ByteFallbackDecoder),
        ("unigram", MetaspaceDecoder),
        ("wordpiece", OtherDecoder),
    ],
)
def test_models_of_the_field(kind: str, expected: type, tmp_path: Path) -> None:
    assert kind_of(backend_of(kind, tmp_path)) is expected


@pytest.mark.parametrize(
    ("kind", "stages", "expected"),
    [
        # Every token of the demo is spelled in the byte alphabet: the first stages never act.
        ("demo", CATCH_ALL, ByteLevelDecoder),
        ("demo", [decoders.ByteLevel()], ByteLevelDecoder),
        # One token that isn't would turn the whole fused text into plain text.
        ("qwen", CATCH_ALL, OtherDecoder),
        ("demo", [decoders.Replace("a", "b"), decoders.ByteLevel()], OtherDecoder),
        ("demo", [decoders.Strip(" ", 1, 0), decoders.ByteLevel()], OtherDecoder),
        ("llama2", CATCH_ALL, OtherDecoder),
        ("llama2", SPM, ByteFallbackDecoder),
        ("llama2", SPM[:2], ByteFallbackDecoder),
        ("llama2", [*SPM, decoders.Strip(" ", 0, 1)], OtherDecoder),
        ("llama2", [*SPM[:2], decoders.Strip(" ", 1, 0)], OtherDecoder),
        ("llama2", [SPM[0], SPM[2], SPM[1]], OtherDecoder),
        ("llama2", [SPM[0]], OtherDecoder),
    ],
)
def test_chains_of_stages(kind: str, stages: list[Any], expected: type, tmp_path: Path) -> None:
    backend = backend_of(kind, tmp_path)
    backend.decoder = decoders.Sequence(stages)
    assert kind_of(backend) is expected


def test_cleaned_up_text_is_no_sum_of_pieces(tmp_path: Path) -> None:
    unigram = backend_of("unigram", tmp_path)
    assert kind_of(unigram, clean_up_tokenization_spaces=True) is OtherDecoder
    # After a BPE model transformers ignores the wish.
    assert kind_of(backend_of("demo", tmp_path), clean_up_tokenization_spaces=True) is (
        ByteLevelDecoder
    )


def test_no_decoder_at_all(tmp_path: Path) -> None:
    folder = ALL_STYLES["wordpiece"](tmp_path)
    description = json.loads((folder / "tokenizer.json").read_text()) | {"decoder": None}
    assert kind_of(Tokenizer.from_str(json.dumps(description))) is OtherDecoder
