"""Settings: a frozen surface, read alike from the environment and the command line."""

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from octavo import settings
from octavo.errors import ConfigurationError
from octavo.setting import environment_name
from octavo.settings import (
    CommonSettings,
    RouterSettings,
    SchedulerSettings,
    WorkerSettings,
    add_arguments,
    load,
    to_flags,
)

CLASSES = (RouterSettings, SchedulerSettings, WorkerSettings)
GOLDEN = json.loads((Path(__file__).parent / "golden" / "settings.json").read_text("utf-8"))
ALL = [
    pytest.param(cls, item, id=f"{cls.__name__}-{item.name}")
    for cls in CLASSES
    for item in fields(cls)
]


def type_name(cls: type[Any], name: str) -> str:
    hint = get_type_hints(cls)[name]
    return hint.__name__ if isinstance(hint, type) else str(hint)


def surface(cls: type[Any]) -> dict[str, list[Any]]:
    """Name -> type, default, choices, minimum, maximum, secret; as JSON has them."""
    shown = {
        item.name: [
            type_name(cls, item.name),
            item.default,
            *(item.metadata[key] for key in ("choices", "minimum", "maximum", "secret")),
        ]
        for item in fields(cls)
    }
    return json.loads(json.dumps(shown))


def parse_flags(cls: type[Any], flags: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_arguments(parser, cls)
    return vars(parser.parse_args(flags))


@pytest.mark.parametrize("cls", CLASSES)
def test_the_surface_is_frozen(cls: type[Any]) -> None:
    """A new knob, or another default, is a decision: write it into golden/settings.json too."""
    assert surface(cls) == GOLDEN[cls.__name__]


def test_the_golden_file_knows_the_classes_that_there_are() -> None:
    assert set(GOLDEN) == {cls.__name__ for cls in CLASSES}
    assert {name for name in vars(settings) if name.endswith("Settings")} == {
        *GOLDEN,
        CommonSettings.__name__,
    }


@pytest.mark.parametrize(("cls", "item"), ALL)
def test_every_setting_is_documented(cls: type[Any], item: Any) -> None:
    text = item.metadata["help"]
    assert text == text.strip()
    assert text
    assert not text.endswith(".")


@pytest.mark.parametrize("cls", CLASSES)
def test_help_names_every_flag_once(cls: type[Any]) -> None:
    parser = argparse.ArgumentParser(prog="octavo")
    add_arguments(parser, cls)
    words = parser.format_help().split()
    for item in fields(cls):
        assert words.count(f"--{item.name.replace('_', '-')}") == 1


def test_help_says_what_a_value_may_be_and_which_it_is() -> None:
    parser = argparse.ArgumentParser(prog="octavo")
    add_arguments(parser, *CLASSES)
    text = " ".join(parser.format_help().split())
    for shown in (
        "--ui {true,false} serve the status page at /ui [true]",
        "--block-size {16,32} tokens per KV block [16]",
        "--log-level {debug,info,warning,error} log level [info]",
        "--max-num-seqs SEQS",
    ):
        assert shown in text
    assert not any(default in text for default in ("[]", "[()]", "[None]"))
    # What all have stands by itself, first.
    assert text.index(" common: --log-level") < text.index(" router: --host")


def test_classes_that_share_a_setting_share_its_flag() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, *CLASSES)
    parsed = vars(parser.parse_args(["--log-level", "debug", "--max-num-seqs", "7"]))
    assert load(RouterSettings, parsed, {}).log_level == "debug"
    assert load(SchedulerSettings, parsed, {}).max_num_seqs == 7
    assert load(WorkerSettings, parsed, {}).max_num_seqs == 7


def other_value(cls: type[Any], item: Any) -> tuple[str, Any]:
    """A legal value that isn't the default: as text and as what it must become."""
    hint = type_name(cls, item.name)
    if item.metadata["choices"]:
        chosen = next(each for each in item.metadata["choices"] if each != item.default)
        return str(chosen), chosen
    if hint == "bool":
        return ("no", False) if item.default else ("yes", True)
    if hint in ("int", "int | None"):
        low = item.metadata["minimum"] or 0
        return (str(low + 1), low + 1) if low + 1 != item.default else (str(low), low)
    if hint == "float":
        value = (item.metadata["minimum"] or 0) + 0.125
        return str(value), value
    if hint == "tuple[str, ...]":
        return " a:1, b:2 ,", ("a:1", "b:2")
    return "some-text", "some-text"


@pytest.mark.parametrize(("cls", "item"), ALL)
def test_flag_and_environment_both_work_and_the_flag_wins(cls: type[Any], item: Any) -> None:
    text, value = other_value(cls, item)
    flag = [f"--{item.name.replace('_', '-')}", text]
    environ = {environment_name(item.name): text}
    assert environment_name(item.name) == f"OCTAVO_{item.name.upper()}"
    default = load(cls, {}, {})
    assert getattr(default, item.name) == item.default != value
    for loaded in (load(cls, parse_flags(cls, flag), {}), load(cls, {}, environ)):
        assert getattr(loaded, item.name) == value
        others = [each.name for each in fields(cls) if each.name != item.name]
        assert all(getattr(loaded, name) == getattr(default, name) for name in others)
    wrong = {environment_name(item.name): "\x00nonsense"}
    assert getattr(load(cls, parse_flags(cls, flag), wrong), item.name) == value


@pytest.mark.parametrize(("cls", "item"), ALL)
def test_what_is_out_of_bounds_is_refused_by_name(cls: type[Any], item: Any) -> None:
    low, high, choices = (item.metadata[key] for key in ("minimum", "maximum", "choices"))
    wrong = [str(low - 1)] if low is not None else []
    wrong += [str(high + 1)] if high is not None else []
    if choices:
        wrong.append("17" if type_name(cls, item.name) == "int" else "nonsense")
    if type_name(cls, item.name) in ("int", "float", "bool"):
        wrong += ["", "many", "1;2"]
    for text in wrong:
        with pytest.raises(ConfigurationError, match=environment_name(item.name)) as caught:
            load(cls, {}, {environment_name(item.name): text})
        assert caught.value.param == item.name


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "NaN"])
@pytest.mark.parametrize("cls", CLASSES)
def test_numbers_are_finite(cls: type[Any], text: str) -> None:
    names = [item for item in fields(cls) if type_name(cls, item.name) == "float"]
    assert names
    for item in names:
        with pytest.raises(ConfigurationError, match=environment_name(item.name)):
            load(cls, {}, {environment_name(item.name): text})


@pytest.mark.parametrize("text", ["1", "true", "YES", "On", "0", "false", "No", "OFF"])
def test_truth_has_many_names(text: str) -> None:
    loaded = load(RouterSettings, {}, {"OCTAVO_SHARE_PREFIXES": text})
    assert loaded.share_prefixes == (text.lower() in ("1", "true", "yes", "on"))


def test_the_empty_text_is_none_where_none_is_allowed() -> None:
    assert load(RouterSettings, {}, {"OCTAVO_REVISION": ""}).revision is None
    assert load(RouterSettings, {}, {"OCTAVO_REVISION": "main"}).revision == "main"
    assert load(RouterSettings, {}, {"OCTAVO_SCHEDULERS": ""}).schedulers == ()


@pytest.mark.parametrize("cls", CLASSES)
def test_flags_reproduce_settings_but_never_secrets(cls: type[Any]) -> None:
    environ = {
        environment_name(item.name): other_value(cls, item)[0]
        for item in fields(cls)
        if not item.metadata["secret"]
    }
    changed = load(cls, {}, environ)
    for only_changed in (True, False):
        flags = to_flags(changed, only_changed=only_changed)
        assert load(cls, parse_flags(cls, flags), {}) == changed
    secrets = [item.name for item in fields(cls) if item.metadata["secret"]]
    assert secrets
    hidden = load(cls, {}, {environment_name(name): "s3cret" for name in secrets})
    assert "s3cret" not in repr(hidden)
    assert "s3cret" not in " ".join(to_flags(hidden, only_changed=False))
