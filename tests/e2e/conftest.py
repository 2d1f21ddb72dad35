"""Models and stacks that several end-to-end modules share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from octavo.hub import resolve_model
from tests.tiny_models import save_tiny_model

from tests.e2e.stack import Stack


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    return resolve_model("demo", None, weights=True)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 2-layer Llama with GQA 3 and a byte-level tokenizer."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def demo_stack(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The demo model behind all three services."""
    flags = ("--check-integrity", "true")
    folder = tmp_path_factory.mktemp("demo-stack")
    with Stack(folder, model=demo_folder, scheduler_flags=flags) as stack:
        yield stack
