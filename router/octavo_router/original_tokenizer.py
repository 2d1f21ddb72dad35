"""Tokenizers of model folders from before tokenizer.json, without running code from the folder.

    tokenizer.model   SentencePiece: Llama 2, Yi, Mistral, and ChatGLM2/3 with its own tokens
    tokenizer.model   tiktoken's ranks under that name: GLM-4
    qwen.tiktoken     Qwen 1

What belongs to a model family (special tokens, what begins a text, chat format) is chosen here
by the folder's files. Must not know: requests.
Entry point: `read_original`.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, normalizers, processors

from octavo.errors import ConfigurationError
from octavo_router.chat_formats import CHATGLM2, CHATGLM3, GLM4, QWEN, ChatFormat
from octavo_router.sentencepiece_model import read_sentencepiece
from octavo_router.tiktoken_ranks import is_tiktoken, read_tiktoken
from octavo_router.tokenizer_files import Json, add_tokens, content_of, read_json

logger = logging.getLogger(__name__)

# huggingface.co/THUDM/chatglm3-6b: tokenization_chatglm.py, `SPTokenizer`; ChatGLM2 has the first
# five. The ids follow the file's pieces.
_GLM_TOKENS = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop")
_GLM_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_GLM_PREFIX = ("[gMASK]", "sop")
# huggingface.co/THUDM/glm-4-9b: tokenization_chatglm.py, `ChatGLM4Tokenizer`, and the tokens of
# its tokenizer_config.json.
_GLM4_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GLM4_PREFIX = ("[gMASK]", "<sop>")
_GLM4_TOKENS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    *_GLM_ROLES,
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
)
# huggingface.co/Qwen/Qwen-7B: tokenization_qwen.py, `PAT_STR` and `SPECIAL_TOKENS`.
_QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *(f"<|extra_{number}|>" for number in range(205)),
)


@dataclass(frozen=True, slots=True)
class OriginalTokenizer:
    """`backend`: ready to encode. `config`: what tokenizer_config.json leaves to the code."""

    backend: Tokenizer
    config: Json = field(default_factory=dict[str, Any])
    chat: ChatFormat | None = None

    @property
    def end_tokens(self) -> tuple[str, ...]:
        """Special tokens that end an answer beside those that the folder names."""
        return () if self.chat is None else self.chat.end_tokens


def read_original(folder: Path) -> OriginalTokenizer | None:
    """The tokenizer of a folder without tokenizer.json, None if it has no file known here.

    ConfigurationError for a broken file, and where two files disagree about an id.
    """
    config = _tokenizer_config(folder)
    file = folder / "qwen.tiktoken"
    if file.is_file():
        original = _qwen(file, folder)
    elif not (file := folder / "tokenizer.model").is_file():
        return None
    elif is_tiktoken(file):
        # Other models have ranks under this name, too, with patterns of their own.
        if not _is_chatglm(folder, config):
            return None
        original = _glm4(file)
    elif _is_chatglm(folder, config):
        original = _chatglm(file, folder, config)
    else:
        original = _llama(file, config)
    _check_ids(original.backend, config, folder)
    logger.info("%s has no tokenizer.json: reading %s", folder, file.name)
    return original


def _tokenizer_config(folder: Path) -> Json:
    """tokenizer_config.json, with the tokens of the older files in it."""
    config = read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= read_json(folder / "special_tokens_map.json")
        config["added_tokens_decoder"] = {
            str(token_id): {"content": content, "special": False}
            for content, token_id in read_json(folder / "added_tokens.json").items()
        }
    return config


def _llama(file: Path, config: Json) -> OriginalTokenizer:
    """Any SentencePiece model; the flags are those of transformers' Llama tokenizer.

    `legacy`, true where it isn't named: each text after a special token begins with a space, as
    in the authors' code, which tokenizes it by itself.
    """
    listed = _listed(config)
    found = read_sentencepiece(
        file,
        may_prefix=config.get("add_prefix_space") is not False,
        prefix_each_segment=config.get("legacy") is not False,
        renamed=listed,
    )
    named = {"bos_token": found.bos_token, "eos_token": found.eos_token}
    defaults: Json = {name: token for name, token in named.items() if token is not None}
    defaults["unk_token"] = found.unk_token
    defaults["added_tokens_decoder"] = config["added_tokens_decoder"]
    config = defaults | config
    add_tokens(found.backend, config)
    before = _tokens(config, "bos_token") if config.get("add_bos_token", True) else []
    after = _tokens(config, "eos_token") if config.get("add_eos_token", False) else []
    _surround(found.backend, before, after)
    return OriginalTokenizer(found.backend, defaults)


def _glm4(file: Path) -> OriginalTokenizer:
    """GLM-4: as ChatGLM, but over bytes."""
    backend = read_tiktoken(file, pattern=_GLM4_PATTERN, special_tokens=_GLM4_TOKENS)
    _surround(backend, _GLM4_PREFIX, ())
    return OriginalTokenizer(backend, {"eos_token": _GLM4_TOKENS[0]}, GLM4)


def _chatglm(file: Path, folder: Path, config: Json) -> OriginalTokenizer:
    """ChatGLM2 and 3: each text between special tokens is tokenized by itself."""
    is_third = _is_third(folder, config)
    found = read_sentencepiece(file, prefix_each_segment=True)
    tokens = (*_GLM_TOKENS, *_GLM_ROLES) if is_third else _GLM_TOKENS
    # "sop" and "eop" are parts of words, too: only standing alone are they tokens.
    found.backend.add_special_tokens(
        [AddedToken(token, single_word=token.isalpha(), normalized=False) for token in tokens]
    )
    _surround(found.backend, _GLM_PREFIX, ())
    return OriginalTokenizer(
        found.backend,
        {"eos_token": found.eos_token, "unk_token": found.unk_token},
        CHATGLM3 if is_third else CHATGLM2,
    )


def _qwen(file: Path, folder: Path) -> OriginalTokenizer:
    """Qwen 1: nothing begins a text. Only the chat models' files name a chat format."""
    backend = read_tiktoken(file, pattern=_QWEN_PATTERN, special_tokens=_QWEN_TOKENS)
    backend.normalizer = normalizers.NFC()
    chat_format = read_json(folder / "generation_config.json").get("chat_format")
    return OriginalTokenizer(
        backend, {"eos_token": _QWEN_TOKENS[0]}, QWEN if chat_format == "chatml" else None
    )


def _is_chatglm(folder: Path, config: Json) -> bool:
    model_type = read_json(folder / "config.json").get("model_type")
    return model_type == "chatglm" or config.get("tokenizer_class") == "ChatGLMTokenizer"


def _is_third(folder: Path, config: Json) -> bool:
    """ChatGLM3's files have ChatGLM2's names and fields: only it has tokens for roles.

    They stand in its tokenizer's code, which is read as text, and in its later configurations; a
    folder without either is known by the name that it was saved under.
    """
    code = folder / "tokenization_chatglm.py"
    if code.is_file():
        return _GLM_ROLES[1] in code.read_text(encoding="utf-8", errors="replace")
    names = (read_json(folder / "config.json").get("_name_or_path"), config.get("name_or_path"))
    return _GLM_ROLES[1] in _listed(config).values() or any(
        "chatglm3" in str(name).lower() for name in names
    )


def _listed(config: Json) -> dict[int, str]:
    """Ids of the added tokens that the configuration lists."""
    listed: Mapping[str, Any] = config.get("added_tokens_decoder") or {}
    return {int(token_id): content_of(token) for token_id, token in listed.items()}


def _tokens(config: Json, name: str) -> list[str]:
    return [content_of(config[name])] if config.get(name) else []


def _surround(backend: Tokenizer, before: Sequence[str], after: Sequence[str]) -> None:
    """Special tokens around every text."""
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        special_tokens=[(token, backend.token_to_id(token)) for token in (*before, *after)],
    )


def _check_ids(backend: Tokenizer, config: Json, folder: Path) -> None:
    for token_id, content in _listed(config).items():
        found = backend.token_to_id(content)
        if found != token_id:
            raise ConfigurationError(
                f"{folder}: the configuration lists {content!r} as id {token_id}, but the "
                f"tokenizer's file makes it {found}"
            )
