"""Which values of a generation_config.json count."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from octavo_router.generation_defaults import GenerationDefaults, load_generation_defaults
from octavo_router.token_rules import NO_RULES, TokenRules, parse_token_rules


def load(folder: Path, config: dict[str, Any]) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return load_generation_defaults(folder)


def test_without_a_file_openais_defaults_hold(tmp_path: Path) -> None:
    assert load_generation_defaults(tmp_path) == GenerationDefaults(1.0, 1.0, 0, 0.0, 1.0)


def test_what_is_present_counts(tmp_path: Path) -> None:
    config = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "do_sample": True}
    assert load(tmp_path, config) == GenerationDefaults(0.6, 0.95, 20, 0.1, 1.0)
    del config["do_sample"]
    assert load(tmp_path, config) == GenerationDefaults(0.6, 0.95, 20, 0.1, 1.0)


def test_do_sample_false_written_out_is_greedy(tmp_path: Path) -> None:
    assert load(tmp_path, {"do_sample": False, "temperature": 0.6}).temperature == 0.0


def test_lengths_are_ignored(tmp_path: Path) -> None:
    assert load(tmp_path, {"max_new_tokens": 3, "max_length": 5}) == GenerationDefaults()


@pytest.mark.parametrize(("given", "expected"), [(-1, 0), (0, 0), (1, 1), (50, 50)])
def test_top_k_off_has_two_spellings(tmp_path: Path, given: int, expected: int) -> None:
    assert load(tmp_path, {"top_k": given}).top_k == expected


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"])
@pytest.mark.parametrize("value", ["0.5", True, float("nan"), float("inf"), -5, 1e12, [1]])
def test_an_illegal_value_is_said_and_skipped(
    tmp_path: Path, name: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path, {name: value}) == GenerationDefaults()
    assert f"{name} is" in caplog.text


def test_null_is_absent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load(tmp_path, {"temperature": None, "top_k": None}) == GenerationDefaults()
    assert caplog.text == ""


def test_a_repetition_penalty_counts(tmp_path: Path) -> None:
    defaults = load(tmp_path, {"repetition_penalty": 1.1})
    assert defaults.repetition_penalty == 1.1
    assert parse_token_rules({}, defaults, 10) == TokenRules(repetition_penalty=1.1)
    assert parse_token_rules({"repetition_penalty": 1}, defaults, 10) == NO_RULES
