"""Checkpoint files for tests: read, edited, broken; and the assertion that they're refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.errors import ConfigurationError
from octavo_worker.models import load_model
from octavo_worker.weights import INDEX_NAME

Q_NAME = "model.layers.0.self_attn.q_proj.weight"


def index_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / INDEX_NAME).read_text())


def shard_of(folder: Path, name: str) -> Path:
    return folder / index_of(folder)["weight_map"][name]


def edit(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Rewrite a safetensors file with its tensors changed."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = index_of(folder)
    change(index["weight_map"])
    (folder / INDEX_NAME).write_text(json.dumps(index))


def drop(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda mapping: mapping.pop(name)


def assert_refused(folder: Path, *named: str) -> str:
    """Loading fails with a configuration error naming all of `named`; nothing was loaded."""
    fractions: list[float] = []
    with pytest.raises(ConfigurationError) as caught:
        load_model(folder, progress=fractions.append)
    assert fractions == []
    message = str(caught.value)
    for name in named:
        assert name in message, message
    return message


def set_tie_flag(folder: Path, value: bool | None) -> None:
    fields = json.loads((folder / "config.json").read_text())
    fields.pop("tie_word_embeddings", None)
    if value is not None:
        fields["tie_word_embeddings"] = value
    (folder / "config.json").write_text(json.dumps(fields))
