"""Traces: what a service says of a request's way, as spans that are made after the fact.

A service keeps the times that it has anyway and hands in finished spans; nothing is opened,
entered or left while a request runs. Tracing is on when an OTLP endpoint is set (the standard
OTEL_* variables, read by `octavo.otlp`); when it is off there is no `Tracer`, and each place that
would use it is one `if`.

Prompts and answers never enter a span. Only OpenTelemetry's API is imported here; its SDK and
the exporter are when tracing is on. Must not know: any service.
Entry points: `open_tracer`, `Tracer`, `parse_traceparent`, `traceparent_of`, `exemplar_of`.
"""

import logging
import os
import random
import threading
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

log = logging.getLogger(__name__)

# Time for what is still queued to leave at the end; a collector that is away doesn't hold us up.
FLUSH_S = 2.0
# W3C asks for at least this many; longer ones aren't worth their way through the fleet.
_MAX_HEADER_CHARS = 512
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSAMPLED = TraceFlags(TraceFlags.DEFAULT)
_W3C = TraceContextTextMapPropagator()
_current: ContextVar[SpanContext | None] = ContextVar("octavo_span", default=None)

Value = str | bool | int | float | Sequence[str] | Sequence[int]
Attributes = Mapping[str, Value]


class SpanEvent(NamedTuple):
    """Something that happened within a span."""

    name: str
    time_ns: int
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class FinishedSpan:
    """A span to export. Times since 1970; `error`: what went wrong, None = nothing."""

    name: str
    context: SpanContext
    parent: SpanContext | None
    start_ns: int
    end_ns: int
    attributes: Attributes
    kind: SpanKind = SpanKind.INTERNAL
    events: Sequence[SpanEvent] = ()
    num_dropped_events: int = 0
    links: Sequence[SpanContext] = ()
    error: str | None = None


class Decision(NamedTuple):
    """A sampler's word on a new span."""

    is_sampled: bool
    trace_state: TraceState | None = None


class Pipeline(Protocol):
    """What decides on spans and sends them. `export` never blocks; both from any thread."""

    def decide(self, parent: SpanContext | None, trace_id: int, name: str) -> Decision: ...

    def export(self, span: FinishedSpan) -> None: ...

    def close(self) -> None:
        """Send what is queued; may take as long as the collector does."""
        ...


class Tracer:
    """Makes span contexts and passes finished spans on. All methods from any thread."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def start(self, name: str, parent: SpanContext | None) -> SpanContext:
        """The context of a new span, sampled or not, in `parent`'s trace or in one of its own."""
        trace_id = random.getrandbits(128) or 1 if parent is None else parent.trace_id
        decision = self._pipeline.decide(parent, trace_id, name)
        flags = _SAMPLED if decision.is_sampled else _UNSAMPLED
        return SpanContext(trace_id, _new_span_id(), False, flags, decision.trace_state)

    def finish(self, span: FinishedSpan) -> None:
        """Export a span; one whose context isn't sampled is dropped."""
        if span.context.trace_flags.sampled:
            self._pipeline.export(span)

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Flush, for at most `timeout_s`."""
        closing = threading.Thread(target=self._pipeline.close, name="trace-flush", daemon=True)
        closing.start()
        closing.join(timeout_s)


def child_of(parent: SpanContext) -> SpanContext:
    """A new span in the parent's process and trace, sampled as it is."""
    flags, state = parent.trace_flags, parent.trace_state
    return SpanContext(parent.trace_id, _new_span_id(), False, flags, state)


def sampled_root() -> SpanContext:
    """A new sampled trace, for a span whose reason to be is its links to others."""
    return SpanContext(random.getrandbits(128) or 1, _new_span_id(), False, _SAMPLED)


def _new_span_id() -> int:
    return random.getrandbits(64) or 1


def open_tracer(
    service: str, instance_id: str, environ: Mapping[str, str] | None = None
) -> Tracer | None:
    """The tracer that the environment asks for; None = off.

    `service`: the last part of the default service name, "octavo-...". What is wrong with the
    variables, or missing, is logged and turns tracing off: it never keeps a service from running.
    """
    environ = os.environ if environ is None else environ
    if not is_wanted(environ):
        return None
    try:
        from octavo.otlp import OtlpPipeline

        pipeline = OtlpPipeline(f"octavo-{service}", instance_id, environ)
    except ImportError as error:
        log.warning("no traces: %s; install octavo[telemetry]", error)
        return None
    except Exception as error:
        log.warning("no traces: the OTEL_* variables can't be used: %s", error)
        return None
    log.info("traces go to %s", endpoint_of(environ))
    return Tracer(pipeline)


def endpoint_of(environ: Mapping[str, str]) -> str:
    """Where spans are sent; "" = nowhere."""
    general = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    return environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "") or general


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Whether an endpoint is set, and nothing says that there is to be no tracing."""
    is_disabled = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    is_silent = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none"
    return bool(endpoint_of(environ)) and not (is_disabled or is_silent)


# Context across processes (W3C Trace Context) and within one.


def parse_traceparent(traceparent: str | None, tracestate: str | None = "") -> SpanContext | None:
    """The span that a peer's headers name; None if they name none, or aren't well-formed."""
    if not traceparent or len(traceparent) > _MAX_HEADER_CHARS:
        return None
    carrier = {"traceparent": traceparent}
    if tracestate and len(tracestate) <= _MAX_HEADER_CHARS:
        carrier["tracestate"] = tracestate
    context = get_current_span(_W3C.extract(carrier)).get_span_context()
    return context if context.is_valid else None


def traceparent_of(context: SpanContext) -> str:
    """The W3C header value of a span."""
    flags = int(context.trace_flags)
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"


def tracestate_of(context: SpanContext) -> str:
    """The W3C header value; "" = there is none."""
    return context.trace_state.to_header() if context.trace_state else ""


def set_current(context: SpanContext | None) -> None:
    """From here on the running task, and tasks that it makes, log under this span."""
    _current.set(context)


def current() -> SpanContext | None:
    """The span that the running task works for."""
    return _current.get()


def exemplar_of(context: SpanContext | None) -> dict[str, str] | None:
    """Labels that tie a histogram's observation to its trace; None if that isn't recorded.

    Fits `Histogram.observe(value, exemplar)`.
    """
    if context is None or not context.trace_flags.sampled:
        return None
    return {"trace_id": f"{context.trace_id:032x}"}
