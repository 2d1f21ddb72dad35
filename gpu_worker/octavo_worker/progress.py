"""The leader's news of the engine, from a thread of its own: twice a second, or at once if asked.

Neither a step that hangs nor a busy event loop delays when the engine is looked at. Must not
know: streams, what is told. Entry point: `ProgressThread`.
"""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

# The contract asks for progress once a second.
PROGRESS_S = 0.5


class ProgressThread:
    """Calls `tell` in its thread from enter to exit. `tell` never blocks."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._is_due = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def wake(self) -> None:
        """Tell now."""
        self._is_due.set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over = True
        self._is_due.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over:
            self._tell()
            self._is_due.wait(PROGRESS_S)
            self._is_due.clear()
