"""The tokenizer against transformers, over every kind of model folder."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from octavo.hub import resolve_model
from octavo_router.tokenizer import load_tokenizer
from tests.unit.router.trained_tokenizers import ALL_STYLES, SAMPLES, llama2_style, qwen_style

TEXTS = (
    "",
    " ",
    "  leading and trailing  ",
    "\n\n",
    "a\x00b",
    "<s>again</s>",
    "<|begin_of_text|>again",
    "<|im_start|>system\nyou<|im_end|>",
    " <s> in the middle </s> ",
    "a é <tool_call>x</tool_call>",
    *SAMPLES,
)
FOLDERS = (*ALL_STYLES, "demo", "llama2-class", "llama2-class-legacy", "llama2-class-bare", "gpt2")


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def gpt2_files(folder: Path) -> Path:
    """The older format: vocab.json and merges.txt, no tokenizer.json."""
    qwen_style(folder)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(merge) for merge in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"})
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    return folder


def model_folder(name: str, folder: Path) -> Path:
    if name == "demo":
        return resolve_model("demo", weights=False)
    if name == "gpt2":
        return gpt2_files(folder)
    if name in ALL_STYLES:
        return ALL_STYLES[name](folder)
    llama2_style(folder, tokenizer_class="LlamaTokenizer")
    if name == "llama2-class-legacy":
        edit_config(folder, legacy=True)
    if name == "llama2-class-bare":
        edit_config(folder, add_prefix_space=False)
    return folder


@pytest.fixture(scope="module", params=FOLDERS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = model_folder(request.param, tmp_path_factory.mktemp(request.param))
    return load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_encode_gives_the_same_ids(pair: Any, text: str) -> None:
    ours, theirs = pair
    assert ours.encode(text).tolist() == theirs(text).input_ids
    bare = theirs(text, add_special_tokens=False).input_ids
    assert ours.encode(text, add_special_tokens=False).tolist() == bare


def test_the_same_ids_are_special(pair: Any) -> None:
    ours, theirs = pair
    special = {token_id for token_id in range(ours.vocab_size) if ours.is_special(token_id)}
    assert special >= set(theirs.all_special_ids)
    for token_id in range(ours.vocab_size):
        is_skipped = theirs.decode([token_id], skip_special_tokens=True) == ""
        is_empty = theirs.decode([token_id]) == ""
        assert ours.is_special(token_id) == (is_skipped and not is_empty), token_id


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), skip=st.booleans())
def test_decode_gives_the_same_text(pair: Any, data: st.DataObject, skip: bool) -> None:
    ours, theirs = pair
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=20))
    expected = theirs.decode(ids, skip_special_tokens=skip)
    assert ours.decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("clean_up", [True, False])
def test_spaces_are_cleaned_up_as_the_configuration_says(tmp_path: Path, clean_up: bool) -> None:
    folder = ALL_STYLES["wordpiece"](tmp_path)
    edit_config(folder, clean_up_tokenization_spaces=clean_up)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    ids = ours.encode("the dog , it ' s .").tolist()
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_tokens_of_special_tokens_map_are_added(tmp_path: Path) -> None:
    folder = ALL_STYLES["gemma"](tmp_path)
    tokens = {
        "eos_token": {"content": "<end_of_turn>", "lstrip": False, "normalized": False},
        "additional_special_tokens": ["<new>"],
    }
    (folder / "special_tokens_map.json").write_text(json.dumps(tokens))
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    text = "a<new>b<end_of_turn>"
    assert ours.encode(text).tolist() == theirs(text).input_ids
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    ids = ours.encode(text).tolist()
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "ab"
