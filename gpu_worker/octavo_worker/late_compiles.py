"""Kernels that compile in service: told by name, timed and counted.

Triton compiles a kernel when it meets arguments of a new kind, and every row waits meanwhile.
`warm_up` and the captures meet all kinds that are known before the worker is ready; what comes
later is one that they lack. Must not know: steps. Entry point: `LateCompiles.watch`.
"""

import logging
import time
from typing import Any

from octavo.metrics import WorkerMetrics

_logger = logging.getLogger(__name__)


class LateCompiles:
    """Listens to Triton, which has one listener of each kind in a process."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._began_s: dict[str, float] = {}

    def watch(self) -> None:
        """From now on compiling is late."""
        # Only here: a CPU worker never imports triton.
        from triton import knobs

        knobs.runtime.jit_cache_hook = self._on_begin
        knobs.runtime.jit_post_compile_hook = self._on_end

    def _on_begin(self, *, repr: str, **_: Any) -> bool:  # noqa: A002 - Triton's name
        self._began_s[repr] = time.perf_counter()
        return False  # compile it

    def _on_end(self, *, repr: str, **_: Any) -> bool:  # noqa: A002
        seconds = time.perf_counter() - self._began_s.pop(repr)
        self._metrics.late_compile.observe(seconds)
        _logger.warning("a kernel compiled in service, %.0f ms: %s", 1e3 * seconds, repr)
        return False
