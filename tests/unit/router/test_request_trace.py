"""A request's own span: whose child it is, what it says of every kind of end, and why a cell."""

import asyncio
from collections.abc import Iterator, Sequence

import pytest
from opentelemetry.trace import SpanKind
from prometheus_client import CollectorRegistry

from octavo import telemetry
from octavo.errors import (
    CancelledError,
    ContextLengthError,
    DeadlineError,
    OctavoError,
    OverloadedError,
    UnavailableError,
)
from octavo.metrics import RouterMetrics
from octavo.telemetry import FinishedSpan, traceparent_of
from octavo_router.cells import Cell, CellChoice, choose_cell
from octavo_router.flights import Finish
from octavo_router.outcomes import RequestRecord
from octavo_router.request_trace import PromptTimes, RequestTrace, begin_trace, route_scores
from octavo_router.requests import Endpoint
from tests.fakes.span_memory import TRACEPARENT, UNSAMPLED, SpanMemory, memory_tracer

HASHES = [bytes([i]) * 16 for i in range(8)]
SECRET = "zqxjkvprompt"


@pytest.fixture(autouse=True)
def no_current_span() -> Iterator[None]:
    """A request's task ends with it; these tests' goes on."""
    yield
    telemetry.set_current(None)


def begin(
    headers: dict[str, str], endpoint: Endpoint = Endpoint.CHAT
) -> tuple[RequestTrace, SpanMemory]:
    tracer, memory = memory_tracer()
    trace = begin_trace(tracer, endpoint, headers.get)
    assert trace is not None
    return trace, memory


def test_without_a_tracer_there_is_no_trace() -> None:
    assert begin_trace(None, Endpoint.CHAT, {"traceparent": TRACEPARENT}.get) is None


def test_the_clients_span_is_the_parent_and_its_tasks_log_under_ours() -> None:
    async def handle() -> tuple[RequestTrace, SpanMemory, object]:
        trace, memory = begin({"traceparent": TRACEPARENT, "tracestate": "a=1"})
        return trace, memory, await asyncio.create_task(current())

    async def current() -> object:
        return telemetry.current()

    trace, memory, logged = asyncio.run(handle())
    assert logged is trace.context
    assert telemetry.current() is None
    trace.end("stop", 3, ["stop"])
    span = memory.one("router.request")
    assert span.parent is not None
    assert traceparent_of(span.parent) == TRACEPARENT
    assert span.context.trace_id == span.parent.trace_id
    assert span.context.trace_state.to_header() == "a=1"
    assert span.kind is SpanKind.SERVER
    assert trace.exemplar == {"trace_id": TRACEPARENT[3:35]}


@pytest.mark.parametrize("headers", [{}, {"traceparent": "nonsense"}])
def test_otherwise_it_is_a_root(headers: dict[str, str]) -> None:
    trace, memory = begin(headers)
    trace.end("stop", 3, ["stop"])
    assert memory.one("router.request").parent is None


def test_an_unsampled_parent_leaves_no_span_but_its_context_goes_on() -> None:
    trace, memory = begin({"traceparent": UNSAMPLED})
    trace.prepared(0, PromptTimes(1, 2, 3), 5, HASHES, [], None)
    trace.event("moved", cell="a")
    trace.first_token()
    trace.end("stop", 3, ["stop"])
    assert memory.spans == []
    assert trace.exemplar is None
    assert traceparent_of(trace.context).endswith("-00")
    assert traceparent_of(trace.context)[3:35] == UNSAMPLED[3:35]


def ended_with(error: BaseException, endpoint: Endpoint = Endpoint.CHAT) -> FinishedSpan:
    trace, memory = begin({}, endpoint)
    with (
        pytest.raises(type(error)),
        RequestRecord(RouterMetrics(CollectorRegistry()), endpoint, trace),
    ):
        raise error
    return memory.one("router.request")


@pytest.mark.parametrize(
    ("error", "outcome", "kind", "status", "text"),
    [
        (ContextLengthError(SECRET), "rejected", "context_length_exceeded", 400, None),
        (OverloadedError("full"), "rejected", "overloaded", 429, None),
        (UnavailableError("none", retry_after_ms=1), "rejected", "unavailable", 503, "none"),
        (OctavoError("row failed"), "error", "internal_error", 500, "row failed"),
        (DeadlineError("late"), "deadline", "deadline_exceeded", 504, "late"),
        (ValueError(SECRET), "error", "ValueError", 500, "error: ValueError"),
        (CancelledError("x"), "cancelled", "cancelled", 499, "the client left"),
        (asyncio.CancelledError(), "cancelled", "cancelled", None, "the client left"),
    ],
)
def test_every_end_has_its_status_and_none_its_prompt(
    error: BaseException, outcome: str, kind: str, status: int | None, text: str | None
) -> None:
    span = ended_with(error)
    assert span.attributes["octavo.outcome"] == outcome
    assert span.attributes["error.type"] == kind
    assert span.attributes.get("http.response.status_code") == status
    if text is None:
        assert span.error is None
    else:
        assert span.error is not None
        assert span.error.startswith(outcome)
        assert text in span.error
    assert SECRET not in repr(span)


def test_grpc_has_no_http_status() -> None:
    span = ended_with(OctavoError("row failed"), Endpoint.GRPC)
    assert "http.response.status_code" not in span.attributes
    assert span.attributes["rpc.system"] == "grpc"


def test_a_good_end_counts_tokens_and_says_when_the_first_came() -> None:
    trace, memory = begin({})
    record = RequestRecord(RouterMetrics(CollectorRegistry()), Endpoint.CHAT, trace)
    record.tokens(1, 1)
    record.tokens(4, 2)
    record.cached(32)
    record.finish([Finish.STOP, Finish.LENGTH])
    record.end("cancelled")
    span = memory.one("router.request")
    assert span.error is None
    assert [event.name for event in span.events] == ["first token"]
    attributes = span.attributes
    assert attributes["gen_ai.usage.output_tokens"] == 5
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 32
    assert attributes["gen_ai.response.finish_reasons"] == ["stop", "length"]
    assert attributes["octavo.outcome"] == "length"
    assert isinstance(attributes["gen_ai.server.time_to_first_token"], float)
    assert attributes["http.response.status_code"] == 200


def test_what_fails_after_the_headers_keeps_their_status() -> None:
    trace, memory = begin({})
    trace.has_answered = True
    trace.end("error", 3, error=OctavoError("lost"))
    span = memory.one("router.request")
    assert span.attributes["http.response.status_code"] == 200
    assert span.error == "error: lost"


def test_a_request_of_very_many_prompts_shows_the_first_ones() -> None:
    trace, memory = begin({})
    for position in range(1000):
        trace.prepared(position, PromptTimes(1, 2, 3), 5, HASHES, [Cell("a")], None)
    assert memory.names() == ["router.tokenize", "router.route"] * 8
    assert all(span.parent is trace.context for span in memory.spans)
    tokenize, route = memory.spans[:2]
    assert (tokenize.start_ns, tokenize.end_ns, route.start_ns, route.end_ns) == (1, 2, 2, 3)


def holding(num_blocks: int) -> Cell:
    def leading_run(hashes: Sequence[bytes]) -> int:
        return min(num_blocks, len(hashes))

    return Cell("warm", backlog_tokens=5, leading_run=leading_run)


@pytest.mark.parametrize(
    ("cells", "hashes", "reason"),
    [
        ([Cell("a", 7)], HASHES, "only cell"),
        ([Cell("a"), Cell("b", is_draining=True)], HASHES, "only cell"),
        ([Cell("a", 3), Cell("b", 2)], [], "least backlog"),
        ([Cell("a"), Cell("b")], HASHES, "rendezvous"),
        ([Cell("a"), holding(3)], HASHES, "longest cached prefix"),
        ([Cell("b", is_draining=True)], HASHES, "no cell takes requests"),
    ],
)
def test_a_route_says_what_it_was_chosen_from_and_why(
    cells: list[Cell], hashes: list[bytes], reason: str
) -> None:
    choice = choose_cell(cells, hashes, 16)
    scores = route_scores(cells, hashes, choice)
    assert scores["octavo.route.reason"] == reason
    candidates = [cell for cell in cells if not cell.is_draining]
    assert scores["octavo.route.cells"] == [cell.cell_id for cell in candidates]
    assert scores["octavo.route.backlog_tokens"] == [cell.backlog_tokens for cell in candidates]
    expected = [3 if cell.cell_id == "warm" else 0 for cell in candidates]
    assert scores["octavo.route.hit_blocks"] == expected
    assert scores["octavo.route.chosen"] == ("" if choice is None else choice.cell_id)


def test_a_spilled_choice_says_so() -> None:
    scores = route_scores([holding(3), Cell("b")], HASHES, CellChoice("b", 0, True))
    assert scores["octavo.route.reason"] == "spilled past a fuller cell"
