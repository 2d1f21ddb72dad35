"""A tracer that keeps what it is given. Entry point: `memory_tracer`."""

from collections.abc import Sequence

from opentelemetry.trace import SpanContext

from octavo.telemetry import Decision, FinishedSpan, Tracer

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = TRACEPARENT[:-1] + "0"


class SpanMemory:
    """A pipeline whose sampler says what the parent says, and yes to new traces."""

    def __init__(self) -> None:
        self.spans: list[FinishedSpan] = []

    def decide(
        self,
        parent: SpanContext | None,
        trace_id: int,  # noqa: ARG002
        name: str,  # noqa: ARG002
    ) -> Decision:
        if parent is None:
            return Decision(True)
        return Decision(bool(parent.trace_flags.sampled), parent.trace_state)

    def export(self, span: FinishedSpan) -> None:
        self.spans.append(span)

    def close(self) -> None:
        pass

    def names(self) -> list[str]:
        return [span.name for span in self.spans]

    def one(self, name: str) -> FinishedSpan:
        found = [span for span in self.spans if span.name == name]
        assert len(found) == 1, self.names()
        return found[0]


def memory_tracer() -> tuple[Tracer, SpanMemory]:
    memory = SpanMemory()
    return Tracer(memory), memory


def event_names(span: FinishedSpan) -> Sequence[str]:
    return [event.name for event in span.events]
