"""CUDA graphs of whole decode steps, one for each batch size of a short list.

A graph holds everything between two steps: inputs from the row tensors, the model, the draw,
the rows' update. The host's part is to say which rows decode (nothing, if they are those of the
step before), to launch, and to read the ids out of a pinned ring later. A batch is padded to
the next size with the spare row, which is always dead: it stores nothing and draws nothing.

Must not know: plans, gRPC. Entry points: `DecodeGraphs.capture`, `DecodeGraphs.launch`.

S decode rows, padded to a captured size.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import torch

from octavo_worker.plan import I64

_logger = logging.getLogger(__name__)
# Slots of the pinned rings: more than steps can be in flight, so none is overwritten unread.
_RING = 4


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    drawn: torch.Tensor  # int64 [2, size]: tokens and events of the newest replay


def batch_sizes(max_num_seqs: int) -> list[int]:
    """The captured sizes, ascending: dense where a step is short and padding costs most."""
    steps = ((16, 4), (64, 8), (128, 16), (512, 32), (max_num_seqs, 64))
    sizes = [1, 2]
    for end, step in steps:
        while sizes[-1] < end:
            sizes.append((sizes[-1] // step + 1) * step)
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


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
        self._graphs: dict[int, _Graph] = {}
        self._rows = torch.full((max_num_seqs,), spare_row, dtype=torch.int64, device=device)
        self._rows_on_device: tuple[int, bytes] | None = None
        shape = (max_num_seqs,)
        self._row_ring = [
            torch.empty(shape, dtype=torch.int64, pin_memory=True) for _ in range(_RING)
        ]
        self._drawn_ring = [
            torch.empty((2, max_num_seqs), dtype=torch.int64, pin_memory=True) for _ in range(_RING)
        ]
        self._num_uploads = 0
        self._num_launches = 0

    def capture(self, error_mode: str) -> None:
        """Capture every size, the largest first: the smaller ones then fit into its memory."""
        began = time.monotonic()
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            rows = self._rows[:size]
            self._run_step(rows)  # compiles what this size needs; a capture can't
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode=error_mode):
                drawn = self._run_step(rows)
            self._graphs[size] = _Graph(graph, drawn)
        _logger.info(
            "captured %d decode graphs (1 to %d rows) in %.1f s",
            len(self._sizes),
            self._sizes[-1],
            time.monotonic() - began,
        )

    def launch(self, decode_rows: I64) -> torch.Tensor:
        """Run the step of `decode_rows` [S]; pinned int64 [2, S], filled once the step is done
        and valid until `_RING` further launches."""
        num_rows = len(decode_rows)
        size = self._sizes[bisect_left(self._sizes, num_rows)]
        self._upload(decode_rows, size)
        graph = self._graphs[size]
        graph.graph.replay()
        pinned = self._drawn_ring[self._num_launches % _RING]
        self._num_launches += 1
        target = pinned.view(-1)[: 2 * size].view(2, size)
        target.copy_(graph.drawn, non_blocking=True)
        return target[:, :num_rows]

    def _upload(self, decode_rows: I64, size: int) -> None:
        """Put the rows where the graph reads them, if they aren't there already."""
        key = (size, decode_rows.tobytes())
        if key == self._rows_on_device:
            return
        self._rows_on_device = key
        pinned = self._row_ring[self._num_uploads % _RING]
        self._num_uploads += 1
        host = pinned.numpy()
        host[: len(decode_rows)] = decode_rows
        host[len(decode_rows) : size] = self._spare_row
        self._rows[:size].copy_(pinned[:size], non_blocking=True)
