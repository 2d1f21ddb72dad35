"""A collector for tests: a real OTLP gRPC server that keeps every span, and a trace as text.

Entry points: `OtlpReceiver`, `Trace`.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Condition
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

WAIT_S = 30.0
ERROR = trace_pb2.Status.STATUS_CODE_ERROR
UNSET = trace_pb2.Status.STATUS_CODE_UNSET


@dataclass(frozen=True)
class Event:
    name: str
    time_ns: int
    attributes: dict[str, Any]


@dataclass(frozen=True)
class Span:
    """One span as it came over the wire; ids in hex, `parent_id` "" = a root."""

    name: str
    service: str
    resource: dict[str, Any]
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    kind: int
    attributes: dict[str, Any]
    events: list[Event]
    links: list[tuple[str, str]]
    status: int
    message: str
    trace_state: str

    def event_names(self) -> list[str]:
        return [event.name for event in self.events]


@dataclass
class Trace:
    """All spans of one trace, in order of their starts."""

    spans: list[Span]

    def all(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> Span:
        found = self.all(name)
        assert len(found) == 1, f"{len(found)} spans {name}:\n{self}"
        return found[0]

    def names(self) -> list[str]:
        return sorted(span.name for span in self.spans)

    def edges(self) -> set[tuple[str, str]]:
        """(parent's name, child's name); "" = a parent that isn't in the trace."""
        by_id = {span.span_id: span for span in self.spans}
        names = {key: span.name for key, span in by_id.items()}
        return {(names.get(span.parent_id, ""), span.name) for span in self.spans}

    def __str__(self) -> str:
        """The trace as a viewer draws it: offset and length in ms, bars, attributes, events."""
        first = min(span.start_ns for span in self.spans)
        whole_ns = max(max(span.end_ns for span in self.spans) - first, 1)
        ids = {span.span_id for span in self.spans}
        lines: list[str] = []

        def add(span: Span, depth: int) -> None:
            start, length = span.start_ns - first, span.end_ns - span.start_ns
            left, width = 30 * start // whole_ns, max(1, 30 * length // whole_ns)
            bar = (" " * left + "#" * width)[:31].ljust(31)
            status = f" ERROR({span.message})" if span.status == ERROR else ""
            label = f"{'  ' * depth}{span.name}"
            times = f"{start / 1e6:9.2f} +{length / 1e6:9.2f} ms"
            lines.append(f"{label:28}{bar} {times}  {span.service}{status}")
            indent = "  " * depth + "    "
            lines.extend(f"{indent}{key} = {value}" for key, value in span.attributes.items())
            for event in span.events:
                offset_ms = (event.time_ns - first) / 1e6
                lines.append(f"{indent}@{offset_ms:.2f} {event.name} {event.attributes or ''}")
            lines.extend(f"{indent}link -> {link}" for link in span.links)
            for child in self.spans:
                if child.parent_id == span.span_id:
                    add(child, depth + 1)

        for span in self.spans:
            if span.parent_id not in ids:
                add(span, 0)
        return "\n".join(lines)


@dataclass
class OtlpReceiver:
    """`with OtlpReceiver() as receiver:` serves at `receiver.endpoint`."""

    spans: list[Span] = field(default_factory=list[Span])

    def __post_init__(self) -> None:
        self._changed = Condition()
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Servicer(self), self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.stop(None).wait()

    @property
    def environ(self) -> dict[str, str]:
        """What makes a process send its spans here, soon."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50"}

    def take(self, spans: Sequence[Span]) -> None:
        with self._changed:
            self.spans.extend(spans)
            self._changed.notify_all()

    def wait(self, is_there: Callable[[list[Span]], bool], timeout_s: float = WAIT_S) -> None:
        """Return when what came so far satisfies `is_there`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not is_there(self.spans):
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    names = [(span.service, span.name, span.trace_id) for span in self.spans]
                    raise AssertionError(f"not there after {timeout_s} s: {names}")

    def wait_trace(self, trace_id: str, *names: str) -> Trace:
        """The trace once it has as many spans of each name as `names` say."""

        def is_there(spans: list[Span]) -> bool:
            mine = [span.name for span in spans if span.trace_id == trace_id]
            return all(mine.count(name) >= names.count(name) for name in names)

        self.wait(is_there)
        return self.trace(trace_id)

    def trace(self, trace_id: str) -> Trace:
        mine = [span for span in self.spans if span.trace_id == trace_id]
        return Trace(sorted(mine, key=lambda span: span.start_ns))


class _Servicer(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver

    def Export(  # noqa: N802
        self,
        request: trace_service_pb2.ExportTraceServiceRequest,
        context: grpc.ServicerContext,  # noqa: ARG002
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        spans = [
            _span(span, _plain(of_resource.resource.attributes))
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]
        self._receiver.take(spans)
        return trace_service_pb2.ExportTraceServiceResponse()


def _span(span: trace_pb2.Span, resource: dict[str, Any]) -> Span:
    return Span(
        name=span.name,
        service=resource["service.name"],
        resource=resource,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        kind=span.kind,
        attributes=_plain(span.attributes),
        events=[
            Event(event.name, event.time_unix_nano, _plain(event.attributes))
            for event in span.events
        ],
        links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        status=span.status.code,
        message=span.status.message,
        trace_state=span.trace_state,
    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {item.key: _value(item.value) for item in attributes}


def _value(value: common_pb2.AnyValue) -> Any:
    if value.WhichOneof("value") == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, value.WhichOneof("value") or "string_value")
