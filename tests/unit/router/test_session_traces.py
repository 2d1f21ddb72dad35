"""A traced request among schedulers: its context goes to each, its moves are its span's events."""

import asyncio
from typing import Any

import pytest

from octavo.telemetry import FinishedSpan
from octavo.v1 import common_pb2
from tests.fakes.fake_scheduler import FakeScheduler
from tests.fakes.router_process import byte_scheduler, running_router, until
from tests.fakes.span_memory import TRACEPARENT, event_names, memory_tracer

BODY = {"prompt": "abc", "max_tokens": 40, "seed": 5, "stream": True}
HEADERS = {"traceparent": TRACEPARENT, "tracestate": "vendor=1"}


def fake_cell(name: str) -> FakeScheduler:
    return byte_scheduler(scheduler_id=name, interval_s=0.003)


def events_of(span: FinishedSpan) -> list[tuple[str, Any]]:
    return [(event.name, event.attributes.get("octavo.cell")) for event in span.events]


def check_submits(span: FinishedSpan, *cells: FakeScheduler) -> None:
    """Each scheduler was told of the same span: the router's own."""
    context = span.context
    ours = f"00-{context.trace_id:032x}-{context.span_id:016x}-01"
    assert ours[3:35] == TRACEPARENT[3:35]
    for cell in cells:
        assert [submit.traceparent for submit in cell.submits] == [ours] * len(cell.submits)
        assert {submit.tracestate for submit in cell.submits} == {"vendor=1"}


@pytest.mark.parametrize("is_handover", [False, True])
def test_a_move_to_another_scheduler(is_handover: bool) -> None:
    async def main() -> None:
        tracer, memory = memory_tracer()
        cells = [fake_cell("one"), fake_cell("two")]
        async with running_router(*cells, tracer=tracer) as router:
            task = asyncio.create_task(
                router.http.post("/v1/completions", json=BODY, headers=HEADERS)
            )
            await until(lambda: any(cell.submits for cell in cells))
            used, other = cells if cells[0].submits else reversed(cells)
            await until(
                lambda: any(s.num_sent for x in used._sessions for s in x.sequences.values())
            )
            if is_handover:
                used.move_sessions(other.address)
            else:
                await used.stop()
            assert (await task).status_code == 200
            span = memory.one("router.request")
            check_submits(span, used, other)
            assert events_of(span) == [
                ("first token", None),
                ("handed over" if is_handover else "scheduler lost", used.scheduler_id),
                ("moved", other.scheduler_id),
            ]
            assert span.attributes["octavo.outcome"] == "length"

    asyncio.run(main())


def test_a_refusal_that_is_tried_elsewhere() -> None:
    async def main() -> None:
        tracer, memory = memory_tracer()
        cells = [fake_cell("one"), fake_cell("two")]
        for cell in cells:
            cell.reject = common_pb2.Error(code=8, message="full")
        async with running_router(*cells, tracer=tracer) as router:
            answer = await router.http.post("/v1/completions", json=BODY, headers=HEADERS)
            assert answer.status_code == 429
            span = memory.one("router.request")
            check_submits(span, *cells)
            (route,) = [span for span in memory.spans if span.name == "router.route"]
            assert event_names(span) == ["refused"]
            assert (
                span.events[0].attributes["octavo.cell"] == route.attributes["octavo.route.chosen"]
            )
            assert span.attributes["error.type"] == "overloaded"

    asyncio.run(main())


def test_nothing_is_sent_while_tracing_is_off() -> None:
    async def main() -> None:
        cell = fake_cell("one")
        async with running_router(cell) as router:
            answer = await router.http.post("/v1/completions", json=BODY, headers=HEADERS)
            assert answer.status_code == 200
            assert [(s.traceparent, s.tracestate) for s in cell.submits] == [("", "")]

    asyncio.run(main())
