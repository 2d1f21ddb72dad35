"""Outcomes and times: one outcome a request, whatever happens, and a histogram that adds up."""

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from octavo.errors import (
    AuthenticationError,
    CancelledError,
    ContextLengthError,
    DeadlineError,
    ModelNotFoundError,
    OctavoError,
    OverloadedError,
    RequestTooLargeError,
    UnavailableError,
)
from octavo.metric_kinds import LATENCY_BUCKETS_S
from octavo.metrics import OUTCOMES, RouterMetrics
from octavo_router.flights import Finish
from octavo_router.outcomes import RequestRecord, outcome_of
from octavo_router.requests import Endpoint


def outcomes(metrics: RouterMetrics) -> dict[str, float]:
    return {
        sample.labels["outcome"]: sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "octavo_requests_total" and sample.value
    }


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (CancelledError("x"), "cancelled"),
        (asyncio.CancelledError(), "cancelled"),
        (GeneratorExit(), "cancelled"),
        (DeadlineError("x"), "deadline"),
        (ContextLengthError("x"), "rejected"),
        (AuthenticationError("x"), "rejected"),
        (ModelNotFoundError("x"), "rejected"),
        (RequestTooLargeError("x"), "rejected"),
        (OverloadedError("x"), "rejected"),
        (UnavailableError("x", retry_after_ms=5), "rejected"),
        (UnavailableError("x"), "error"),
        (OctavoError("x"), "error"),
        (ZeroDivisionError(), "error"),
    ],
)
def test_each_error_has_an_outcome(error: BaseException, outcome: str) -> None:
    assert outcome_of(error) == outcome
    assert outcome in OUTCOMES
    metrics = RouterMetrics(CollectorRegistry())
    record = RequestRecord(metrics, Endpoint.CHAT)
    with pytest.raises(type(error)), record:
        raise error
    # What comes later changes nothing.
    record.end("stop")
    record.fail(ZeroDivisionError())
    assert outcomes(metrics) == {outcome: 1}


@pytest.mark.parametrize(
    ("finishes", "outcome"),
    [
        ([Finish.STOP], "stop"),
        ([Finish.LENGTH], "length"),
        ([Finish.STOP, Finish.LENGTH, Finish.STOP], "length"),
    ],
)
def test_good_ends(finishes: list[Finish], outcome: str) -> None:
    metrics = RouterMetrics(CollectorRegistry())
    record = RequestRecord(metrics, Endpoint.CHAT)
    text = generate_latest(metrics.registry).decode()
    assert "octavo_requests_in_flight 1.0" in text
    record.tokens(3, 1)
    record.finish(finishes)
    assert outcomes(metrics) == {outcome: 1}
    text = generate_latest(metrics.registry).decode()
    assert "octavo_requests_in_flight 0.0" in text
    assert "octavo_generation_tokens_total 3.0" in text
    assert "octavo_time_to_first_token_seconds_count 1.0" in text


def test_inter_token_times_are_a_histogram() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    values = [0.0004, 0.0005, 0.0011, 0.3, 1000.0]
    for value in values:
        metrics.inter_token.observe(value)
    found: dict[str, Any] = {}
    for family in metrics.registry.collect():
        if family.name == "octavo_inter_token_latency_seconds":
            assert family.type == "histogram"
            for sample in family.samples:
                found[sample.labels.get("le", sample.name)] = sample.value
    assert found["octavo_inter_token_latency_seconds_count"] == 5
    assert found["octavo_inter_token_latency_seconds_sum"] == pytest.approx(sum(values))
    # A value on a bound belongs below it, as in every Prometheus histogram.
    for bound in LATENCY_BUCKETS_S:
        assert found[str(bound)] == sum(value <= bound for value in values)
    assert found["+Inf"] == 5
