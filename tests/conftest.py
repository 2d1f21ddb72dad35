"""Models that several suites share."""

from pathlib import Path

import pytest

from octavo.hub import resolve_model


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The demo model, converted once into the cache."""
    return resolve_model("demo", None, weights=True)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 2-layer Llama with GQA 3 and a byte-level tokenizer."""
    from tests.tiny_models import save_tiny_model  # transformers takes seconds to import

    return save_tiny_model(tmp_path_factory.mktemp("tiny"))
