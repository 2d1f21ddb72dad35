"""Small model folders from before tokenizer.json: SentencePiece models and tiktoken files.

Each `*_folder` function trains a tokenizer on a few lines of many scripts (under a tenth of a
second), writes what the original checkpoints hold, and returns the folder.
"""

import base64
import io
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece
import tiktoken
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from octavo_router.token_decoder import BYTE_OF_CHAR
from tests.unit.router.trained_tokenizers import CORPUS

# As huggingface.co/Qwen/Qwen-7B's tokenization_qwen.py writes it.
QWEN_PATTERN = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"""
    r"""| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
# As huggingface.co/THUDM/glm-4-9b's tokenizer_config.json lists them.
GLM4_TOKENS = (
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>"),
    *("<|user|>", "<|assistant|>", "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>"),
    *("<|begin_of_video|>", "<|end_of_video|>"),
)
_LLAMA_OPTIONS: dict[str, Any] = {
    "model_type": "bpe",
    "vocab_size": 600,
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
}


@cache
def train_sentencepiece(options: tuple[tuple[str, Any], ...] = ()) -> bytes:
    """A model file as Llama's was trained, but for `options`."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in CORPUS for line in text.splitlines()),
        model_writer=model,
        character_coverage=0.98,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
        **(_LLAMA_OPTIONS | dict(options)),
    )
    return model.getvalue()


def write_json(folder: Path, **files: Any) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def llama_folder(folder: Path, config: dict[str, Any] | None = None, **options: Any) -> Path:
    """Llama 2 as published first: the model file and a few flags."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(train_sentencepiece(tuple(options.items())))
    write_json(
        folder,
        tokenizer_config={"tokenizer_class": "LlamaTokenizer"} if config is None else config,
        config={"model_type": "llama", "eos_token_id": 2},
    )
    return folder


def chatglm_folder(folder: Path, version: int) -> Path:
    """ChatGLM2 or 3 as published: its tokenizer's class is code in the folder."""
    llama_folder(folder, {"tokenizer_class": "ChatGLMTokenizer", "remove_space": False})
    name = f"THUDM/chatglm{version}-6b"
    write_json(folder, config={"model_type": "chatglm", "_name_or_path": name, "eos_token_id": 2})
    roles = '["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]'
    code = f"raise SystemExit('run')\nroles = {roles if version == 3 else []}\n"
    (folder / "tokenization_chatglm.py").write_text(code)
    return folder


@cache
def train_ranks() -> dict[bytes, int]:
    """Byte-level ranks: all bytes, then merged tokens in the order in which they were learnt."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator(CORPUS, trainer)
    vocabulary = json.loads(learner.to_str())["model"]["vocab"]
    merged = [token for token in sorted(vocabulary, key=vocabulary.__getitem__) if len(token) > 1]
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [bytes(map(BYTE_OF_CHAR.__getitem__, token)) for token in merged]
    return {token: rank for rank, token in enumerate(tokens)}


def write_ranks(file: Path, ranks: dict[bytes, int]) -> None:
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    file.write_text("".join(lines))


def qwen_folder(folder: Path, chat_format: str | None = "chatml") -> Path:
    """Qwen 1 as published: nothing but its ranks and the name of a chat format."""
    folder.mkdir(parents=True, exist_ok=True)
    write_ranks(folder / "qwen.tiktoken", train_ranks())
    write_json(
        folder,
        tokenizer_config={"tokenizer_class": "QWenTokenizer", "model_max_length": 8192},
        config={"model_type": "qwen"},
        generation_config={"chat_format": chat_format, "eos_token_id": len(train_ranks())},
    )
    return folder


def glm4_folder(folder: Path) -> Path:
    """GLM-4 in its authors' layout: ranks under SentencePiece's name, and the special tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    write_ranks(folder / "tokenizer.model", train_ranks())
    listed = {len(train_ranks()) + index: token for index, token in enumerate(GLM4_TOKENS)}
    write_json(
        folder,
        tokenizer_config={
            "tokenizer_class": "ChatGLM4Tokenizer",
            "added_tokens_decoder": {
                str(token_id): {"content": token, "special": True}
                for token_id, token in listed.items()
            },
            "additional_special_tokens": list(GLM4_TOKENS),
            "eos_token": "<|endoftext|>",
        },
        config={"model_type": "chatglm", "eos_token_id": len(train_ranks())},
    )
    return folder


def qwen_oracle() -> tiktoken.Encoding:
    """tiktoken with the ranks and special tokens of `qwen_folder`."""
    extras = (f"<|extra_{number}|>" for number in range(205))
    return _oracle(QWEN_PATTERN, ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *extras))


def glm4_oracle() -> tiktoken.Encoding:
    """tiktoken with the ranks and special tokens of `glm4_folder`."""
    return _oracle(QWEN_PATTERN.replace(r"\p{N}| ", r"\p{N}{1,3}| "), GLM4_TOKENS)


def _oracle(pattern: str, special_tokens: Sequence[str]) -> tiktoken.Encoding:
    ranks = train_ranks()
    return tiktoken.Encoding(
        "test",
        pat_str=pattern,
        mergeable_ranks=ranks,
        special_tokens={token: len(ranks) + index for index, token in enumerate(special_tokens)},
    )
