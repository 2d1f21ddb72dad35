"""A sequence's three spans, whatever happens to it, and nothing for one that isn't sampled."""

from itertools import pairwise

import pytest

from octavo.cancel_reason import CancelReason
from octavo.settings import SchedulerSettings
from octavo.telemetry import FinishedSpan, traceparent_of
from octavo_scheduler.recovery import Loss
from octavo_scheduler.sequence_trace import MAX_EVENTS, SequenceTrace, follow
from tests.fakes.fake_device import FakeSize
from tests.fakes.simulated_cell import SESSION, SimulatedCell, prompt_of
from tests.fakes.span_memory import (
    TRACEPARENT,
    UNSAMPLED,
    SpanMemory,
    event_names,
    memory_tracer,
)

LEAVING = {"preempted", "moved"}
QUEUE, PREFILL, DECODE = "scheduler.queue", "scheduler.prefill", "scheduler.decode"


class TracedCell(SimulatedCell):
    """Every request comes with the same parent."""

    def __init__(self, *arguments: object, traceparent: str = TRACEPARENT, **more: object) -> None:
        self.tracer, self.memory = memory_tracer()
        self.traceparent = traceparent
        super().__init__(*arguments, **more)  # type: ignore[arg-type]

    def trace(self) -> object:
        return follow(self.tracer, self.traceparent, "vendor=1")


def check_line(spans: list[FinishedSpan]) -> None:
    """One after the other without a gap, all of them the request's children."""
    assert [span.name for span in spans] == [QUEUE, PREFILL, DECODE][: len(spans)]
    for before, after in pairwise(spans):
        assert before.end_ns == after.start_ns
    for span in spans:
        assert span.parent is not None
        assert traceparent_of(span.parent) == TRACEPARENT
        assert span.context.trace_id == span.parent.trace_id
        assert span.start_ns <= span.end_ns
        assert all(span.start_ns <= event.time_ns <= span.end_ns for event in span.events)
        assert span.context.trace_state.to_header() == "vendor=1"
    assert len({span.context.span_id for span in spans}) == len(spans)


def test_queue_prefill_decode() -> None:
    cell = TracedCell(FakeSize(max_num_batched_tokens=64))
    cell.submit(prompt_of(150), 20, trace=cell.trace())
    cell.run()
    spans = cell.memory.spans
    check_line(spans)
    _, prefill, decode = spans
    assert prefill.attributes["octavo.worker"] == decode.attributes["octavo.worker"] == "w0"
    assert prefill.attributes["octavo.cached_tokens"] == 0
    chunks = [
        (event.attributes["octavo.start"], event.attributes["octavo.end"])
        for event in prefill.events
    ]
    assert event_names(prefill) == ["chunk"] * 3
    assert chunks == [(0, 64), (64, 128), (128, 150)]
    assert decode.events == []
    assert decode.attributes["gen_ai.usage.output_tokens"] == 20
    assert decode.attributes["octavo.outcome"] == "length"
    assert [span.error for span in spans] == [None] * 3


def test_each_sequence_of_a_request_has_its_own() -> None:
    cell = TracedCell()
    cell.submit(prompt_of(40), 10, num_sequences=3, seed=1, trace=cell.trace())
    cell.run()
    for index in range(3):
        mine = [
            span for span in cell.memory.spans if span.attributes["octavo.sequence.index"] == index
        ]
        check_line(mine)
    assert len(cell.memory.spans) == 9


def test_the_worker_learns_the_span_in_which_the_row_was_taken() -> None:
    cell = TracedCell()
    cell.submit(prompt_of(40), 10, trace=cell.trace())
    cell.submit(prompt_of(40, seed=1), 10)
    cell.run()
    plans = cell.links[cell.members[0]].sent
    added = [row.traceparent for plan in plans for row in plan.added_rows]
    assert added == [traceparent_of(cell.memory.one(PREFILL).context), ""]


def test_preempted_and_moved_are_events_within_the_one_decode_span() -> None:
    size = FakeSize(num_blocks=40, max_num_seqs=16, max_num_batched_tokens=256)
    # Nothing is kept for growth, so that rows run into one another.
    settings = SchedulerSettings(check_integrity=True, growth_reserve=0.0)
    cell = TracedCell(size, num_workers=2, settings=settings)
    for i in range(20):
        cell.submit(prompt_of(40, seed=i), 200, trace=cell.trace())
    for _ in range(150):
        cell.step()
    cell.kill(cell.members[0], Loss.HANG)
    cell.run()
    decodes = [span for span in cell.memory.spans if span.name == DECODE]
    assert len(cell.memory.spans) == 60
    assert len(decodes) == 20
    all_names = [event_names(span) for span in decodes]
    assert any("preempted" in names for names in all_names)
    assert any("moved" in names for names in all_names)
    for span in decodes:
        names = event_names(span)
        # It leaves a row, gets one again, and computes what it knew, unless it has to leave again.
        steps = [name for name in names if name != "chunk"]
        follows = {"preempted": {"row"}, "moved": {"row"}, "row": {"prefilled", *LEAVING}}
        for before, after in pairwise(["prefilled", *steps]):
            assert after in follows.get(before, LEAVING)
        assert steps[-1:] in ([], ["prefilled"])
        assert names.count("preempted") == span.attributes["octavo.preemptions"]
        assert names.count("moved") == span.attributes["octavo.moves"]
        for event in span.events:
            if event.name == "moved":
                assert event.attributes == {"octavo.worker": "w0", "octavo.loss": "hang"}


def test_cancelled_in_each_phase() -> None:
    cell = TracedCell(FakeSize(max_num_batched_tokens=64, max_num_seqs=1))
    first = cell.submit(prompt_of(40), 50, trace=cell.trace())
    second = cell.submit(prompt_of(40, seed=1), 50, trace=cell.trace())
    cell.step()
    cell.cell.cancel(SESSION, second, None, CancelReason.CLIENT)
    for _ in range(4):
        cell.step()
    cell.cell.cancel(SESSION, first, None, CancelReason.DEADLINE)
    cell.run()
    queued = next(span for span in cell.memory.spans if span.error is not None)
    assert (queued.name, queued.error) == (QUEUE, "cancelled")
    assert queued.attributes["error.type"] == "cancelled"
    check_line([span for span in cell.memory.spans if span is not queued])
    decode = cell.memory.one(DECODE)
    assert (decode.error, decode.attributes["octavo.outcome"]) == ("deadline", "deadline")


def test_a_refused_request_says_why() -> None:
    cell = TracedCell(settings=SchedulerSettings(max_queue_tokens=50))
    for i in range(3):
        cell.submit(prompt_of(40, seed=i), 5, num_sequences=2, trace=cell.trace())
    cell.run()
    refused = [span for span in cell.memory.spans if span.error is not None]
    assert [span.name for span in refused] == [QUEUE, QUEUE]
    assert {span.attributes["error.type"] for span in refused} == {"overloaded"}
    assert {span.attributes["octavo.outcome"] for span in refused} == {"rejected"}


@pytest.mark.parametrize("traceparent", ["", "nonsense", UNSAMPLED])
def test_what_isnt_sampled_leaves_nothing(traceparent: str) -> None:
    cell = TracedCell(traceparent=traceparent)
    assert cell.trace() is None
    cell.submit(prompt_of(40), 10, trace=None)
    cell.run()
    assert cell.memory.spans == []
    assert follow(None, TRACEPARENT, "") is None


def test_events_are_bounded_and_the_rest_is_counted() -> None:
    tracer, memory = memory_tracer()
    submission = follow(tracer, TRACEPARENT, "")
    assert submission is not None
    trace: SequenceTrace = submission.of_sequence(0)
    trace.placed("w0", 0, 100)
    for i in range(MAX_EVENTS + 5):
        trace.chunk(i + 1, i, i + 1)
    trace.prefilled()
    assert_bounded(memory)


def assert_bounded(memory: SpanMemory) -> None:
    prefill = memory.one(PREFILL)
    assert len(prefill.events) == MAX_EVENTS
    assert prefill.num_dropped_events == 5
