"""Processes that the tested ones start: which they are, and that none outlives them."""

import time
from pathlib import Path

_TIMEOUT_S = 30.0


def children_of(pid: int) -> list[int]:
    """The live processes that `pid` started."""
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(word) for text in texts for word in text.split()]


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"{pid} is still there"
        time.sleep(0.02)
