"""Programs of the distribution that some tests need: skipped without them, but never in CI."""

import os
import shutil

import pytest


def find_program(name: str, package: str) -> str:
    """The path of program `name`, which Debian's `package` brings."""
    found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
    if found is not None:
        return found
    message = f"{name} is not installed: apt-get install {package}"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)
