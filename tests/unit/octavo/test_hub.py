"""octavo.hub: what a model's name stands for."""

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from octavo.errors import ConfigurationError
from octavo.hub import cache_folder, model_name_of, resolve_model, revision_of


def _save_model(folder: Path, weights: bytes = b"12345678", config: str = "{}") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_a_folder_stands_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _save_model(tmp_path / "org" / "small")
    assert resolve_model(str(folder), None, weights=True) == folder
    # A relative path that looks like a hub id is a folder if there is one.
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/small", None, weights=False) == folder
    assert model_name_of("org/small") == "small"
    assert model_name_of("org/large") == "org/large"


def test_names_that_stand_for_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    cases = {
        "": "no model",
        "./absent": "no such folder",
        str(tmp_path / "absent"): "no such folder",
        "a/b/c": "no such folder",
        "what is this?": "no such folder",
        str(tmp_path / "empty"): r"has no config\.json",
    }
    for name, message in cases.items():
        with pytest.raises(ConfigurationError, match=message):
            resolve_model(name, None, weights=True)


def test_a_hub_id_is_fetched_without_weights_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seam is the hub client's one function; what it is asked for is what is fetched."""
    asked: list[tuple[str, str | None, bool, bool]] = []

    def snapshot_download(
        repo_id: str,
        *,
        revision: str | None,
        allow_patterns: list[str],
        ignore_patterns: list[str],
    ) -> str:
        with_weights = "*.safetensors" in allow_patterns
        asked.append((repo_id, revision, with_weights, "original/*" in ignore_patterns))
        return f"/hub/{repo_id}"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("org/model", "v2", weights=False) == Path("/hub/org/model")
    assert resolve_model("org/model", None, weights=True) == Path("/hub/org/model")
    assert asked == [("org/model", "v2", False, True), ("org/model", None, True, True)]


def test_offline_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo_id: str, **_: object) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ConfigurationError, match=r"'org/model' at revision 'v2': not in the local"):
        resolve_model("org/model", "v2", weights=True)


def test_revision_is_the_commit_of_a_hub_snapshot(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = _save_model(tmp_path / "models--org--model" / "snapshots" / commit)
    assert revision_of(folder) == commit
    assert len(revision_of(_save_model(tmp_path / "snapshots" / "main"))) == 32


def test_revision_changes_with_config_and_weight_files(tmp_path: Path) -> None:
    folder = _save_model(tmp_path / "model")
    first = revision_of(folder)
    assert revision_of(_save_model(tmp_path / "same")) == first
    (folder / "notes.txt").write_text("no part of the model")
    assert revision_of(folder) == first
    (folder / "model-2.safetensors").write_bytes(b"")
    with_second_file = revision_of(folder)
    longer = revision_of(_save_model(tmp_path / "longer", weights=b"123456789"))
    other_config = revision_of(_save_model(tmp_path / "config", config='{"a": 1}'))
    assert len({first, with_second_file, longer, other_config}) == 4


def test_the_cache_can_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_CACHE", raising=False)
    assert cache_folder() == Path.home() / ".cache" / "octavo"
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
