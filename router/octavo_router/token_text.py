"""Token ids into text, piece by piece: one small state machine per kind of decoder.

A tokenizer's decoder is a function of the whole id list; an answer arrives id by id. Each
`TextDecoder` here gives, joined over all pushes and `finish`, exactly what the whole-list
decoder gives, with a bounded amount of work per id: nothing is ever decoded twice.

    ByteLevelText     GPT-2's byte alphabet (Llama 3, Qwen, SmolLM): a UTF-8 stream
    ByteFallbackText  sentencepiece BPE (Llama 2, Mistral, Gemma): text tokens and runs of bytes
    MetaspaceText     sentencepiece unigram (T5): text tokens, the first one special
    WindowText        any other decoder: differences of decoded windows (not always exact)

Must not know: stop strings, requests. Entry points: `TextDecoder`, `PieceTable`, the classes.
"""

from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Protocol

REPLACEMENT = "\ufffd"
# One id's contribution: text, raw bytes that may be part of a character, or None for an id
# that the decoder never sees (skipped, or unknown to the tokenizer).
Piece = str | bytes | None


class TextDecoder(Protocol):
    """One answer's ids into text. All text given out is well-formed."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that these ids settle; bytes of an unfinished character stay inside."""
        ...

    def finish(self) -> str:
        """What stayed inside, as the whole-list decoder shows it. Push nothing afterwards."""
        ...


class PieceTable(dict[int, Piece]):
    """id → piece, worked out when an id is first seen; shared by all answers of a tokenizer.

    A plain dict lookup on the hot path. Threads may race to fill an entry: both write the same.
    """

    def __init__(self, piece_of: Callable[[int], Piece]) -> None:
        super().__init__()
        self._piece_of = piece_of

    def __missing__(self, token_id: int) -> Piece:
        piece = self[token_id] = self._piece_of(token_id)
        return piece


class ByteLevelText:
    """Bytes of all ids form one UTF-8 stream; each maximal broken part shows as one U+FFFD.

    `str` pieces are well-formed by themselves, `bytes` pieces need their neighbours.
    """

    __slots__ = ("_pending", "_pieces")

    def __init__(self, pieces: PieceTable) -> None:
        self._pieces = pieces
        # Begins a character that later bytes may complete: at most 3 bytes.
        self._pending = b""

    def push(self, token_ids: Sequence[int]) -> str:
        text = ""
        pieces = self._pieces
        for token_id in token_ids:
            piece = pieces[token_id]
            if not piece:
                continue
            if isinstance(piece, str):
                if self._pending:
                    text += self.finish()
                text += piece
            else:
                data = self._pending + piece
                settled, num_used = utf_8_decode(data, "replace", False)
                self._pending = data[num_used:]
                text += settled
        return text

    def finish(self) -> str:
        # Mostly one U+FFFD; Python waits after ED A0..BF (a surrogate's start), which is two.
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text


class ByteFallbackText:
    """Text tokens as they are; a run of byte tokens is text if all of it is well-formed, else
    each of its bytes is a U+FFFD. `num_strip` leading spaces of the answer are dropped.

    A run is judged as a whole, so a well-formed one is held back until a text token ends it; a
    broken one is settled at its first broken byte.
    """

    __slots__ = ("_is_broken", "_num_strip", "_pieces", "_run", "_tail")

    def __init__(self, pieces: PieceTable, num_strip: int) -> None:
        self._pieces = pieces
        self._num_strip = num_strip
        self._run = bytearray()
        self._tail = b""  # the run's last, unfinished character
        self._is_broken = False

    def push(self, token_ids: Sequence[int]) -> str:
        text = ""
        pieces = self._pieces
        for token_id in token_ids:
            piece = pieces[token_id]
            if piece is None:
                continue
            if isinstance(piece, bytes):
                text += self._push_byte(piece)
                continue
            if self._run or self._is_broken:
                text += self._end_run()
            text += piece
        return self._strip(text) if self._num_strip else text

    def finish(self) -> str:
        return self._strip(self._end_run())

    def _push_byte(self, byte: bytes) -> str:
        if self._is_broken:
            return REPLACEMENT
        self._run += byte
        self._tail += byte
        try:
            _, num_used = utf_8_decode(self._tail, "strict", False)
        except UnicodeDecodeError:
            text = REPLACEMENT * len(self._run)
            self._run.clear()
            self._is_broken = True
            return text
        self._tail = self._tail[num_used:]
        return ""

    def _end_run(self) -> str:
        text = REPLACEMENT * len(self._run) if self._tail else self._run.decode()
        self._run.clear()
        self._tail = b""
        self._is_broken = False
        return text

    def _strip(self, text: str) -> str:
        while self._num_strip and text:
            if text[0] != " ":
                self._num_strip = 0
                break
            text = text[1:]
            self._num_strip -= 1
        return text


class MetaspaceText:
    """Each id is text of its own; in the answer's first one the metaspaces vanish."""

    __slots__ = ("_first_pieces", "_is_first", "_pieces")

    def __init__(self, pieces: PieceTable, first_pieces: PieceTable) -> None:
        self._pieces = pieces
        self._first_pieces = first_pieces
        self._is_first = True

    def push(self, token_ids: Sequence[int]) -> str:
        text = ""
        for token_id in token_ids:
            piece = (self._first_pieces if self._is_first else self._pieces)[token_id]
            if piece is not None:
                assert isinstance(piece, str)
                self._is_first = False
                text += piece
        return text

    def finish(self) -> str:
        return ""


class WindowText:
    """For decoders that are only known as a function: what a longer window says in addition.

    Exact wherever an id's text depends on the `CONTEXT` ids before it only. A window that ends
    in U+FFFD waits for more ids, but never for more than `MAX_WAIT`.
    """

    CONTEXT = 8
    MAX_WAIT = 8

    __slots__ = ("_context", "_decode", "_waiting")

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._waiting: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._push_one, token_ids))

    def finish(self) -> str:
        return self._settle(self._whole()) if self._waiting else ""

    def _push_one(self, token_id: int) -> str:
        self._waiting.append(token_id)
        whole = self._whole()
        if whole.endswith(REPLACEMENT) and len(self._waiting) < self.MAX_WAIT:
            return ""
        return self._settle(whole)

    def _whole(self) -> str:
        return self._decode([*self._context, *self._waiting])

    def _settle(self, whole: str) -> str:
        known = self._decode(self._context)
        num_known = 0
        for before, now in zip(known, whole, strict=False):
            if before != now:
                break
            num_known += 1
        self._context = list(chain(self._context, self._waiting))[-self.CONTEXT :]
        self._waiting.clear()
        return whole[num_known:]
