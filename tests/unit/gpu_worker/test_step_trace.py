"""Which steps get a span, whose child it is and whom it links to."""

import numpy as np
import pytest

from octavo.telemetry import parse_traceparent, traceparent_of
from octavo_worker import step_trace
from octavo_worker.plan import Chunk, Plan, RowAdd, Sampling, StepOutcome
from octavo_worker.step_trace import StepTrace
from tests.fakes.span_memory import TRACEPARENT, UNSAMPLED, SpanMemory, memory_tracer

OTHER = TRACEPARENT.replace("b7ad", "c8be")


class Steps:
    """Launches and reads one step after the other."""

    def __init__(self) -> None:
        tracer, self.memory = memory_tracer()
        self.trace = StepTrace(tracer, "a card")
        self.step = 0

    def run(self, plan: Plan | None = None, rows: tuple[int, ...] = ()) -> None:
        self.step += 1
        self.trace.launch(plan)
        self.trace.read(outcome(self.step, plan, rows))


def outcome(step: int, plan: Plan | None, rows: tuple[int, ...]) -> StepOutcome:
    ids = np.array(rows, np.uint32)
    return StepOutcome(
        step=step,
        plan_id=1,
        repeat=0 if plan else 1,
        rows=ids,
        generations=ids,
        token_ids=ids,
        events=ids.astype(np.uint8),
        logprobs=(),
        faults=(),
        num_prefill_tokens=0 if plan is None else plan.num_chunk_tokens,
        num_decode_tokens=len(rows),
        wait_us=7,
        step_us=1500,
    )


def add(row: int, traceparent: str = "") -> RowAdd:
    return RowAdd(row, 1, Sampling(), 0, np.arange(1, 3), 0, 20, traceparent=traceparent)


def chunk(row: int, *, is_last: bool = True) -> Chunk:
    return Chunk(row, 0, np.array([1, 2, 3], np.int64), is_last)


def parents(memory: SpanMemory) -> list[str | None]:
    return [None if s.parent is None else traceparent_of(s.parent) for s in memory.spans]


def test_the_first_chunks_step_is_a_child_of_the_rows_span() -> None:
    steps = Steps()
    steps.run(Plan(1, added_rows=(add(0, TRACEPARENT),), chunks=(chunk(0, is_last=False),)))
    span = steps.memory.one("worker.step")
    assert parents(steps.memory) == [TRACEPARENT]
    assert span.end_ns - span.start_ns == 1_500_000
    assert span.attributes == {
        "octavo.step": 1,
        "octavo.plan": 1,
        "octavo.plan.repeat": 0,
        "octavo.step.prefill_tokens": 3,
        "octavo.step.decode_rows": 0,
        "octavo.step.wait_us": 7,
        "octavo.device": "a card",
    }


def test_a_row_whose_chunk_comes_later_is_waited_for() -> None:
    steps = Steps()
    steps.run(Plan(1, added_rows=(add(3, TRACEPARENT),)))
    assert steps.memory.spans == []
    steps.run(Plan(2, chunks=(chunk(3),)))
    assert parents(steps.memory) == [TRACEPARENT]


def test_a_later_chunk_counts_as_being_there_though_it_draws_nothing() -> None:
    steps = Steps()
    steps.run(Plan(1, added_rows=(add(0, TRACEPARENT),), chunks=(chunk(0, is_last=False),)))
    steps.run(Plan(2, chunks=(chunk(0, is_last=False),)))
    assert parents(steps.memory) == [TRACEPARENT, None]
    assert [traceparent_of(link) for link in steps.memory.spans[1].links] == [TRACEPARENT]


def test_two_that_start_in_one_step_have_a_span_each_and_link_to_one_another() -> None:
    steps = Steps()
    rows = (add(0, TRACEPARENT), add(1), add(2, OTHER))
    steps.run(Plan(1, added_rows=rows, chunks=(chunk(0), chunk(1), chunk(2))))
    assert parents(steps.memory) == [TRACEPARENT, OTHER]
    links = [[traceparent_of(link) for link in span.links] for span in steps.memory.spans]
    assert links == [[OTHER], [TRACEPARENT]]


def test_later_steps_are_linked_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps()
    rows = (add(0, TRACEPARENT), add(1), add(2, OTHER))
    steps.run(Plan(1, added_rows=rows, chunks=(chunk(0), chunk(1), chunk(2))))
    for _ in range(5):
        steps.run(rows=(0, 1))
    linked = steps.memory.spans[2:]
    assert len(linked) == 1
    # Row 2 drew nothing in it.
    assert [traceparent_of(link) for link in linked[0].links] == [TRACEPARENT]
    assert linked[0].parent is None
    own = parse_traceparent(TRACEPARENT)
    assert own is not None
    assert linked[0].context.trace_id != own.trace_id
    assert linked[0].context.trace_flags.sampled
    monkeypatch.setattr(step_trace, "SPARSE_S", 0.0)
    for _ in range(5):
        steps.run(rows=(0, 1, 2))
    assert len(steps.memory.spans) == 8
    assert len(steps.memory.spans[-1].links) == 2


@pytest.mark.parametrize("traceparent", ["", "nonsense", UNSAMPLED])
def test_rows_that_arent_sampled_leave_nothing(traceparent: str) -> None:
    steps = Steps()
    steps.run(Plan(1, added_rows=(add(0, traceparent),), chunks=(chunk(0),)))
    for _ in range(3):
        steps.run(rows=(0,))
    assert steps.memory.spans == []


def test_a_rows_next_holder_and_a_new_epoch_know_nothing_of_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_trace, "SPARSE_S", 0.0)
    steps = Steps()
    steps.run(Plan(1, added_rows=(add(0, TRACEPARENT), add(1, OTHER)), chunks=(chunk(0),)))
    before = len(steps.memory.spans)
    steps.run(Plan(2, removed_rows=(0,), added_rows=(add(0),), chunks=(chunk(0),)), rows=(0,))
    assert len(steps.memory.spans) == before
    steps.trace.clear()
    steps.run(Plan(1, added_rows=(add(1),), chunks=(chunk(1),)), rows=(1,))
    assert len(steps.memory.spans) == before
