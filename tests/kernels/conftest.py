"""Kernel tests run in one of two kinds of process.

Triton decides when a kernel is imported whether it is interpreted, so the interpreter's tests need
a process of their own: `OCTAVO_KERNEL_MODE=interpret pytest tests/kernels -m interpreter`. Any
other process collects the rest: ahead-of-time compilation, and (`-m gpu`) runs on a card.
"""

import os

import pytest

IS_INTERPRETED = os.environ.get("OCTAVO_KERNEL_MODE") == "interpret"

if IS_INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"
    collect_ignore_glob = ["test_compile*.py", "test_gpu_*.py", "test_reference_*.py"]
else:
    collect_ignore_glob = ["test_interpreter_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    if IS_INTERPRETED:
        # Triton 3.6's interpreter makes loop bounds out of one-element arrays.
        deprecated = "ignore:Conversion of an array with ndim:DeprecationWarning"
        config.addinivalue_line("filterwarnings", deprecated)
