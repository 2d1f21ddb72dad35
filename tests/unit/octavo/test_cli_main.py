"""octavo.cli.main: which command runs, and what is said when none can."""

import sys
from types import ModuleType

import pytest

import octavo
from octavo.cli import main as run
from octavo.cli.main import COMMANDS
from octavo.errors import ConfigurationError


def _install(monkeypatch: pytest.MonkeyPatch, name: str, outcome: object) -> list[list[str]]:
    """Put a module in place of a service's entry point; returns the argument lists it gets."""
    calls: list[list[str]] = []

    def service_main(argv: list[str]) -> object:
        calls.append(argv)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    module = ModuleType(COMMANDS[name].module)
    module.main = service_main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, COMMANDS[name].module, module)
    return calls


def test_a_command_gets_its_arguments_and_gives_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("router", "scheduler", "worker"):
        calls = _install(monkeypatch, name, 3)
        assert run([name, "--port", "0"]) == 3
        assert calls == [["--port", "0"]]


def test_user_errors_end_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _install(monkeypatch, "worker", ConfigurationError("OCTAVO_PORT=x is wrong"))
    assert run(["worker"]) == 2
    assert capsys.readouterr().err == "octavo worker: OCTAVO_PORT=x is wrong\n"


def test_a_missing_package_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.delitem(sys.modules, "octavo.cli.serve", raising=False)
    monkeypatch.delitem(sys.modules, "octavo.cli.stack", raising=False)
    assert run(["serve"]) == 2
    assert "octavo serve needs the package httpx: pip install 'octavo[serve]'" in (
        capsys.readouterr().err
    )


def test_help_version_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"octavo {octavo.__version__}\n"
    assert run(["server"]) == 2
    assert "no command 'server'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["serve", "bench"])
def test_every_option_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    # One namespace: settings of all three services.
    for flag in ("--port", "--max-num-seqs", "--block-size", "--workers", "--itl-target-ms"):
        assert flag in text
    # What serve decides for its children is no option.
    assert "--schedulers" not in text
    assert "--worker-id" not in text
