"""What tracing's own calls cost, in one process: no services, no noise.

A request's calls in router, scheduler and worker as they come one after the other, in us of this
thread's CPU. `export`: what the sender's thread does beside them, encoding all spans of a request.
Entry point: `measure_calls`.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from octavo import otlp, telemetry
from octavo.telemetry import Tracer
from octavo_router.cells import Cell, CellChoice
from octavo_router.request_trace import PromptTimes, begin_trace
from octavo_router.requests import Endpoint
from octavo_scheduler.sequence_trace import follow
from octavo_worker.plan import Chunk, Plan, RowAdd, Sampling, StepOutcome
from octavo_worker.step_trace import StepTrace

SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = SAMPLED[:-1] + "0"
# Places that look whether a request of one sequence is traced.
_NUM_CHECKS = 22
_PAUSE_S = 0.1
_CELLS = [Cell("cell-a")]
_CHOICE = CellChoice("cell-a", 0, False)
_IDS = np.zeros(1, np.uint32)
_OUTCOME = StepOutcome(1, 1, 0, _IDS, _IDS, _IDS, _IDS.astype(np.uint8), (), (), 100, 0, 5, 900)


class _Keep(SpanExporter):
    """In the collector's place: keeps a span of each name that is part of a request's trace."""

    def __init__(self) -> None:
        self.spans: dict[str, ReadableSpan] = {}

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans |= {span.name: span for span in spans if not span.links}
        return SpanExportResult.SUCCESS


class _Untraced:
    trace: object | None = None


def measure_calls(num_requests: int = 150, num_rounds: int = 10) -> dict[str, float]:
    """us a request: `off`, `unsampled` (router and scheduler), and of sampled ones each part."""
    keep = _Keep()
    pipeline = otlp.OtlpPipeline("octavo-bench", "bench", {}, keep)
    tracer = Tracer(pipeline)
    costs = {
        "off": _timed(_off, num_requests, num_rounds),
        "unsampled": _timed(lambda: _unsampled(tracer), num_requests, num_rounds),
        "router": _timed(lambda: _router(tracer, SAMPLED), num_requests, num_rounds),
        "scheduler": _timed(lambda: _scheduler(tracer, SAMPLED), num_requests, num_rounds),
    }
    steps = StepTrace(tracer, "a card")
    costs["worker"] = _timed(lambda: _worker(steps), num_requests, num_rounds)
    pipeline.close()
    telemetry.set_current(None)
    # One request's spans, as often as a full batch of 512 has room for.
    batch = list(keep.spans.values()) * 73
    num_batches = max(1, num_requests // 30)
    batch_us = _timed(lambda: encode_spans(batch).SerializeToString(), num_batches, num_rounds)
    costs["export"] = batch_us / 73
    return {name: round(cost, 2) for name, cost in costs.items()}


def _timed(call: Callable[[], object], count: int, num_rounds: int) -> float:
    """us a call, the least of some rounds. The sender gets time between them: a queue that is
    full would cost a warning for each span."""
    call()
    rounds: list[float] = []
    for _ in range(num_rounds):
        started = time.thread_time()
        for _ in range(count):
            call()
        rounds.append(time.thread_time() - started)
        time.sleep(_PAUSE_S)
    return 1e6 * min(rounds) / count


def _off() -> None:
    begin_trace(None, Endpoint.CHAT, _no_header)
    untraced = _Untraced()
    for _ in range(_NUM_CHECKS):
        assert untraced.trace is None


def _no_header(name: str) -> None:
    return None


def _unsampled(tracer: Tracer) -> None:
    _router(tracer, UNSAMPLED)
    _scheduler(tracer, UNSAMPLED)


def _router(tracer: Tracer, traceparent: str) -> None:
    trace = begin_trace(tracer, Endpoint.CHAT, {"traceparent": traceparent}.get)
    assert trace is not None
    trace.prepared(0, PromptTimes(1, 2, 3), 100, [bytes(16)] * 6, _CELLS, _CHOICE)
    trace.first_token()
    trace.end("stop", 16, ["stop"])


def _scheduler(tracer: Tracer, traceparent: str) -> None:
    submission = follow(tracer, traceparent, "")
    if submission is None:
        return
    trace = submission.of_sequence(0)
    trace.placed("worker-0", 0, 100)
    assert trace.traceparent
    trace.chunk(1, 0, 100)
    trace.prefilled()
    trace.finished("stop", 16, 0, 0, None)


def _worker(steps: StepTrace) -> None:
    add = RowAdd(0, 1, Sampling(), 0, _IDS.astype(np.int64), 0, 200, traceparent=SAMPLED)
    chunk = Chunk(0, 0, np.zeros(100, np.int64), is_last=True)
    steps.launch(Plan(1, removed_rows=(0,), added_rows=(add,), chunks=(chunk,)))
    steps.read(_OUTCOME)
    for _ in range(15):
        steps.launch(None)
        steps.read(_OUTCOME)
