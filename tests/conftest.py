"""Models that several suites share."""

import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from octavo.hub import resolve_model

# A busy machine must not decide: no example fails by its time.
settings.register_profile("octavo", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("octavo")


# A shell's background job ignores Ctrl-C, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The demo model, converted once into the cache."""
    return resolve_model("demo", None, weights=True)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 2-layer Llama with GQA 3 and a byte-level tokenizer."""
    from tests.tiny_models import save_tiny_model  # transformers takes seconds to import

    return save_tiny_model(tmp_path_factory.mktemp("tiny"))
