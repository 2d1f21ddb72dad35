"""When running rows make room."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_scheduler.members import Members
from octavo_scheduler.outlook import Outlook
from tests.fakes.fake_device import FakeSize
from tests.fakes.simulated_cell import SimulatedCell, prompt_of


def left(*shares: float) -> Outlook:
    return Outlook(left=np.sort(np.array(shares)))


def test_rows_spread_evenly_are_an_even_queue() -> None:
    even = left(*((i + 0.5) / 16 for i in range(16)))
    for num_ahead in (1, 5, 16, 40):
        assert even.bunching(num_ahead) == pytest.approx(1.0, rel=0.6 / num_ahead)


def test_rows_that_began_together_end_together() -> None:
    begun = left(*[1.0] * 16)
    # 4 are as many as leave an even queue in a quarter of the time.
    assert begun.bunching(4) == 4.0
    assert begun.bunching(16) == 2.0
    assert left(*[0.1] * 16).bunching(16) == pytest.approx(1.1)
    # Rows that seem to end soon are no promise.
    assert left(*[0.1] * 16).bunching(4) == 1.0


@given(
    st.lists(st.floats(0.0, 1.0), max_size=20),
    st.integers(0, 100),
)
def test_it_is_off_by_a_turn_of_the_rows_at_most(shares: list[float], num_ahead: int) -> None:
    bunching = left(*shares).bunching(num_ahead)
    assert bunching >= 1.0
    assert bunching * num_ahead <= num_ahead + len(shares) + 1e-9


def test_the_slower_of_prefill_and_rows_drains_the_queue() -> None:
    outlook = Outlook(tokens_per_s=1000.0, rows_per_s=10.0)
    assert outlook.drain_tokens_per_s(50.0) == 500.0
    assert outlook.drain_tokens_per_s(500.0) == 1000.0
    assert Outlook(rows_per_s=10.0).drain_tokens_per_s(50.0) == 500.0
    assert Outlook().drain_tokens_per_s(50.0) == 0.0


def test_rows_count_once_none_is_free() -> None:
    sim = SimulatedCell(FakeSize(max_num_seqs=4), num_workers=2)
    members = sim.cell.members
    assert Members().outlook().drain_tokens_per_s(20.0) == 0.0
    # Answers of 40 tokens; the first worker is full after four.
    for i in range(7):
        sim.submit(prompt_of(20, seed=i), 40)
    for _ in range(8):
        sim.step()
    assert not members.outlook().left.size
    sim.submit(prompt_of(20, seed=7), 40)
    for _ in range(12):
        sim.step()
    outlook = members.outlook()
    assert outlook.left.tolist() == sorted(outlook.left.tolist())
    assert outlook.left.size == 8
    # Steps of 1 ms; the last one to come has the most before it.
    assert outlook.rows_per_s == pytest.approx(8 / (40 * 0.001), rel=0.05)
    assert 0.3 < outlook.left[0] < outlook.left[-1] < 0.9
    assert outlook.tokens_per_s == pytest.approx(2 / outlook.worker_token_s)
    sim.run()
