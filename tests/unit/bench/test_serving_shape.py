"""What the serving shape sends, and when."""

from itertools import islice
from pathlib import Path

import pytest

from octavo.errors import ConfigurationError
from tests.bench.serving_shape import ServingShape, parse


def test_lengths_are_recorded_ones_that_the_model_can_hold(tiny_folder: Path) -> None:
    shape, _ = parse([str(tiny_folder), "--scale", "0.1", "--preset", "throughput"])
    assert shape.options.scheduler.preset == "throughput"
    assert shape.fractions == (0.5, 0.8, 0.95)
    assert len(shape.lengths) > 19_000
    prompts, answers = shape.mean_lengths
    assert (prompts, answers) == (pytest.approx(115.5, rel=0.01), pytest.approx(21.1, rel=0.01))
    assert list(islice(shape.drawn(3), 50)) == list(islice(shape.drawn(3), 50))
    short, _ = parse([str(tiny_folder), "--max-model-len", "200"])
    assert max(map(sum, short.lengths)) < 200


def test_arrivals_are_a_poisson_process_of_requests_that_share_nothing(tiny_folder: Path) -> None:
    shape, _ = parse([str(tiny_folder), "--scale", "0.1", "--seconds", "200"])
    served = ServingShape(shape, None, None)  # type: ignore[arg-type]
    first, second = served._arrivals(5.0, 1), served._arrivals(10.0, 2)
    assert len(first) == pytest.approx(1000, rel=0.15)
    assert len(second) == pytest.approx(2000, rel=0.15)
    for arrivals in (first, second):
        due_s = [arrival.due_s or 0.0 for arrival in arrivals]
        assert due_s == sorted(due_s)
        assert 0 < due_s[0] < due_s[-1] < 200
    numbers = [arrival.index for arrival in (*first, *second)]
    assert len(set(numbers)) == len(numbers)


def test_a_load_without_any_window_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--seconds 4\.0"):
        parse([str(tiny_folder), "--seconds", "4"])
