"""How fast a queue drains."""

import pytest

from octavo_scheduler.pace import Pace


def test_a_full_queue_is_measured() -> None:
    pace = Pace()
    pace.fill(100.0)
    for i in range(1, 400):
        pace.serve(100.0 + i / 10, 50)
    assert pace.tokens_per_s == pytest.approx(500, rel=0.02)
    # It slows down: what is old fades.
    for i in range(1, 100):
        pace.serve(140.0 + i, 50)
    assert pace.tokens_per_s == pytest.approx(50, rel=0.1)


def test_a_queue_that_is_soon_empty_says_nothing() -> None:
    pace = Pace()
    for i in range(1000):
        pace.fill(i)
        pace.serve(i + 0.05, 1_000_000)
        pace.empty()
        pace.serve(i + 0.5, 1_000_000)
    assert pace.tokens_per_s == 0.0


def test_a_short_measurement_foretells_no_long_wait() -> None:
    """One short prompt passed long ones, while one before them all was computed for a second."""
    pace = Pace()
    assert pace.wait_s(1000, 500.0) == 2.0, "not measured yet"
    pace.fill(100.0)
    pace.serve(101.0, 2)
    assert pace.tokens_per_s == pytest.approx(2 / 0.9)
    assert pace.wait_s(6000, 500.0) == pytest.approx(18.0)
    for i in range(2, 12):
        pace.serve(100.0 + i, 2)
    assert pace.wait_s(6000, 500.0) == pytest.approx(3000, rel=0.1), "it goes on like that"
