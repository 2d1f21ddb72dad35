"""octavo fetch: the model's folder on stdout, or why there is none."""

from pathlib import Path

import pytest

from octavo.cli import main as octavo


def test_the_folder_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert octavo(["fetch", str(tmp_path), "--revision", "", "--no-weights"]) == 0
    assert capsys.readouterr().out == f"{tmp_path.resolve()}\n"


def test_the_demo_model_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    folder = tmp_path / "models" / "SmolLM2-135M-Instruct"
    folder.mkdir(parents=True)
    assert octavo(["fetch"]) == 0
    assert capsys.readouterr().out == f"{folder}\n"


def test_what_is_no_model_ends_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert octavo(["fetch", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"octavo fetch: model folder {tmp_path} has no config.json\n"
    )
