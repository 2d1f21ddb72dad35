"""Spans on their way to a collector: OpenTelemetry's SDK, OTLP over gRPC.

Imported only when tracing is on. The SDK reads its own variables: OTEL_EXPORTER_OTLP_* (endpoint,
headers, timeout, certificate, compression), OTEL_BSP_* (the batches), OTEL_TRACES_SAMPLER,
OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES. A thread of its own sends; a full queue drops
spans. Must not know: any service. Entry point: `OtlpPipeline`.
"""

import logging
from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio, Sampler
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    Status,
    StatusCode,
    set_span_in_context,
)

import octavo
from octavo.telemetry import Decision, FinishedSpan

log = logging.getLogger(__name__)
_SCOPE = InstrumentationScope("octavo", octavo.__version__)
_UNSET = Status(StatusCode.UNSET)
_EMPTY = Context()


class OtlpPipeline:
    """A sampler, a queue and an exporter. Makes its threads and channel; nothing is dialled
    before the first batch."""

    def __init__(
        self,
        service: str,
        instance_id: str,
        environ: Mapping[str, str],
        exporter: SpanExporter | None = None,
    ) -> None:
        """`exporter`: in the collector's place."""
        protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get(
            "OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"
        )
        if protocol != "grpc":
            log.warning("OTEL_EXPORTER_OTLP_PROTOCOL=%s: traces go over grpc anyway", protocol)
        provider = TracerProvider(
            sampler=_ratio_sampler(environ),
            resource=_resource(service, instance_id, environ),
            shutdown_on_exit=False,
        )
        self._sampler = provider.sampler
        self._resource = provider.resource
        self._processor = BatchSpanProcessor(exporter or OTLPSpanExporter())

    def decide(self, parent: SpanContext | None, trace_id: int, name: str) -> Decision:
        context = _EMPTY
        if parent is not None:
            context = set_span_in_context(NonRecordingSpan(parent), _EMPTY)
        result = self._sampler.should_sample(context, trace_id, name)
        return Decision(result.decision.is_sampled(), result.trace_state)

    def export(self, span: FinishedSpan) -> None:
        # The form that processors and exporters take. Going through `start_span` and `end` would
        # cost six times as much (26 against 4 us) and choose the span's id itself, which others
        # had to know before the span ended.
        attributes = span.attributes
        if span.num_dropped_events:
            attributes = {**attributes, "octavo.dropped_events": span.num_dropped_events}
        readable = ReadableSpan(
            name=span.name,
            context=span.context,
            parent=span.parent,
            resource=self._resource,
            attributes=attributes,
            events=[Event(event.name, event.attributes, event.time_ns) for event in span.events],
            links=[Link(context) for context in span.links],
            kind=span.kind,
            status=_UNSET if span.error is None else Status(StatusCode.ERROR, span.error),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=_SCOPE,
        )
        self._processor.on_end(readable)

    def close(self) -> None:
        self._processor.shutdown()


def _resource(service: str, instance_id: str, environ: Mapping[str, str]) -> Resource:
    """Who speaks. What the environment says of itself wins over our defaults."""
    named = environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    ours = {"service.instance.id": instance_id, "service.version": octavo.__version__}
    ours = {key: value for key, value in ours.items() if f"{key}=" not in named}
    if not environ.get("OTEL_SERVICE_NAME") and "service.name=" not in named:
        ours["service.name"] = service
    return Resource.create(dict(ours))


def _ratio_sampler(environ: Mapping[str, str]) -> Sampler | None:
    """A named sampler is the SDK's to read (None); else a parent's word is law, and
    OTEL_TRACES_SAMPLER_ARG is the share of new traces, 1 without it."""
    if environ.get("OTEL_TRACES_SAMPLER"):
        return None
    ratio = environ.get("OTEL_TRACES_SAMPLER_ARG") or "1"
    try:
        return ParentBasedTraceIdRatio(float(ratio))
    except ValueError:
        log.warning("OTEL_TRACES_SAMPLER_ARG=%r is no ratio from 0 to 1: all is sampled", ratio)
        return ParentBasedTraceIdRatio(1.0)
