"""Secrets from files: for every secret setting, by flag and by environment."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigurationError
from octavo.setting import FileSecret, environment_name
from octavo.settings import (
    RouterSettings,
    SchedulerSettings,
    WorkerSettings,
    add_arguments,
    load,
    to_environment,
    to_flags,
)

SECRETS = [
    pytest.param(cls, item.name, id=f"{cls.__name__}-{item.name}")
    for cls in (RouterSettings, SchedulerSettings, WorkerSettings)
    for item in fields(cls)
    if item.metadata["secret"]
]


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("s3cret word\n")
    return path


def parsed(cls: type[Any], *flags: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_arguments(parser, cls)
    return vars(parser.parse_args(flags))


@pytest.mark.parametrize(("cls", "name"), SECRETS)
def test_a_secret_is_read_from_its_file(cls: type[Any], name: str, secret: Path) -> None:
    flag = parsed(cls, f"--{name.replace('_', '-')}-file", str(secret))
    environ = {f"{environment_name(name)}_FILE": str(secret)}
    for loaded in (load(cls, flag, {}), load(cls, {}, environ)):
        value = getattr(loaded, name)
        assert value == "s3cret word"
        assert isinstance(value, FileSecret)
        assert value.path == str(secret)


@pytest.mark.parametrize("text", ["s3cret", "s3cret\n", "s3cret\r\n", "s3cret\n\n"])
def test_line_ends_at_the_end_dont_count(secret: Path, text: str) -> None:
    secret.write_bytes(text.encode())
    assert FileSecret("api_keys", str(secret)) == "s3cret"


def test_flags_win_over_the_environment_as_a_whole(secret: Path) -> None:
    environ = {"OCTAVO_INTERNAL_TOKEN": "of-the-environment"}
    flag = parsed(WorkerSettings, "--internal-token-file", str(secret))
    assert load(WorkerSettings, flag, environ).internal_token == "s3cret word"
    environ = {"OCTAVO_INTERNAL_TOKEN_FILE": str(secret)}
    flag = parsed(WorkerSettings, "--internal-token", "of-the-flag")
    assert load(WorkerSettings, flag, environ).internal_token == "of-the-flag"


def test_an_empty_variable_beside_a_file_is_none(secret: Path) -> None:
    environ = {"OCTAVO_API_KEYS": "", "OCTAVO_API_KEYS_FILE": str(secret)}
    assert load(RouterSettings, {}, environ).api_keys == "s3cret word"
    environ = {"OCTAVO_API_KEYS": "k", "OCTAVO_API_KEYS_FILE": ""}
    assert load(RouterSettings, {}, environ).api_keys == "k"


@pytest.mark.parametrize("is_flag", [True, False])
def test_a_secret_and_its_file_together_are_a_mistake(secret: Path, is_flag: bool) -> None:
    flags = ["--api-keys", "s3cret", "--api-keys-file", str(secret)] if is_flag else []
    environ = {"OCTAVO_API_KEYS": "s3cret", "OCTAVO_API_KEYS_FILE": str(secret)}
    with pytest.raises(ConfigurationError, match="OCTAVO_API_KEYS_FILE: only one") as caught:
        load(RouterSettings, parsed(RouterSettings, *flags), {} if is_flag else environ)
    assert "s3cret" not in caught.value.message


@pytest.mark.parametrize(
    ("data", "problem"),
    [(None, "can't be read"), (b"", "is empty"), (b" \n", "is empty"), (b"s3\xff", "no UTF-8")],
)
def test_a_file_that_holds_no_secret_ends_the_start(
    secret: Path, data: bytes | None, problem: str
) -> None:
    secret.unlink() if data is None else secret.write_bytes(data)
    with pytest.raises(ConfigurationError, match=problem) as caught:
        load(RouterSettings, {}, {"OCTAVO_API_KEYS_FILE": str(secret)})
    assert f"OCTAVO_API_KEYS_FILE={secret}" in caught.value.message
    assert caught.value.param == "api_keys"
    assert "s3" not in caught.value.message.replace(str(secret), "")


@pytest.mark.parametrize(("cls", "name"), SECRETS)
def test_children_get_secrets_by_their_environment_only(
    cls: type[Any], name: str, secret: Path
) -> None:
    variable = environment_name(name)
    plain = load(cls, {}, {variable: "s3cret word"})
    filed = load(cls, {}, {f"{variable}_FILE": str(secret)})
    for given in (plain, filed):
        assert "s3cret" not in " ".join(to_flags(given, only_changed=False))
        assert "s3cret" not in repr(given)
        # What the parent itself was given is inherited, but doesn't count.
        for inherited in ({variable: "old"}, {f"{variable}_FILE": "/old"}):
            assert load(cls, {}, {**inherited, **to_environment(given)}) == given
    assert "s3cret" not in str(to_environment(filed))
