"""Reads a model folder's tokenizer files the way transformers does, without importing it.

tokenizer.json is the tokenizer; tokenizer_config.json (or the older special_tokens_map.json)
names special tokens, which are added to it; generation_config.json and config.json name the
ids that end an answer. Must not know: text, requests. Entry point: `read_tokenizer_files`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers

from octavo.errors import ConfigurationError

_NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_EXTRA_TOKENS = ("extra_special_tokens", "additional_special_tokens")
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """`backend`: ready to encode. `special_tokens`: names such as bos_token to their texts."""

    backend: Tokenizer
    config: Json
    special_tokens: Mapping[str, str]
    eos_token_ids: tuple[int, ...]


def read_json(file: Path) -> Json:
    """A JSON object, {} if the file is absent; anything else is a broken checkpoint."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{file} must hold a JSON object")
    return found


def read_tokenizer_files(
    folder: Path,
    backend: Tokenizer | None = None,
    *,
    defaults: Json | None = None,
    end_tokens: Sequence[str] = (),
) -> TokenizerFiles:
    """Read `folder`; `backend` stands in for its tokenizer.json where that is missing.

    `defaults`: what its tokenizer_config.json leaves unsaid. `end_tokens`: special tokens that
    end an answer beside those that the files name.
    """
    config = read_json(folder / "tokenizer_config.json")
    model_config = read_json(folder / "config.json")
    if "added_tokens_decoder" not in config:
        config |= read_json(folder / "special_tokens_map.json")
    config = (defaults or {}) | config
    if backend is None:
        file = folder / "tokenizer.json"
        try:
            backend = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises bare Exception
            raise ConfigurationError(f"{file} can't be read: {error}") from error
        if _is_llama_class(config, model_config):
            _use_llama_spaces(backend, config)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    add_tokens(backend, config)
    special_tokens = {name: content_of(config[name]) for name in _NAMED_TOKENS if config.get(name)}
    eos_ids = _eos_token_ids(folder, model_config, backend, special_tokens.get("eos_token"))
    end_ids = [backend.token_to_id(token) for token in end_tokens]
    eos_ids = tuple(dict.fromkeys([*eos_ids, *(i for i in end_ids if i is not None)]))
    return TokenizerFiles(backend, config, special_tokens, eos_ids)


def content_of(token: str | Mapping[str, Any]) -> str:
    """The text of a token that a file names, plainly or with its flags."""
    return token if isinstance(token, str) else token["content"]


def _added_token(token: str | Mapping[str, Any]) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True, normalized=False)
    flags = {name: bool(token.get(name, False)) for name in ("single_word", "lstrip", "rstrip")}
    # An added token is matched in normalized text unless it is special or says otherwise.
    is_special = bool(token.get("special", False))
    normalized = bool(token.get("normalized", not is_special))
    return AddedToken(token["content"], special=is_special, normalized=normalized, **flags)


def add_tokens(backend: Tokenizer, config: Json) -> None:
    """Tokens that only the configuration knows, and the special ones among all."""
    decoder: Mapping[str, Any] = config.get("added_tokens_decoder") or {}
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = {content_of(token): token for _, token in sorted(decoder.items(), key=_id_of)}
    backend.add_tokens(
        [_added_token(token) for content, token in listed.items() if content not in known]
    )
    known.update(listed)
    # A named token counts as special even where the files only list it as an ordinary one.
    special = dict(_special_tokens(config))
    backend.add_special_tokens(
        [
            _added_token(_as_special(listed.get(content, token)))
            for content, token in special.items()
            if content not in _special_contents(backend)
        ]
    )


def _id_of(item: tuple[str, Any]) -> int:
    return int(item[0])


def _special_contents(backend: Tokenizer) -> set[str]:
    added = backend.get_added_tokens_decoder().values()
    return {token.content for token in added if token.special}


def _as_special(token: str | Mapping[str, Any]) -> str | Mapping[str, Any]:
    return token if isinstance(token, str) else {**token, "special": True}


def _special_tokens(config: Json) -> Iterator[tuple[str, str | Mapping[str, Any]]]:
    for name in _NAMED_TOKENS:
        if config.get(name):
            yield content_of(config[name]), config[name]
    for name in _EXTRA_TOKENS:
        extra = config.get(name) or []
        for token in extra.values() if isinstance(extra, dict) else extra:
            yield content_of(token), token


def _is_llama_class(config: Json, model_config: Json) -> bool:
    """transformers rebuilds these from the vocabulary, with its own treatment of spaces."""
    named = config.get("tokenizer_class") or model_config.get("tokenizer_class") or ""
    is_llama = named.removesuffix("Fast") == "LlamaTokenizer"
    return is_llama and model_config.get("model_type", "llama") == "llama"


def _use_llama_spaces(backend: Tokenizer, config: Json) -> None:
    """The space before a text: once per text (or per segment in `legacy` files), or not at all."""
    has_prefix = config.get("add_prefix_space") is not False
    scheme = "always" if config.get("legacy") else "first"
    backend.normalizer = None  # type: ignore[assignment]
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        "▁", prepend_scheme=scheme if has_prefix else "never", split=False
    )
    strip = [decoders.Strip(content=" ", left=1)] if has_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )


def _eos_token_ids(
    folder: Path, model_config: Json, backend: Tokenizer, eos_token: str | None
) -> tuple[int, ...]:
    """Ids that end an answer: generation_config.json's, else config.json's, and the eos_token."""
    generation_config = read_json(folder / "generation_config.json")
    text_config: Json = model_config.get("text_config") or {}
    found: list[int] = []
    for config in (generation_config, model_config, text_config):
        ids = config.get("eos_token_id")
        if ids is not None:
            found += ids if isinstance(ids, list) else [ids]
            break
    if eos_token is not None and (eos_id := backend.token_to_id(eos_token)) is not None:
        found.append(eos_id)
    return tuple(dict.fromkeys(found))
