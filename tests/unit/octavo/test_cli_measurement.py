"""octavo.cli.measurement, percentiles and step_report: what a run took, from its times."""

import json
import random

import pytest
from prometheus_client import CollectorRegistry

from octavo.cli.measurement import RequestTiming, Run, make_record
from octavo.cli.percentiles import percentiles
from octavo.cli.service_readings import read_histograms
from octavo.cli.step_report import OF_SCHEDULERS, OF_WORKERS, Histogram, StepReport
from octavo.metrics import SchedulerMetrics, WorkerMetrics
from octavo.metrics_http import exposition


def test_percentiles_are_values_that_occurred() -> None:
    assert percentiles([]) == {}
    assert percentiles([5.0]) == {"p50": 5.0, "p90": 5.0, "p99": 5.0}
    values = [float(value) for value in range(1, 101)]
    random.Random(1).shuffle(values)
    assert percentiles(values) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}


def run_of_two() -> Run:
    first = RequestTiming(10, 100.0)
    for now in (100.5, 100.6, 101.0):
        first.frame(now)
    first.num_output_tokens = 4
    second = RequestTiming(20, 100.0, num_output_tokens=1, num_cached_tokens=16)
    second.frame(102.0)
    return Run((first, second))


def test_a_run_is_timed_from_first_submit_to_last_token() -> None:
    run = run_of_two()
    assert run.wall_s == pytest.approx(2.0)
    assert (run.num_prompt_tokens, run.num_output_tokens, run.num_cached_tokens) == (30, 5, 16)
    assert run.ttft_ms == {"p50": 500.0, "p90": 2000.0, "p99": 2000.0}
    assert run.itl_ms == {"p50": 100.0, "p90": 400.0, "p99": 400.0}
    record = make_record(run, {"workload": "bs1"}, 1.0)
    assert (record["out_tok_s"], record["in_tok_s"]) == (2.5, 15.0)
    assert record["limit_fraction"] == 0.5
    assert make_record(run, {}, None)["limit_fraction"] is None
    assert json.loads(json.dumps(record)) == record


def test_a_quantile_is_found_between_bounds() -> None:
    """As Prometheus does it: ten values, of which eight are in (1, 2] and one above 4."""
    values = Histogram((1.0, 2.0, 4.0, float("inf")), (1, 8, 0, 1), 25.0)
    assert values.quantile(0.5) == 1 + 4 / 8
    assert values.quantile(0.9) == 2.0
    # What lies above all bounds is at least the last one.
    assert values.quantile(0.99) == 4.0
    assert values.with_others([values]).quantile(0.5) == 1.5
    assert values.with_others([values]).since(values) == values


def test_steps_are_reported_alike_from_each_and_from_histograms() -> None:
    assert StepReport.of_steps([1000, 3000], [0, 1000], [50, 7000]).to_record() == {
        "num_steps": 2,
        "step_ms": {"mean": 2.0, "p50": 1.0, "p90": 3.0, "p99": 3.0},
        "idle_fraction": 0.2,
        "plan_launch_ms": {},
        "worst_launch_ms": 7.0,
        "scheduler_ms": None,
    }
    metrics = WorkerMetrics(CollectorRegistry())
    scheduler = SchedulerMetrics(CollectorRegistry())

    def read() -> dict[str, Histogram]:
        pages = [exposition(item.registry, "")[0].decode() for item in (metrics, scheduler)]
        of_workers = read_histograms(pages[0], OF_WORKERS)
        return of_workers | read_histograms(pages[1], OF_SCHEDULERS)

    metrics.step_time.observe(9.0)
    before = read()
    for step_s, gap_s in ((0.001, 0.0), (0.003, 0.001)):
        metrics.step_time.observe(step_s)
        metrics.step_gap.observe(gap_s)
    for _ in range(200):
        metrics.plan_launch.observe(0.00006)
    metrics.plan_launch.observe(0.03)
    metrics.step_launch.observe(0.0003)
    metrics.step_launch.observe(0.07)
    scheduler.plan_time.observe(0.0002)
    scheduler.result_time.observe(0.0004)
    assert read().keys() == {*OF_WORKERS, *OF_SCHEDULERS}
    report = StepReport.of_histograms({n: h.since(before[n]) for n, h in read().items()})
    assert (report.num_steps, report.step_ms, report.idle_fraction) == (2, {"mean": 2.0}, 0.2)
    assert report.scheduler_ms == 0.3
    # All but one in 201 within the first bucket, which ends at a tenth of a millisecond.
    assert report.plan_launch_ms["p99"] <= 0.1
    # Where a bucket ends in which the longest launch lies.
    assert report.worst_launch_ms == 100.0
    nothing = StepReport.of_histograms({n: h.since(read()[n]) for n, h in read().items()})
    assert nothing == StepReport(0, {}, 0.0)
