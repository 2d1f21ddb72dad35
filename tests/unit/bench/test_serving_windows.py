"""What counts in a window of a load that goes on."""

from array import array

import pytest

from octavo.cli.measurement import RequestTiming
from octavo.cli.serve_client import Outcome
from tests.bench.serving_windows import Slo, Stream, Window

SLO = Slo(ttft_ms=1000.0, tpot_ms=200.0)


def stream(
    due_s: float,
    times_s: tuple[float, ...] = (),
    *,
    num_prompt_tokens: int = 100,
    num_tokens: int = 0,
    error: str | None = None,
) -> Stream:
    return Stream(due_s, 0.0, num_prompt_tokens, array("d", times_s), num_tokens, error)


def test_an_outcome_is_followed_while_it_runs() -> None:
    timing = RequestTiming(7, 1.0)
    outcome = Outcome(timing, lag_s=0.25)
    assert Stream.of(outcome, is_over=False) == stream(1.0, num_prompt_tokens=7)._replace(
        lag_s=0.25
    )
    for now_s in (2.0, 2.5, 4.0):
        timing.frame(now_s)
    assert list(Stream.of(outcome, is_over=False).times_s) == [2.0, 2.5, 4.0]
    timing.num_output_tokens = 5
    assert Stream.of(outcome, is_over=False).num_tokens == 0
    assert Stream.of(outcome, is_over=True).num_tokens == 5
    outcome.error = "broken off"
    assert Stream.of(outcome, is_over=True).num_tokens == 0


def test_first_tokens_count_by_when_requests_were_due() -> None:
    streams = [
        stream(9.9, (10.5,)),  # before
        stream(10.0, (10.4, 10.6)),
        stream(19.0, (20.5,)),  # its first token came after the window's end, and was seen
        stream(18.0),  # it still waits
        stream(12.0, error="http 429"),
        stream(20.0, (20.1,)),  # after
    ]
    window = Window(streams, 10.0, 20.0, seen_s=21.0)
    assert sorted(window.ttfts_s()) == pytest.approx([0.4, 1.5, 3.0])
    record = window.to_record(SLO)
    assert (record["num_requests"], record["num_waiting"]) == (4, 1)
    assert record["errors"] == {"http 429": 1}
    assert record["good_fraction"] == 0.25
    assert record["goodput_req_s"] == 0.1


def test_gaps_count_by_when_their_later_frame_came() -> None:
    streams = [stream(1.0, (9.0, 10.5, 11.0, 25.0)), stream(12.0, (13.0, 13.25, 20.0))]
    window = Window(streams, 10.0, 20.0, seen_s=20.0)
    assert sorted(window.gaps_s()) == [0.25, 0.5, 1.5]
    record = window.to_record(SLO)
    assert (record["num_gaps"], record["itl_p99_over_p50"]) == (3, 3.0)
    assert Window([], 10.0, 20.0, 20.0).to_record(SLO)["itl_p99_over_p50"] is None


def test_a_slow_stream_is_not_good() -> None:
    fast, slow = stream(10.0, (10.5, 10.75, 10.875)), stream(10.0, (10.5, 10.75, 11.0))
    assert Window([fast, slow], 10.0, 20.0, 20.0).num_good(SLO) == 1


def test_capacity_is_what_prompts_and_answers_say() -> None:
    """Ten seconds with 20 prompts of 100 tokens begun, and 400 frames of 1.5 tokens."""
    whole = stream(1.0, (5.0, 6.0), num_tokens=3)
    streams = [whole] + [
        stream(9.0, tuple(10.0 + 0.25 * (i + 1) for i in range(20))) for _ in range(20)
    ]
    window = Window(streams, 10.0, 20.0, 20.0)
    assert window.tokens_per_frame() == 1.5
    assert window.prompt_tokens_per_s() == 200.0
    assert window.output_tokens_per_s() == 60.0
    assert window.requests_per_s(100.0, 20.0) == pytest.approx((2.0 + 3.0) / 2)
