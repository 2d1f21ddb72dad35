"""Finds which kind of decoder a tokenizer has, and what each id contributes to a text.

The kinds that nearly all models have are decoded from per-id pieces (token_text.py); anything
else falls back to windows of the whole-list decoder. A chain of stages counts as a kind only if
the vocabulary proves that the remaining stages never act. Must not know: answers, stops.
Entry point: `decoder_of`.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer
from tokenizers.models import BPE

from octavo_router.token_text import (
    ByteFallbackText,
    ByteLevelText,
    MetaspaceText,
    Piece,
    PieceTable,
    TextDecoder,
    WindowText,
)

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
Stage = Mapping[str, Any]


class TokenDecoder(Protocol):
    """One tokenizer's way from ids to text."""

    def start(self, *, skip_special_tokens: bool) -> TextDecoder: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class WholeDecoder:
    """transformers' `decode`: the backend's, and the clean-up of spaces for word pieces.

    transformers cleans only if the configuration says so, and never after a BPE model.
    """

    def __init__(self, backend: Tokenizer, config: Mapping[str, Any]) -> None:
        self.backend = backend
        forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        is_wanted = bool(config.get("clean_up_tokenization_spaces", False))
        is_bpe = isinstance(backend.model, BPE)
        self.cleans_up = is_wanted and (not is_bpe or bool(config.get(forced, False)))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        ids = [int(token_id) for token_id in token_ids]
        text = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return _clean_up(text) if self.cleans_up else text


def _clean_up(text: str) -> str:
    for mark in (".", "?", "!", ","):
        text = text.replace(f" {mark}", mark)
    text = text.replace(" ' ", "'")
    for ending in ("n't", "'m", "'s", "'ve", "'re"):
        text = text.replace(f" {ending}", ending)
    return text


class _PieceDecoder(ABC):
    """Common part: two piece tables, with and without the special tokens."""

    def __init__(self, whole: WholeDecoder, special_ids: frozenset[int]) -> None:
        self._backend = whole.backend
        self._special_ids = special_ids
        self._shown = PieceTable(self._piece_of)
        self._skipping = PieceTable(self._piece_unless_special)

    def _table(self, *, skip_special_tokens: bool) -> PieceTable:
        return self._skipping if skip_special_tokens else self._shown

    def _piece_unless_special(self, token_id: int) -> Piece:
        return None if token_id in self._special_ids else self._shown[token_id]

    def _piece_of(self, token_id: int) -> Piece:
        token = self._backend.id_to_token(token_id)
        return None if token is None else self.piece_of_token(token)

    @abstractmethod
    def piece_of_token(self, token: str) -> Piece:
        """What a token of the vocabulary stands for."""

    def token_bytes(self, token_id: int) -> bytes:
        piece = self._shown[token_id]
        return piece.encode() if isinstance(piece, str) else piece or b""


class ByteLevelDecoder(_PieceDecoder):
    """Each character of a token is a byte; a token with any other character is plain text."""

    def piece_of_token(self, token: str) -> Piece:
        try:
            data = bytes(map(BYTE_OF_CHAR.__getitem__, token))
        except KeyError:
            return token
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data

    def start(self, *, skip_special_tokens: bool) -> TextDecoder:
        return ByteLevelText(self._table(skip_special_tokens=skip_special_tokens))


class ByteFallbackDecoder(_PieceDecoder):
    """`replacements` are made in every token; `<0xNN>` is a byte."""

    def __init__(
        self,
        whole: WholeDecoder,
        special_ids: frozenset[int],
        replacements: Sequence[tuple[str, str]],
        num_strip: int,
    ) -> None:
        super().__init__(whole, special_ids)
        self._replacements = replacements
        self._num_strip = num_strip

    def piece_of_token(self, token: str) -> Piece:
        for pattern, content in self._replacements:
            token = token.replace(pattern, content)
        found = _BYTE_TOKEN.fullmatch(token)
        return token if found is None else bytes.fromhex(found[1])

    def start(self, *, skip_special_tokens: bool) -> TextDecoder:
        return ByteFallbackText(
            self._table(skip_special_tokens=skip_special_tokens), self._num_strip
        )


class MetaspaceDecoder(_PieceDecoder):
    """`replacement` stands for a space; if one was prepended, the first token's ones vanish."""

    def __init__(
        self,
        whole: WholeDecoder,
        special_ids: frozenset[int],
        replacement: str,
        *,
        is_prepended: bool,
    ) -> None:
        super().__init__(whole, special_ids)
        self._replacement = replacement
        first = self._first_piece if is_prepended else self._piece_of
        self._first_shown = PieceTable(first)
        self._first_skipping = PieceTable(
            lambda token_id: None if token_id in special_ids else first(token_id)
        )

    def piece_of_token(self, token: str) -> Piece:
        return token.replace(self._replacement, " ")

    def _first_piece(self, token_id: int) -> Piece:
        token = self._backend.id_to_token(token_id)
        return None if token is None else token.replace(self._replacement, "")

    def start(self, *, skip_special_tokens: bool) -> TextDecoder:
        first = self._first_skipping if skip_special_tokens else self._first_shown
        return MetaspaceText(self._table(skip_special_tokens=skip_special_tokens), first)


class OtherDecoder:
    """Known as a function only."""

    def __init__(self, whole: WholeDecoder) -> None:
        self._whole = whole

    def start(self, *, skip_special_tokens: bool) -> TextDecoder:
        return WindowText(
            lambda ids: self._whole.decode(ids, skip_special_tokens=skip_special_tokens)
        )

    def token_bytes(self, token_id: int) -> bytes:
        return self._whole.decode([token_id], skip_special_tokens=False).encode()


def decoder_of(whole: WholeDecoder, special_ids: frozenset[int]) -> TokenDecoder:
    """The kind of decoder that `whole` is, found by its stages and its vocabulary."""
    if whole.cleans_up:
        return OtherDecoder(whole)
    vocabulary = whole.backend.get_vocab(with_added_tokens=True)
    match _acting_stages(_stages(whole.backend), vocabulary):
        case [{"type": "ByteLevel"}]:
            return ByteLevelDecoder(whole, special_ids)
        case [{"type": "Metaspace", "replacement": str(replacement), **options}]:
            is_prepended = options.get("prepend_scheme", "always") != "never"
            return MetaspaceDecoder(whole, special_ids, replacement, is_prepended=is_prepended)
        case stages:
            return _byte_fallback(stages, whole, special_ids) or OtherDecoder(whole)


def _byte_fallback(
    stages: list[Stage], whole: WholeDecoder, special_ids: frozenset[int]
) -> TokenDecoder | None:
    """Replace..., ByteFallback, Fuse and perhaps Strip of leading spaces; None if it isn't."""
    types = [stage["type"] for stage in stages]
    if "ByteFallback" not in types:
        return None
    border = types.index("ByteFallback")
    replacements: list[tuple[str, str]] = []
    for stage in stages[:border]:
        match stage:
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
                replacements.append((pattern, content))
            case _:
                return None
    match stages[border + 1 :]:
        case [] | [{"type": "Fuse"}]:
            num_strip = 0
        case [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": int(start), "stop": 0}]:
            num_strip = start
        case _:
            return None
    return ByteFallbackDecoder(whole, special_ids, replacements, num_strip)


def _stages(backend: Tokenizer) -> list[Stage]:
    """The decoder's stages in order, as tokenizer.json describes them."""
    if backend.decoder is None:
        return []
    description = json.loads(backend.decoder.__getstate__())
    if description["type"] == "Sequence":
        return description["decoders"]
    return [description]


def _acting_stages(stages: list[Stage], vocabulary: Mapping[str, int]) -> list[Stage]:
    """Reduce a chain that ends in ByteLevel to that stage, if the others never do anything.

    True for checkpoints whose converter wrote a catch-all chain: no token is a byte token, none
    holds a replaced pattern, and all are spelled in the byte alphabet, so that fusing them first
    changes nothing.
    """
    if len(stages) < 2 or stages[-1]["type"] != "ByteLevel":
        return stages
    idle: dict[str, Callable[[Stage], bool]] = {
        "ByteFallback": lambda _: not any(map(_BYTE_TOKEN.fullmatch, vocabulary)),
        "Fuse": lambda _: True,
        "Replace": lambda stage: _is_foreign_char(stage["pattern"].get("String")),
    }
    is_byte_level = all(char in BYTE_OF_CHAR for token in vocabulary for char in token)
    others_idle = all(stage["type"] in idle and idle[stage["type"]](stage) for stage in stages[:-1])
    return stages[-1:] if is_byte_level and others_idle else stages


def _is_foreign_char(pattern: str | None) -> bool:
    """A pattern with a character outside the byte alphabet matches no text spelled in it."""
    return bool(pattern) and any(char not in BYTE_OF_CHAR for char in str(pattern))


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_OF_CHAR = _byte_alphabet()
