"""CUDA graphs of whole decode steps, one for each batch size of a short list.

A graph holds everything between two steps: inputs from the row tensors, the model, the draw,
the rows' update. The host's part is to say which rows decode (nothing, if they are those of the
step before), to launch, and to have the ids copied. A batch is padded to the next size with the
spare row, which is always dead: it stores nothing and draws nothing.

Must not know: plans, gRPC. Entry points: `DecodeGraphs.capture`, `DecodeGraphs.launch`.

S decode rows, padded to a captured size.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from octavo_worker.captured import Capture, Drawn, Step
from octavo_worker.graph_shapes import batch_sizes
from octavo_worker.host_copies import upload_into
from octavo_worker.plan import I64

_logger = logging.getLogger(__name__)


class DecodeGraphs:
    """Captured decode steps. `run_step(rows)` is the step itself: int64 [S] rows on the device
    to int64 [2, S] tokens and events, free of host synchronisation; `spare_row` is dead."""

    def __init__(
        self,
        run_step: Callable[[torch.Tensor], torch.Tensor],
        max_num_seqs: int,
        spare_row: int,
        device: torch.device,
    ) -> None:
        self._run_step = run_step
        self._spare_row = spare_row
        self._sizes = batch_sizes(max_num_seqs)
        self._steps: dict[int, Step] = {}
        self._rows = torch.full((max_num_seqs,), spare_row, dtype=torch.int64, device=device)
        self._rows_on_device: tuple[int, bytes] | None = None

    def capture(self, capture: Capture) -> None:
        """Capture every size, the largest first: the smaller ones then fit into its memory."""
        began = time.monotonic()
        for size in reversed(self._sizes):
            self._steps[size] = capture(partial(self._run_step, self._rows[:size]))
        _logger.info(
            "captured %d decode graphs (1 to %d rows) in %.1f s",
            len(self._sizes),
            self._sizes[-1],
            time.monotonic() - began,
        )

    def launch(self, decode_rows: I64) -> Drawn:
        """Run the step of `decode_rows` [S]."""
        num_rows = len(decode_rows)
        size = self._sizes[bisect_left(self._sizes, num_rows)]
        self._upload(decode_rows, size)
        return Drawn(self._steps[size](), 0, num_rows)

    def _upload(self, decode_rows: I64, size: int) -> None:
        """Put the rows where the graph reads them, if they aren't there already."""
        key = (size, decode_rows.tobytes())
        if key == self._rows_on_device:
            return
        self._rows_on_device = key
        padded = np.full(size, self._spare_row, np.int64)
        padded[: len(decode_rows)] = decode_rows
        upload_into(padded, self._rows[:size])
