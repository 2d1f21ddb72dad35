"""What rows will need: learned lengths, and the most at once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from octavo_scheduler.growth import OutputLengths, peak_blocks

BLOCK = 16


def test_lengths_are_learned_as_a_share_of_what_is_allowed() -> None:
    lengths = OutputLengths()
    assert lengths.expect(100) == 100
    for _ in range(200):
        lengths.observe(50, 100)
    assert 50 <= lengths.expect(100) <= 52
    # Open-ended requests among them: no longer than twice the usual.
    assert lengths.expect(100_000) <= 102
    for _ in range(400):
        lengths.observe(200, 200)
    assert lengths.expect(200) == 200
    lengths.observe(0, 0)
    assert lengths.expect(0) == 0


def exact_peak(rows: list[tuple[int, int]]) -> int:
    """Of rows (remaining, returned) without slack: step by step."""
    most = 0
    for now in range(max((remaining for remaining, _ in rows), default=0) + 1):
        grown = sum(-(-now // BLOCK) for remaining, _ in rows if remaining >= now)
        left = sum(returned for remaining, returned in rows if remaining < now)
        most = max(most, grown - left)
    return most


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 20)), max_size=12))
def test_the_peak_is_that_of_a_step_by_step_account(rows: list[tuple[int, int]]) -> None:
    remaining = np.array([r for r, _ in rows], np.int64)
    returned = np.array([r for _, r in rows], np.int64)
    peak = peak_blocks(remaining, np.zeros(len(rows), np.int64), returned, BLOCK)
    # Half a block a row is a mean.
    assert abs(peak - exact_peak(rows)) <= len(rows) / 2 + 1


def test_slack_and_ends_lower_the_peak() -> None:
    remaining = np.array([160, 16], np.int64)
    none = np.zeros(2, np.int64)
    together = peak_blocks(remaining, none, none, BLOCK)
    assert peak_blocks(remaining, np.array([16, 16]), none, BLOCK) < together
    assert peak_blocks(remaining, none, np.array([0, 5]), BLOCK) < together
    assert peak_blocks(none[:0], none[:0], none[:0], BLOCK) == 0
