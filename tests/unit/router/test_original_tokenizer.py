"""Folders from before tokenizer.json: ids, special tokens, chat formats, and what is refused.

The oracles are SentencePiece and tiktoken, put together as each family's published code does.
"""

import json
import logging
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ConfigurationError, InvalidRequestError
from octavo_router.detokenizer import Detokenizer
from octavo_router.original_tokenizer import read_original
from octavo_router.tokenizer import Tokenizer, load_tokenizer
from tests.unit.router.original_folders import (
    chatglm_folder,
    glm4_folder,
    glm4_oracle,
    llama_folder,
    qwen_folder,
    qwen_oracle,
    train_ranks,
    write_json,
)
from tests.unit.router.trained_tokenizers import SAMPLES

TEXTS = ("", " ", "  two  spaces ", "a\nb", "1234567", "sophisticated people eloped", *SAMPLES)
TALK = [
    {"role": "user", "content": "Hello 世界"},
    {"role": "assistant", "content": "Good day.\nHow are you?"},
    {"role": "user", "content": " well, 🙂"},
]
SYSTEM = {"role": "system", "content": "You are terse."}
FAMILIES: dict[str, Callable[[Path], Path]] = {
    "llama": llama_folder,
    "chatglm2": lambda folder: chatglm_folder(folder, 2),
    "chatglm3": lambda folder: chatglm_folder(folder, 3),
    "glm4": glm4_folder,
    "qwen": qwen_folder,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("original")
    return {name: save(base / name) for name, save in FAMILIES.items()}


@pytest.fixture(scope="module")
def tokenizers(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: load_tokenizer(folder) for name, folder in folders.items()}


def processor(folder: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def glm_ids(folder: Path) -> dict[str, int]:
    """ChatGLM's tokens follow the pieces."""
    tokens = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", "system", "user", "assistant")
    size = processor(folder).vocab_size()
    return {token: size + index for index, token in enumerate((*tokens, "observation"))}


# --- texts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_texts_have_the_published_ids(
    folders: dict[str, Path], tokenizers: dict[str, Tokenizer], text: str
) -> None:
    bare = processor(folders["llama"]).encode(text)
    assert tokenizers["llama"].encode(text).tolist() == [1, *bare]
    for name in ("chatglm2", "chatglm3"):
        prefix = [glm_ids(folders[name])[token] for token in ("[gMASK]", "sop")]
        assert tokenizers[name].encode(text).tolist() == [*prefix, *bare]
    for name in ("llama", "chatglm2", "chatglm3"):
        assert tokenizers[name].encode(text, add_special_tokens=False).tolist() == bare
        assert tokenizers[name].decode(bare) == processor(folders[name]).decode(bare)
    composed = unicodedata.normalize("NFC", text)
    ids = qwen_oracle().encode(composed)
    assert tokenizers["qwen"].encode(text).tolist() == ids
    assert tokenizers["qwen"].decode(ids) == composed
    ids = glm4_oracle().encode(text)
    prefix = [glm4_oracle().encode_single_token(token) for token in ("[gMASK]", "<sop>")]
    assert tokenizers["glm4"].encode(text).tolist() == [*prefix, *ids]
    assert tokenizers["glm4"].decode(ids) == text


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), skip=st.booleans(), cuts=st.lists(st.integers(0, 24)))
def test_joined_deltas_are_the_decode_of_all_ids(
    tokenizers: dict[str, Tokenizer],
    name: str,
    data: st.DataObject,
    skip: bool,
    cuts: list[int],
) -> None:
    tokenizer = tokenizers[name]
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=24))
    texts = push_in_parts(Detokenizer(tokenizer, skip_special_tokens=skip), token_ids, cuts)
    assert "".join(texts) == tokenizer.decode(token_ids, skip_special_tokens=skip)
    for text in texts:
        text.encode()  # no half of a character


def push_in_parts(
    detokenizer: Detokenizer, token_ids: Sequence[int], cuts: Sequence[int]
) -> list[str]:
    ends = sorted({*(cut for cut in cuts if cut < len(token_ids)), len(token_ids)})
    starts = [0, *ends[:-1]]
    texts = [
        detokenizer.push(token_ids[start:end]).text for start, end in zip(starts, ends, strict=True)
    ]
    return [*texts, detokenizer.finish().text]


# --- special tokens ---------------------------------------------------------------------------


def test_ids_that_end_an_answer(folders: dict[str, Path], tokenizers: dict[str, Tokenizer]) -> None:
    ids = glm_ids(folders["chatglm3"])
    end_of_text = len(train_ranks())
    assert {name: tokenizers[name].eos_token_ids for name in FAMILIES} == {
        "llama": (2,),
        "chatglm2": (2,),
        "chatglm3": (2, ids["user"], ids["observation"]),
        "glm4": (end_of_text, end_of_text + 7, end_of_text + 9),
        "qwen": (end_of_text, end_of_text + 2, end_of_text + 1),
    }


def test_special_tokens_are_special(
    folders: dict[str, Path], tokenizers: dict[str, Tokenizer]
) -> None:
    size = processor(folders["llama"]).vocab_size()
    num_ranks = len(train_ranks())
    expected = {
        "llama": {0, 1, 2},
        "chatglm2": {0, 1, 2, *range(size, size + 5)},
        "chatglm3": {0, 1, 2, *range(size, size + 9)},
        "glm4": {*range(num_ranks, num_ranks + 14)},
        "qwen": {*range(num_ranks, num_ranks + 208)},
    }
    for name, tokenizer in tokenizers.items():
        special = {i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)}
        assert special == expected[name], name


def test_flags_of_llama_folders(tmp_path: Path) -> None:
    config = {"add_bos_token": False, "add_eos_token": True, "add_prefix_space": False}
    tokenizer = load_tokenizer(llama_folder(tmp_path, config))
    assert tokenizer.decode(tokenizer.encode("a b").tolist(), skip_special_tokens=False) == (
        "a b</s>"
    )


@pytest.mark.parametrize(("legacy", "space"), [({}, " "), ({"legacy": False}, "")])
def test_a_text_after_a_special_token_is_a_text_of_its_own_unless_told(
    tmp_path: Path, legacy: dict[str, bool], space: str
) -> None:
    tokenizer = load_tokenizer(llama_folder(tmp_path, legacy))
    ids = tokenizer.encode("a</s>b").tolist()
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"<s> a</s>{space}b"


def test_added_tokens_of_older_folders(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path)
    size = processor(folder).vocab_size()
    added = {"<|im_end|>": size + 1, "<|im_start|>": size}
    write_json(folder, added_tokens=added, special_tokens_map={"eos_token": "<|im_end|>"})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("<|im_start|>").tolist() == [1, size]
    assert (tokenizer.eos_token_ids, tokenizer.is_special(size)) == ((2, size + 1), False)


def test_placeholders_take_the_configurations_names(tmp_path: Path) -> None:
    renamed = {"5": {"content": "<|im_start|>", "special": True}}
    folder = llama_folder(tmp_path, {"added_tokens_decoder": renamed})
    assert load_tokenizer(folder).encode("<|im_start|>").tolist() == [1, 5]


def test_files_that_disagree_about_an_id_are_refused(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path)
    write_json(folder, added_tokens={"<new>": 10_000})
    with pytest.raises(ConfigurationError, match="'<new>' as id 10000, but"):
        load_tokenizer(folder)


# --- chats ------------------------------------------------------------------------------------


def chatglm3_chat(folder: Path, messages: Sequence[dict[str, Any]]) -> list[int]:
    """`build_chat_input`: each message is its role, a line for metadata, and its text."""
    encode, ids = processor(folder).encode, glm_ids(folder)
    found = [ids["[gMASK]"], ids["sop"]]
    for message in messages:
        found += [ids[message["role"]], *encode("\n"), *encode(message["content"])]
    return [*found, ids["assistant"]]


@pytest.mark.parametrize("messages", [TALK, [SYSTEM, *TALK], [{"role": "user", "content": ""}]])
def test_chatglm3s_chats_have_the_published_ids(
    folders: dict[str, Path], tokenizers: dict[str, Tokenizer], messages: list[dict[str, Any]]
) -> None:
    expected = chatglm3_chat(folders["chatglm3"], messages)
    assert tokenizers["chatglm3"].encode_chat(messages).tolist() == expected


def test_chatglm3_reads_a_tools_answer_as_an_observation(
    folders: dict[str, Path], tokenizers: dict[str, Tokenizer]
) -> None:
    ids = tokenizers["chatglm3"].encode_chat([*TALK, {"role": "tool", "content": "22"}]).tolist()
    expected = [*TALK, {"role": "observation", "content": "22"}]
    assert ids == chatglm3_chat(folders["chatglm3"], expected)


def test_chatglm2s_chats_have_the_published_ids(
    folders: dict[str, Path], tokenizers: dict[str, Tokenizer]
) -> None:
    """`build_prompt`: numbered rounds of a question and an answer."""
    prompt = (
        "[Round 1]\n\n问：Hello 世界\n\n答：Good day.\nHow are you?\n\n"
        "[Round 2]\n\n问： well, 🙂\n\n答："
    )
    ids = glm_ids(folders["chatglm2"])
    prefix = [ids["[gMASK]"], ids["sop"]]
    encode = processor(folders["chatglm2"]).encode
    assert tokenizers["chatglm2"].encode_chat(TALK).tolist() == [*prefix, *encode(prompt)]
    with_system = tokenizers["chatglm2"].encode_chat([SYSTEM, *TALK]).tolist()
    assert with_system == [*prefix, *encode(f"You are terse.\n\n{prompt}")]


@pytest.mark.parametrize(
    "messages", [[TALK[1]], [TALK[0], TALK[0]], [*TALK, SYSTEM], [SYSTEM, SYSTEM]]
)
def test_chatglm2_refuses_what_it_has_no_rounds_for(
    tokenizers: dict[str, Tokenizer], messages: list[dict[str, Any]]
) -> None:
    with pytest.raises(InvalidRequestError, match="questions and answers in turn"):
        tokenizers["chatglm2"].encode_chat(messages)


def test_qwens_chats_have_the_published_ids(tokenizers: dict[str, Tokenizer]) -> None:
    """`make_context`: each part between the marks is tokenized by itself."""
    oracle = qwen_oracle()
    start, end, line = "<|im_start|>", "<|im_end|>", oracle.encode("\n")
    begin, finish = (oracle.encode_single_token(token) for token in (start, end))

    def expected(messages: Sequence[dict[str, str]]) -> list[int]:
        found: list[int] = []
        for message in messages:
            found += [begin, *oracle.encode(message["role"]), *line]
            found += [*oracle.encode(message["content"]), finish, *line]
        return [*found, begin, *oracle.encode("assistant"), *line]

    default = {"role": "system", "content": "You are a helpful assistant."}
    encode_chat = tokenizers["qwen"].encode_chat
    assert encode_chat(TALK).tolist() == expected([default, *TALK])
    assert encode_chat([SYSTEM, *TALK]).tolist() == expected([SYSTEM, *TALK])


def test_glm4s_chats_have_the_published_ids(tokenizers: dict[str, Tokenizer]) -> None:
    """`build_single_message`: each is its role, a line for metadata, and its text."""
    oracle = glm4_oracle()
    expected = [oracle.encode_single_token(token) for token in ("[gMASK]", "<sop>")]
    for message in [SYSTEM, *TALK]:
        expected += [oracle.encode_single_token(f"<|{message['role']}|>"), *oracle.encode("\n")]
        expected += oracle.encode(message["content"])
    expected += [oracle.encode_single_token("<|assistant|>")]
    assert tokenizers["glm4"].encode_chat([SYSTEM, *TALK]).tolist() == expected


@pytest.mark.parametrize("name", ["chatglm2", "chatglm3", "glm4", "qwen"])
def test_a_final_answer_can_be_continued(tokenizers: dict[str, Tokenizer], name: str) -> None:
    tokenizer = tokenizers[name]
    ids = tokenizer.encode_chat(
        TALK[:2], add_generation_prompt=False, continue_final_message=True
    ).tolist()
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("day.\nHow are you?")


def test_a_folders_own_template_comes_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = chatglm_folder(tmp_path, 3)
    with caplog.at_level(logging.INFO):
        load_tokenizer(folder)
        assert "has no chat template: using ChatGLM3" in caplog.text
        caplog.clear()
        (folder / "chat_template.jinja").write_text("[gMASK]sop<|user|>{{ messages[0].content }}")
        tokenizer = load_tokenizer(folder)
        assert "chat template" not in caplog.text
    ids = glm_ids(folder)
    found = tokenizer.encode_chat(TALK).tolist()
    assert found[:3] == [ids["[gMASK]"], ids["sop"], ids["user"]]
    assert ids["observation"] in tokenizer.eos_token_ids


@pytest.mark.parametrize("chat_format", ["raw", None])
def test_qwens_base_models_have_no_chat(tmp_path: Path, chat_format: str | None) -> None:
    tokenizer = load_tokenizer(qwen_folder(tmp_path, chat_format))
    assert tokenizer.eos_token_ids == (len(train_ranks()),)
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tokenizer.encode_chat(TALK)


@pytest.mark.parametrize(
    ("config", "tokenizer_config", "is_third"),
    [
        ({"_name_or_path": "THUDM/chatglm3-6b-32k"}, {}, True),
        ({}, {"name_or_path": "THUDM/chatglm3-6b"}, True),
        ({"_name_or_path": "/data/mine"}, {}, False),
        ({}, {"added_tokens_decoder": {"SIZE": {"content": "<|user|>"}}}, True),
    ],
)
def test_versions_without_their_code(
    tmp_path: Path, config: dict[str, str], tokenizer_config: dict[str, Any], is_third: bool
) -> None:
    folder = chatglm_folder(tmp_path, 2)
    (folder / "tokenization_chatglm.py").unlink()
    user = str(glm_ids(folder)["user"])
    listed = json.loads(json.dumps(tokenizer_config).replace("SIZE", user))
    write_json(
        folder,
        config={"model_type": "chatglm", "eos_token_id": 2, **config},
        tokenizer_config={"tokenizer_class": "ChatGLMTokenizer", **listed},
    )
    assert (len(load_tokenizer(folder).eos_token_ids) == 3) == is_third


def test_ranks_of_other_models_are_left_to_transformers(tmp_path: Path) -> None:
    write_json(glm4_folder(tmp_path), config={"model_type": "llama"}, tokenizer_config={})
    assert read_original(tmp_path) is None


# --- what loading costs -----------------------------------------------------------------------


def test_nothing_heavy_and_no_code_of_the_folder_runs(folders: dict[str, Path]) -> None:
    paths = [*map(str, folders.values())]
    code = (
        "import sys; from pathlib import Path;"
        "from octavo_router.tokenizer import load_tokenizer;"
        f"[load_tokenizer(Path(path), trust_remote_code=True) for path in {paths}];"
        "print(sorted({'torch', 'transformers', 'sentencepiece', 'tiktoken'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert output.stdout.split() == [b"[]"]
