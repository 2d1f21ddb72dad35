"""A worker's spans: steps, seen from the requests whose rows were in them.

    scheduler.prefill -> worker.step     the step of a sampled sequence's first chunk: always
    worker.step ··links··▶ the rows'     a step at most once in `SPARSE_S`, a trace of its own
                           spans         with a link to each sampled sequence that was in it

The first kind is a child, so that one trace shows the way from HTTP to the device: viewers draw
children as bars on the request's own time axis, and links only as references. Later steps belong
to many requests alike, so they are linked. A span lasts as long as the step did on the device.

Must not know: tensors, gRPC, what a request is. Entry point: `StepTrace`.
"""

import time
from collections import deque
from typing import NamedTuple

from opentelemetry.trace import SpanContext

from octavo import telemetry
from octavo.telemetry import FinishedSpan, Tracer, Value
from octavo_worker.plan import Plan, StepOutcome

SPARSE_S = 1.0
MAX_LINKS = 64
_NAME = "worker.step"


class _Launched(NamedTuple):
    """A step on its way: who has its first chunk in it; and, if links are due, all traced rows
    and those that have a chunk in it."""

    first: tuple[SpanContext, ...] = ()
    rows: dict[int, SpanContext] | None = None
    chunk_rows: tuple[int, ...] = ()


_UNTRACED = _Launched()


class StepTrace:
    """One worker's. The engine's thread owns it, and tells of every launch and every outcome."""

    def __init__(self, tracer: Tracer, device: str) -> None:
        self._tracer = tracer
        self._device = device
        # Rows whose sequence is sampled: the spans in which they took them.
        self._rows: dict[int, SpanContext] = {}
        self._unstarted: set[int] = set()
        self._launched: deque[_Launched] = deque()
        self._linked_at = float("-inf")

    def clear(self) -> None:
        """A new epoch: no rows; no step is on its way."""
        self._rows.clear()
        self._unstarted.clear()
        self._launched.clear()

    def launch(self, plan: Plan | None) -> None:
        """The next step is about to be launched; None = a repeat."""
        first = () if plan is None else self._apply(plan)
        if not self._rows:
            self._launched.append(_UNTRACED)
            return
        if first:
            self._launched.append(_Launched(first))
        elif self._is_link_due():
            chunk_rows = tuple(chunk.row for chunk in plan.chunks) if plan is not None else ()
            self._launched.append(_Launched((), dict(self._rows), chunk_rows))
        else:
            self._launched.append(_UNTRACED)

    def _is_link_due(self) -> bool:
        return time.monotonic() - self._linked_at >= SPARSE_S

    def _apply(self, plan: Plan) -> tuple[SpanContext, ...]:
        """Take in a plan's rows; the spans of those with their first chunk in it."""
        for row in plan.removed_rows:
            self._rows.pop(row, None)
        for add in plan.added_rows:
            self._rows.pop(add.row, None)
            self._unstarted.discard(add.row)
            if not add.traceparent:
                continue
            context = telemetry.parse_traceparent(add.traceparent)
            if context is not None and context.trace_flags.sampled:
                self._rows[add.row] = context
                self._unstarted.add(add.row)
        if not self._unstarted:
            return ()
        started = [chunk.row for chunk in plan.chunks if chunk.row in self._unstarted]
        self._unstarted.difference_update(started)
        return tuple(self._rows[row] for row in started if row in self._rows)

    def read(self, outcome: StepOutcome) -> None:
        """The oldest launched step is over."""
        launched = self._launched.popleft()
        if launched is _UNTRACED:
            return
        for parent in launched.first:
            others = [context for context in launched.first if context is not parent]
            self._send(self._tracer.start(_NAME, parent), parent, others, outcome)
        if launched.rows is not None and self._is_link_due():
            present = {*outcome.rows.tolist(), *launched.chunk_rows}
            links = [context for row, context in launched.rows.items() if row in present]
            if links:
                self._linked_at = time.monotonic()
                self._send(telemetry.sampled_root(), None, links, outcome)

    def _send(
        self,
        context: SpanContext,
        parent: SpanContext | None,
        links: list[SpanContext],
        outcome: StepOutcome,
    ) -> None:
        end_ns = time.time_ns()
        attributes: dict[str, Value] = {
            "octavo.step": outcome.step,
            "octavo.plan": outcome.plan_id,
            "octavo.plan.repeat": outcome.repeat,
            "octavo.step.prefill_tokens": outcome.num_prefill_tokens,
            "octavo.step.decode_rows": outcome.num_decode_tokens,
            "octavo.step.wait_us": outcome.wait_us,
            "octavo.device": self._device,
        }
        self._tracer.finish(
            FinishedSpan(
                name=_NAME,
                context=context,
                parent=parent,
                start_ns=end_ns - 1000 * outcome.step_us,
                end_ns=end_ns,
                attributes=attributes,
                links=links[:MAX_LINKS],
            )
        )
