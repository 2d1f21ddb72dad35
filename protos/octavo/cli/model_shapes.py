"""Folders of models that have a shape but no weights, for benchmarks with random ones.

Beside config.json lies a stand-in tokenizer of the right vocabulary: bytes, then made-up
words about as long as real tokens, so that detokenizing costs what it costs in earnest.
Entry point: `ensure_shape_folder`.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from octavo.hub import cache_folder

_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
_EOS_TOKEN_ID = 2
_LETTERS = "etaoinshrdlcum"


def ensure_shape_folder(name: str, config: dict[str, Any]) -> Path:
    """The folder of shape `name` in the cache, written if it isn't there."""
    shapes = cache_folder() / "shapes"
    folder = shapes / name
    if folder.is_dir():
        return folder
    shapes.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=shapes))
    try:
        _write(scratch / "config.json", _complete(config))
        _write(scratch / "tokenizer.json", stand_in_tokenizer(config["vocab_size"]))
        _write(scratch / "tokenizer_config.json", {"eos_token": _SPECIAL_TOKENS[_EOS_TOKEN_ID]})
        scratch.replace(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def stand_in_tokenizer(vocab_size: int) -> dict[str, Any]:
    """A tokenizer.json: every id decodes, text encodes to bytes."""
    tokens = [*_SPECIAL_TOKENS, *_byte_alphabet()]
    tokens += [_word(index) for index in range(vocab_size - len(tokens))]
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, token in enumerate(_SPECIAL_TOKENS)
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: index for index, token in enumerate(tokens[:vocab_size])},
            "merges": [],
        },
    }


def _complete(config: dict[str, Any]) -> dict[str, Any]:
    return {"dtype": "bfloat16", "eos_token_id": _EOS_TOKEN_ID, "hidden_act": "silu", **config}


def _byte_alphabet() -> list[str]:
    """The 256 characters by which byte-level BPE spells bytes, in the order of the bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {byte: byte for byte in printable}
    spelled |= {byte: 256 + index for index, byte in enumerate(others)}
    return [chr(spelled[byte]) for byte in range(256)]


def _word(index: int) -> str:
    """Word number `index`: a space (spelled Ġ) and letters, different for each."""
    letters: list[str] = []
    value = index + len(_LETTERS)  # two letters at least: single ones are bytes
    while value:
        value, remainder = divmod(value, len(_LETTERS))
        letters.append(_LETTERS[remainder])
    return "Ġ" + "".join(reversed(letters))


def _write(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, ensure_ascii=False))
