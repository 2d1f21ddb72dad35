"""A tiktoken file (`qwen.tiktoken`) as a `tokenizers` tokenizer.

Each line is a token, base64 of its bytes, and its rank, which is its id
(github.com/openai/tiktoken, load.py). A text is split by a pattern; in each part the two
neighbours whose joined bytes have the lowest rank merge first; a part that is a token as it is
stays whole. Special tokens take the ids after the last rank. Ids equal tiktoken's, but where two
cuts of one token overlap. Must not know: which model a file belongs to.
Entry points: `read_tiktoken`, `is_tiktoken`.
"""

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from octavo.errors import ConfigurationError
from octavo_router.token_decoder import BYTE_OF_CHAR

_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
# For `str.translate` of bytes as latin-1 text.
_LETTERS = {byte: char for char, byte in BYTE_OF_CHAR.items()}


def read_tiktoken(file: Path, *, pattern: str, special_tokens: Iterable[str]) -> Tokenizer:
    """Read `file`; texts are split by `pattern`. ConfigurationError names a broken line."""
    tokens = _read_ranks(file)
    backend = Tokenizer(
        models.BPE(
            vocab={token: rank for rank, token in enumerate(tokens)},
            merges=list(_merges(tokens)),
            ignore_merges=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special_tokens]
    )
    return backend


def is_tiktoken(file: Path) -> bool:
    """Whether the first line is what such a file's lines are."""
    with file.open("rb") as lines:
        return _LINE.match(lines.read(200)) is not None


def _read_ranks(file: Path) -> Sequence[str]:
    """Tokens in the order of their ranks, spelled in the byte alphabet."""
    ranks: dict[int, str] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            data = base64.b64decode(token, validate=True)
            ranks[int(rank)] = data.decode("latin-1").translate(_LETTERS)
        except (ValueError, binascii.Error) as error:
            raise ConfigurationError(
                f"{file}, line {number}: expected base64 of a token and its rank"
            ) from error
    tokens = [ranks[rank] for rank in sorted(ranks)]
    if not tokens or sorted(ranks) != list(range(len(tokens))):
        raise ConfigurationError(f"{file}: ranks must go from 0 on without a gap")
    if missing := set(BYTE_OF_CHAR) - set(tokens):
        byte = min(map(BYTE_OF_CHAR.__getitem__, missing))
        raise ConfigurationError(f"{file}: no token stands for byte 0x{byte:02x}")
    return tokens


def _merges(tokens: Sequence[str]) -> Iterator[tuple[str, str]]:
    """All ways to cut a token in two others, in the order of the tokens' ranks."""
    known = set(tokens)
    for token in tokens:
        for cut in range(1, len(token)):
            if token[:cut] in known and token[cut:] in known:
                yield token[:cut], token[cut:]
