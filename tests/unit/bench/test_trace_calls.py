"""tests.bench.trace_calls: every part is there, and a request's spans are all encoded."""

import pytest

from tests.bench import trace_calls
from tests.bench.trace_calls import measure_calls

SPANS = {"router.request", "router.tokenize", "router.route", "worker.step"}
SPANS |= {f"scheduler.{phase}" for phase in ("queue", "prefill", "decode")}


def test_a_requests_calls_make_its_seven_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[list[str]] = []
    encode = trace_calls.encode_spans

    def note(spans: list[trace_calls.ReadableSpan]) -> object:
        encoded.append([span.name for span in spans])
        return encode(spans)

    monkeypatch.setattr(trace_calls, "encode_spans", note)
    costs = measure_calls(num_requests=20, num_rounds=1)
    assert set(costs) == {"off", "unsampled", "router", "scheduler", "worker", "export"}
    assert all(cost >= 0 for cost in costs.values())
    assert set(encoded[0]) == SPANS
    assert len(encoded[0]) == 7 * 73
