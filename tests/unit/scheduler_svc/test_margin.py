"""How much of a bound is kept for what is not foreseen."""

from random import Random

import numpy as np
import pytest

from octavo_scheduler.margin import Margin

BOUND_S = 10.0


def test_a_quarter_of_the_bound_is_kept_until_a_minute_was_seen() -> None:
    margin = Margin(BOUND_S)
    assert margin.seconds == 2.5
    # However many err alike in one moment.
    for i in range(3000):
        margin.add(i * 0.01, -1.0)
    assert margin.seconds == 2.5
    for i in range(300, 1000):
        margin.add(i * 0.1, -1.0)
    assert margin.seconds == 0.0
    # Now and then is not seen.
    rare = Margin(BOUND_S)
    for i in range(1000):
        rare.add(i * 10.0, -1.0)
    assert rare.seconds == 2.5


def test_nearly_all_errors_are_within_it() -> None:
    rng, margin = Random(0), Margin(BOUND_S)
    errors_s = [rng.gauss(0.5, 1.0) for _ in range(4000)]
    for i, error_s in enumerate(errors_s):
        margin.add(i * 0.03, error_s)
    assert margin.seconds == pytest.approx(np.percentile(errors_s, 99.5), abs=0.3)
    assert np.mean(np.array(errors_s) > margin.seconds) <= 0.006


def test_it_widens_at_once_and_forgets_in_minutes() -> None:
    margin = Margin(BOUND_S)
    for i in range(1000):
        margin.add(i * 0.1, 0.1)
    assert margin.seconds < 0.2
    for i in range(10):
        margin.add(100.0 + i, 4.0)
    assert margin.seconds == pytest.approx(4.0, abs=0.1)
    for i in range(10_000):
        margin.add(110.0 + 0.1 * i, 0.1)
    assert margin.seconds < 0.2


def test_half_of_the_bound_is_the_most_that_it_takes() -> None:
    margin = Margin(BOUND_S)
    for i in range(100):
        margin.add(float(i), 1e6)
    assert margin.seconds == 5.0


def test_after_a_day_without_errors_it_begins_again() -> None:
    margin = Margin(BOUND_S)
    for i in range(1000):
        margin.add(0.1 * i, 0.1)
    margin.add(1e5, 0.1)
    assert margin.seconds == 2.5
