"""A SentencePiece model file (`tokenizer.model`) as a `tokenizers` tokenizer.

The file is a protobuf (sentencepiece_model.proto of github.com/google/sentencepiece) that holds
every piece with its score and type, and how text is normalised. What is made of it:

    BPE       two neighbours merge if their text is a piece, the one with the best score first:
              every way to cut a piece in two other pieces is a merge, ordered by the score
    unigram   pieces and scores as they are
    bytes     a character outside the pieces becomes its <0xNN> pieces, if the file has them
    spaces    are the letter U+2581; one more stands before the text (the "dummy prefix")
    symbols   "user defined" pieces are cut out of the text before anything merges

Ids equal SentencePiece's own, but where two merges of one score overlap ("aba" in "ababa").
Control pieces such as <s> are special tokens, which SentencePiece reads in no text.
Must not know: which model a file belongs to. Entry point: `read_sentencepiece`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from octavo.errors import ConfigurationError

SPACE = "▁"
# TrainerSpec.ModelType and ModelProto.SentencePiece.Type of the protobuf.
_MODEL_TYPES = {1: "UNIGRAM", 2: "BPE", 3: "WORD", 4: "CHAR"}
_NORMAL, _CONTROL, _SYMBOL = 1, 3, 4
# The pieces that a text may be cut into as it is written, and the score of all others.
_WRITTEN = (_NORMAL, _SYMBOL)
_NEVER = -1e6
# The fields that are read, by message: name, number, type, default. The library's generated
# module isn't used: each of its releases refuses the protobuf runtimes before its own.
_FIELDS: dict[str, list[tuple[str, int, Any, str]]] = {
    "SentencePiece": [
        ("piece", 1, Field.TYPE_STRING, ""),
        ("score", 2, Field.TYPE_FLOAT, "0"),
        ("type", 3, Field.TYPE_INT32, "1"),
    ],
    "TrainerSpec": [
        ("model_type", 3, Field.TYPE_INT32, "1"),
        ("treat_whitespace_as_suffix", 24, Field.TYPE_BOOL, "false"),
        ("byte_fallback", 35, Field.TYPE_BOOL, "false"),
        ("unk_id", 40, Field.TYPE_INT32, "0"),
        ("bos_id", 41, Field.TYPE_INT32, "1"),
        ("eos_id", 42, Field.TYPE_INT32, "2"),
    ],
    "NormalizerSpec": [
        ("precompiled_charsmap", 2, Field.TYPE_BYTES, ""),
        ("add_dummy_prefix", 3, Field.TYPE_BOOL, "true"),
        ("remove_extra_whitespaces", 4, Field.TYPE_BOOL, "true"),
        ("escape_whitespaces", 5, Field.TYPE_BOOL, "true"),
    ],
}
_PARTS = [
    ("pieces", 1, "SentencePiece", Field.LABEL_REPEATED),
    ("trainer_spec", 2, "TrainerSpec", Field.LABEL_OPTIONAL),
    ("normalizer_spec", 3, "NormalizerSpec", Field.LABEL_OPTIONAL),
]


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """`backend`: ready to encode. The start and end token, None where the model has none."""

    backend: Tokenizer
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None


def read_sentencepiece(
    file: Path,
    *,
    may_prefix: bool = True,
    prefix_each_segment: bool = False,
    renamed: Mapping[int, str] | None = None,
) -> SentencePieceModel:
    """Read `file`. ConfigurationError if it is broken, or of a kind that isn't known.

    `may_prefix` False: no space before the text, whatever the file says. `prefix_each_segment`:
    after every special token a text of its own begins, with a space before it. `renamed`: what
    ids are called instead of the file's placeholders.
    """
    proto = _parse(file)
    for token_id, text in (renamed or {}).items():
        if token_id < len(proto.pieces):
            proto.pieces[token_id].piece = text
    pieces = [piece.piece for piece in proto.pieces]
    symbols = [piece.piece for piece in proto.pieces if piece.type == _SYMBOL]
    backend = Tokenizer(_model(proto, file, has_symbols=bool(symbols)))
    has_prefix = may_prefix and proto.normalizer_spec.add_dummy_prefix
    is_condensed = proto.normalizer_spec.remove_extra_whitespaces
    backend.normalizer = _normalizer(proto.normalizer_spec, has_prefix=has_prefix)
    scheme = "always" if prefix_each_segment else "first"
    backend.pre_tokenizer = _pre_tokenizer(
        scheme if has_prefix else "never", symbols, is_condensed=is_condensed
    )
    backend.decoder = _decoder(has_prefix=has_prefix)
    backend.add_special_tokens(
        [
            AddedToken(piece.piece, special=True, normalized=False)
            for piece in proto.pieces
            if piece.type == _CONTROL
        ]
    )
    spec = proto.trainer_spec
    bos, eos, unk = (
        pieces[token_id] if 0 <= token_id < len(pieces) else None
        for token_id in (spec.bos_id, spec.eos_id, spec.unk_id)
    )
    return SentencePieceModel(backend, bos, eos, unk)


@cache
def _model_class() -> Any:
    """The ModelProto message, in a pool of its own: nothing else's definition is in the way."""
    schema = FileDescriptorProto(name="sentencepiece_model.proto", package="p", syntax="proto2")
    for message, fields in _FIELDS.items():
        described = schema.message_type.add(name=message)
        for name, number, kind, default in fields:
            field = described.field.add(name=name, number=number, type=kind, default_value=default)
            field.label = Field.LABEL_OPTIONAL
    model = schema.message_type.add(name="ModelProto")
    for name, number, message, label in _PARTS:
        model.field.add(
            name=name,
            number=number,
            label=label,
            type=Field.TYPE_MESSAGE,
            type_name=f".p.{message}",
        )
    pool = DescriptorPool()
    pool.Add(schema)
    return GetMessageClass(pool.FindMessageTypeByName("p.ModelProto"))


def _parse(file: Path) -> Any:
    """The file's ModelProto."""
    proto = _model_class()()
    try:
        proto.ParseFromString(file.read_bytes())
    except Exception as error:  # protobuf's DecodeError, whichever implementation raises it
        raise ConfigurationError(f"{file} is no SentencePiece model: {error}") from error
    if not 0 <= proto.trainer_spec.unk_id < len(proto.pieces):
        raise ConfigurationError(f"{file} is no SentencePiece model: it has no unknown piece")
    if (
        proto.trainer_spec.treat_whitespace_as_suffix
        or not proto.normalizer_spec.escape_whitespaces
    ):
        raise ConfigurationError(
            f"{file} keeps spaces in a way that isn't supported; save a tokenizer.json beside it"
        )
    return proto


def _model(proto: Any, file: Path, *, has_symbols: bool) -> models.Model:
    spec = proto.trainer_spec
    kind = _MODEL_TYPES.get(spec.model_type, str(spec.model_type))
    if kind == "UNIGRAM":
        return models.Unigram(
            [
                (piece.piece, piece.score if piece.type in _WRITTEN else _NEVER)
                for piece in proto.pieces
            ],
            unk_id=spec.unk_id,
            byte_fallback=spec.byte_fallback,
        )
    if kind != "BPE":
        raise ConfigurationError(f"{file} is a {kind} model; BPE and UNIGRAM are supported")
    vocabulary = {piece.piece: token_id for token_id, piece in enumerate(proto.pieces)}
    # Sorting is stable: pieces of one score merge in the order of their ids.
    mergeable = sorted(
        (piece for piece in proto.pieces if piece.type in _WRITTEN),
        key=lambda piece: -piece.score,
    )
    known = {piece.piece for piece in mergeable}
    return models.BPE(
        vocab=vocabulary,
        merges=[
            (text[:cut], text[cut:])
            for text in (piece.piece for piece in mergeable if piece.type == _NORMAL)
            for cut in range(1, len(text))
            if text[:cut] in known and text[cut:] in known
        ],
        unk_token=proto.pieces[spec.unk_id].piece,
        fuse_unk=True,
        byte_fallback=spec.byte_fallback,
        # A symbol stands alone after the split, and no merge leads to it.
        ignore_merges=has_symbols,
    )


def _normalizer(spec: Any, *, has_prefix: bool) -> normalizers.Normalizer:
    """The file's table of replacements, then what it says about spaces."""
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        # Of leading spaces one stays where it is the space before the text.
        ends = " +$" if has_prefix else "^ +| +$"
        steps.append(normalizers.Replace(Regex(ends), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def _pre_tokenizer(
    scheme: str, symbols: list[str], *, is_condensed: bool
) -> pre_tokenizers.PreTokenizer:
    """The space before the text, and symbols cut out.

    `Metaspace` adds none before a text that begins with one. SentencePiece does, unless it
    condenses spaces: then a stage before it adds a plain one (the normalizer left none), which
    is spelled as all others afterwards.
    """
    stages: list[pre_tokenizers.PreTokenizer] = []
    if not is_condensed:
        stages.append(pre_tokenizers.Metaspace(" ", prepend_scheme=scheme, split=False))
        scheme = "never"
    stages.append(pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False))
    if symbols:
        longest_first = sorted(symbols, key=len, reverse=True)
        pattern = Regex("|".join(map(re.escape, longest_first)))
        stages.append(pre_tokenizers.Split(pattern, "isolated"))
    return pre_tokenizers.Sequence(stages)


def _decoder(*, has_prefix: bool) -> decoders.Decoder:
    strip = [decoders.Strip(content=" ", left=1)] if has_prefix else []
    return decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
