"""A sequence's spans: its time in the queue, its prefill, its decoding. One each, never more.

    router.request -> scheduler.queue | scheduler.prefill | scheduler.decode
                      submit .. row   | row .. 1st token  | 1st token .. end

What happens within is events: a chunk read, preempted, moved, a row again. A span is sent when
the next one begins; nothing is done per token. A sequence that isn't traced has no
`SequenceTrace`, and each call is behind one `if`.

Must not know: workers' state, the queue, protos. Entry points: `follow`, `SequenceTrace`.
"""

import time
from dataclasses import dataclass
from enum import Enum

from opentelemetry.trace import SpanContext

from octavo import telemetry
from octavo.errors import OctavoError
from octavo.telemetry import FinishedSpan, SpanEvent, Tracer, Value

# A long prompt in small chunks, or a long life of preemptions; the rest is counted.
MAX_EVENTS = 64


class Phase(Enum):
    """Values are span names."""

    QUEUE = "scheduler.queue"
    PREFILL = "scheduler.prefill"
    DECODE = "scheduler.decode"


@dataclass(frozen=True, slots=True)
class SubmissionTrace:
    """A submission whose request is sampled: where its sequences' spans belong."""

    tracer: Tracer
    parent: SpanContext
    received_ns: int

    @property
    def exemplar(self) -> dict[str, str] | None:
        """Labels for a histogram's observation of the request."""
        return telemetry.exemplar_of(self.parent)

    def of_sequence(self, index: int) -> "SequenceTrace":
        return SequenceTrace(self.tracer, self.parent, index, self.received_ns)

    def rejected(self, error: OctavoError) -> None:
        """The request was refused as a whole."""
        trace = self.of_sequence(0)
        trace.ended("rejected", error.message, error.kind.code or error.kind.type)


def follow(tracer: Tracer | None, traceparent: str, tracestate: str) -> SubmissionTrace | None:
    """The trace that a submission came with; None = it isn't recorded."""
    if tracer is None or not traceparent:
        return None
    parent = telemetry.parse_traceparent(traceparent, tracestate)
    if parent is None or not tracer.start(Phase.QUEUE.value, parent).trace_flags.sampled:
        return None
    return SubmissionTrace(tracer, parent, time.time_ns())


class SequenceTrace:
    """One sequence's. Calls come in the order in which things happen to it; `ended` is last."""

    __slots__ = (
        *("_attributes", "_context", "_events", "_index", "_num_dropped", "_parent", "_phase"),
        *("_started_ns", "_tracer", "_worker_id"),
    )

    def __init__(self, tracer: Tracer, parent: SpanContext, index: int, now_ns: int) -> None:
        self._tracer = tracer
        self._parent = parent
        self._index = index
        self._worker_id = ""
        self._begin(Phase.QUEUE, now_ns)

    @property
    def traceparent(self) -> str:
        """The W3C header of the span that is open now."""
        return telemetry.traceparent_of(self._context)

    def placed(self, worker_id: str, num_cached_tokens: int, num_tokens: int) -> None:
        """It got a row; `num_cached_tokens` of its `num_tokens` known ones are in the cache."""
        self._worker_id = worker_id
        where: dict[str, Value] = {
            "octavo.worker": worker_id,
            "octavo.cached_tokens": num_cached_tokens,
            "octavo.known_tokens": num_tokens,
        }
        if self._phase is Phase.QUEUE:
            now_ns = self._finish()
            self._begin(Phase.PREFILL, now_ns)
            self._attributes |= where
        else:
            self._event("row", where)

    def chunk(self, step: int, start: int, end: int) -> None:
        """Known tokens [start, end) are computed: the result of `step` was read."""
        self._event("chunk", {"octavo.step": step, "octavo.start": start, "octavo.end": end})

    def prefilled(self) -> None:
        """All known tokens are computed and the next one is drawn."""
        if self._phase is Phase.PREFILL:
            now_ns = self._finish()
            self._begin(Phase.DECODE, now_ns)
            self._attributes["octavo.worker"] = self._worker_id
        else:
            self._event("prefilled", {})

    def preempted(self) -> None:
        """Its row was taken from it; it queues again."""
        self._event("preempted", {})

    def moved(self, worker_id: str, loss: str) -> None:
        """Its worker was lost; it queues again."""
        self._event("moved", {"octavo.worker": worker_id, "octavo.loss": loss})

    def finished(
        self, reason: str, num_tokens: int, num_preemptions: int, num_moves: int, error: str | None
    ) -> None:
        """It ended after `num_tokens` generated ones; `error`: set unless it ended well."""
        self._attributes |= {
            "gen_ai.usage.output_tokens": num_tokens,
            "octavo.preemptions": num_preemptions,
            "octavo.moves": num_moves,
        }
        self.ended(reason, error, None if error is None else reason)

    def ended(self, outcome: str, error: str | None, error_type: str | None) -> None:
        self._attributes["octavo.outcome"] = outcome
        if error_type is not None:
            self._attributes["error.type"] = error_type
        self._finish(error)

    def _begin(self, phase: Phase, now_ns: int) -> None:
        self._phase = phase
        self._context = telemetry.child_of(self._parent)
        self._started_ns = now_ns
        self._attributes: dict[str, Value] = {"octavo.sequence.index": self._index}
        self._events: list[SpanEvent] = []
        self._num_dropped = 0

    def _event(self, name: str, attributes: dict[str, Value]) -> None:
        if len(self._events) < MAX_EVENTS:
            self._events.append(SpanEvent(name, time.time_ns(), attributes))
        else:
            self._num_dropped += 1

    def _finish(self, error: str | None = None) -> int:
        """Send the open span; when it ended."""
        now_ns = time.time_ns()
        self._tracer.finish(
            FinishedSpan(
                name=self._phase.value,
                context=self._context,
                parent=self._parent,
                start_ns=self._started_ns,
                end_ns=now_ns,
                attributes=self._attributes,
                events=self._events,
                num_dropped_events=self._num_dropped,
                error=error,
            )
        )
        return now_ns
