"""octavo_router.__main__: what a mistake at start looks like."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "no model: give a folder, a Hugging Face id or 'demo' (--model)"),
        (("--port", "http"), "OCTAVO_PORT='http' is no whole number"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(flags: tuple[str, ...], message: str) -> None:
    command = [sys.executable, "-m", "octavo_router", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr == f"octavo router: {message}\n"
