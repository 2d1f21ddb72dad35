"""CUDA graphs of small steps that compute prompts while other rows decode.

Such a step is short on the card and, launched kernel by kernel, long on the host. Its work is
padded to one of a few shapes; the host packs what it knows into one vector, uploads that where
the graph reads it, and launches. Steps that fit no shape run eagerly.

Must not know: plans, gRPC. Entry points: `MixedGraphs.capture`, `MixedGraphs.launch`.
"""

import logging
import time
from collections.abc import Callable
from functools import partial

import torch

from octavo_worker.captured import Capture, Drawn, Step
from octavo_worker.graph_shapes import StepShape
from octavo_worker.host_copies import upload_into
from octavo_worker.sent_step import SentStep, pack, vector_size
from octavo_worker.step_work import StepWork

_logger = logging.getLogger(__name__)


class MixedGraphs:
    """Captured mixed steps. `run_step(sent)` is the step itself, free of host synchronisation:
    int64 [2, C + S] tokens and events of its chunks' entries and decode rows; `spare_row` is dead.
    """

    def __init__(
        self,
        run_step: Callable[[SentStep], torch.Tensor],
        shapes: list[StepShape],
        spare_row: int,
        device: torch.device,
    ) -> None:
        """`shapes`: ascending in tokens and chunks, then in rows."""
        self._run_step = run_step
        self._shapes = shapes
        self._spare_row = spare_row
        self._device = device
        size = max(map(vector_size, shapes), default=0)
        self._vector = torch.zeros(size, dtype=torch.int64, device=device)
        self._steps: dict[StepShape, Step] = {}

    def capture(self, capture: Capture) -> None:
        """Capture every shape, the largest first: the smaller ones then fit into its memory."""
        began = time.monotonic()
        slowest_s = 0.0
        nothing = StepWork.of_nothing()
        for shape in reversed(self._shapes):
            shape_began = time.monotonic()
            self._upload(nothing, shape)
            sent = SentStep.of(self._vector, shape)
            self._steps[shape] = capture(partial(self._run_step, sent))
            slowest_s = max(slowest_s, time.monotonic() - shape_began)
        if self._shapes:
            _logger.info(
                "mixed graphs: %d captured (to %d prompt tokens) in %.1f s, the slowest in %.0f ms",
                len(self._shapes),
                self._shapes[-1].num_tokens,
                time.monotonic() - began,
                1e3 * slowest_s,
            )

    def launch(self, work: StepWork) -> Drawn | None:
        """Run the step of `work`; None if no shape holds it."""
        shape = self._shape_for(work)
        if shape is None:
            return None
        self._upload(work, shape)
        num_entries = len(work.entry_rows)
        # The chunks' entries end where the decode rows begin.
        first = shape.num_chunks - (num_entries - len(work.decode_rows))
        return Drawn(self._steps[shape](), first, num_entries)

    def _shape_for(self, work: StepWork) -> StepShape | None:
        num_tokens, num_chunks = work.num_prefill_tokens, len(work.chunks)
        num_rows = len(work.decode_rows)
        for shape in self._shapes:
            if (
                shape.num_tokens >= num_tokens
                and shape.num_chunks >= num_chunks
                and shape.num_rows >= num_rows
            ):
                return shape
        return None

    def _upload(self, work: StepWork, shape: StepShape) -> None:
        vector = pack(work, shape, self._spare_row)
        upload_into(vector, self._vector[: len(vector)])
