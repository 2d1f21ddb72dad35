"""Small tokenizers of every kind that models have, trained on a few lines of many scripts.

Each `*_style` function writes a model folder (tokenizer files only) and returns it;
`tokenizer_of` gives the loaded tokenizer of a kind, `demo` among them.
"""

import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from octavo.hub import resolve_model
from octavo_router.tokenizer import Tokenizer as OctavoTokenizer
from octavo_router.tokenizer import load_tokenizer

# Letters that need 1 to 4 bytes, joined and combined characters, no spaces, spaces in a row.
SAMPLES = (
    "The quick brown fox jumps over the lazy dog, the dog sleeps.",
    "def main():\n    return {'a': 1,  'b': [2, 3]}\n\n\n\tprint(main())",
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "Größe, Straße, café, cafe\u0301, naïve.",
    "Привет, мир! Съешь ещё этих мягких французских булок.",
    "안녕하세요 세계, 오늘은 날씨가 좋네요.",
    "こんにちは世界。今日はいい天気ですね。",
    "今天天气很好，我们去公园散步吧。",
    "สวัสดีชาวโลก วันนี้อากาศดี",
    "مرحبا بالعالم، كيف حالك اليوم؟",
    "नमस्ते दुनिया, आप कैसे हैं?",
    "🙂🙃 👨‍👩‍👧‍👦 🇨🇿🇩🇪 👍🏽 ✨ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
)
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [*SAMPLES[:9] * 4, *SAMPLES]


def _save(folder: Path, tokenizer: Tokenizer, config: dict[str, Any], model_type: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def qwen_style(folder: Path) -> Path:
    """Byte-level BPE, NFC, a split by regex, ChatML tokens, a few added ones not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    # "a é" has letters of the byte alphabet and one that isn't: plain text for the decoder.
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<tool_call>", "a é")])
    listed = {
        str(token_id): added.__getstate__()
        for token_id, added in tokenizer.get_added_tokens_decoder().items()
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": listed,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "clean_up_tokenization_spaces": True,
        "add_bos_token": True,
    }
    return _save(folder, tokenizer, config, "qwen2")


def llama3_style(folder: Path) -> Path:
    """Byte-level BPE that begins every text with <|begin_of_text|>."""
    qwen_style(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|eot_id|>"])
    bos = "<|begin_of_text|>"
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{bos} $A",
                pair=f"{bos} $A {bos} $B",
                special_tokens=[(bos, tokenizer.token_to_id(bos))],
            ),
        ]
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": "<|eot_id|>",
    }
    return _save(folder, tokenizer, config, "llama")


def _byte_fallback_model() -> models.BPE:
    """Merges learnt on metaspaced text; a character outside them becomes <0xNN> tokens."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, limit_alphabet=80, show_progress=False)
    learner.train_from_iterator(CORPUS, trainer)
    learnt = json.loads(learner.to_str())["model"]
    special = ["<unk>", "<s>", "</s>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *learnt["vocab"]]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    return models.BPE(
        vocab=vocabulary,
        merges=[tuple(merge) for merge in learnt["merges"]],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )


def llama2_style(folder: Path, tokenizer_class: str = "PreTrainedTokenizerFast") -> Path:
    """Sentencepiece BPE with byte fallback, a space before the text, <s> before that."""
    tokenizer = Tokenizer(_byte_fallback_model())
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    config = {
        "tokenizer_class": tokenizer_class,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": {"__type": "AddedToken", "content": "<unk>", "normalized": False},
        "legacy": False,
        "add_bos_token": True,
        "add_eos_token": False,
    }
    return _save(folder, tokenizer, config, "llama")


def gemma_style(folder: Path) -> Path:
    """Sentencepiece BPE with byte fallback; no space is added, none is stripped."""
    tokenizer = Tokenizer(_byte_fallback_model())
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "<start_of_turn>", "<end_of_turn>"])
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    return _save(folder, tokenizer, config, "test")


def unigram_style(folder: Path) -> Path:
    """Sentencepiece unigram with the Metaspace decoder (T5's kind)."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    return _save(folder, tokenizer, config, "test")


def wordpiece_style(folder: Path) -> Path:
    """Word pieces: a decoder that only the windows of the whole-list decoder can follow."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=["[UNK]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "[SEP]"}
    return _save(folder, tokenizer, config, "test")


EXACT_STYLES: dict[str, Callable[[Path], Path]] = {
    "qwen": qwen_style,
    "llama3": llama3_style,
    "llama2": llama2_style,
    "gemma": gemma_style,
    "unigram": unigram_style,
}
ALL_STYLES = EXACT_STYLES | {"wordpiece": wordpiece_style}


@cache
def tokenizer_of(kind: str) -> OctavoTokenizer:
    if kind == "demo":
        return load_tokenizer(resolve_model("demo", weights=False))
    with tempfile.TemporaryDirectory() as folder:
        return load_tokenizer(ALL_STYLES[kind](Path(folder)))


@cache
def byte_ids(kind: str) -> dict[int, int]:
    """byte → the id that stands for exactly this byte, where there is one."""
    tokenizer = tokenizer_of(kind)
    found: dict[int, int] = {}
    for token_id in range(tokenizer.vocab_size):
        data = tokenizer.token_bytes(token_id)
        if len(data) == 1:
            found[data[0]] = token_id
    return found
