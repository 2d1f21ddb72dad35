"""What steps cost, learned from measured ones."""

import random

import pytest

from octavo_scheduler.step_cost import NO_CHUNKS, ChunkWork, StepCost


def chunk(length: int, start: int = 0) -> ChunkWork:
    return ChunkWork.of(start, length)


def test_short_chunks_do_not_spoil_the_cost_of_a_token() -> None:
    cost = StepCost()
    cost.observe(0.010, 4)
    cost.observe(0.015, 4, chunk(5))  # a fixed 5 ms, whatever the chunk
    for _ in range(3):
        cost.observe(0.115, 4, chunk(1000))
    assert cost.prefill_token_s < 1.1e-4


def test_what_a_row_costs_is_the_slope_of_recent_steps() -> None:
    cost = StepCost()
    for _ in range(20):
        cost.observe(0.010, 8)
    assert cost.row_s == 0.0, "the same rows all the time tell nothing"
    for rows in (1, 2, 4, 8, 16, 32):
        cost.observe(0.005 + 0.001 * rows, rows)
        cost.observe(0.5, rows, chunk(1000))  # chunks say nothing of rows
    assert 0.0008 < cost.row_s < 0.0012
    for rows in range(300):
        cost.observe(0.005, 1 + rows % 30)
    assert cost.row_s < 0.0002, "what is long ago is forgotten"
    falling = StepCost()
    for rows in (1, 2, 3):
        falling.observe(0.01 / rows, rows)
    assert falling.row_s == 0.0


def test_a_decode_step_of_other_rows_is_read_off_the_line() -> None:
    cost = StepCost()
    assert cost.decode_step_s(8) == 0.0, "nothing was measured"
    cost.observe(0.007, 8)
    assert cost.decode_step_s(8) == cost.decode_step_s(200) == pytest.approx(0.007)
    for rows in range(10, 50):
        cost.observe(0.005 + 5e-5 * rows, rows)
    assert cost.decode_step_s(80) == pytest.approx(0.009, rel=0.05)
    # Far from all that was seen it isn't trusted.
    assert cost.decode_step_s(10_000) < 0.02


def test_steps_that_compute_nothing_are_no_decode_steps() -> None:
    cost = StepCost()
    cost.observe(0.010, 8)
    for _ in range(100):
        cost.observe(1e-5, 0)
        cost.observe(0.0, 8)
    assert cost.decode_s == cost.decode_step_s(8) == 0.010


def test_chunks_beside_streams_are_sized_by_such_chunks() -> None:
    """A step that only prefills computes at its best; beside decode rows each token takes more."""
    cost = StepCost()
    cost.observe(0.008, 32)
    cost.observe(0.200, 0, chunk(8000))
    assert cost.chunk_tokens_within(0.010, 0) == pytest.approx(417, abs=1)
    for _ in range(30):
        cost.observe(0.008 + 50e-6 * 300, 32, chunk(300))
        cost.observe(0.200, 0, chunk(8000))
    assert cost.chunk_tokens_within(0.010, 0) == pytest.approx(200, abs=1)


def test_lengths_settle_where_chunks_last_as_long_as_they_may() -> None:
    """Whatever a chunk costs at any length: here 3 ms, and 20 µs a token from 100 on."""
    source = random.Random(0)
    cost, length = StepCost(), 64
    for _ in range(200):
        extra_s = 0.003 + 20e-6 * max(0, length - 100)
        cost.observe(0.008 * source.uniform(0.97, 1.03), 32)
        cost.observe(0.008 + extra_s, 32, chunk(length))
        length = cost.chunk_tokens_within(0.012, 0) or 64
    assert length == pytest.approx(550, rel=0.05)


def test_prompts_of_all_lengths_tell_tokens_from_pairs() -> None:
    source = random.Random(1)
    cost = StepCost()
    cost.observe(0.008, 32)
    for _ in range(100):
        work = NO_CHUNKS
        for _ in range(source.randint(1, 3)):
            work = work.plus(chunk(source.randint(1, 300), source.choice((0, 0, 2000, 6000))))
        step_s = 0.008 + 25e-6 * work.num_tokens + 2e-9 * work.num_pairs
        cost.observe(step_s * source.uniform(0.99, 1.01), 32, work)
    for context in (0, 3000, 12_000):
        length = cost.chunk_tokens_within(0.012, context)
        assert length is not None
        work = chunk(length, context)
        took_s = 25e-6 * work.num_tokens + 2e-9 * work.num_pairs
        assert took_s == pytest.approx(0.012, rel=0.1)


@pytest.mark.parametrize(("num_long", "expected_s"), [(1, 0.008), (5, 0.008), (8, 0.020)])
def test_long_steps_are_usual_once_most_are(num_long: int, expected_s: float) -> None:
    """Of each ten steps beside streams so many have a chunk; steps without streams don't count."""
    cost = StepCost()
    for _ in range(200):
        for i in range(10):
            if i < num_long:
                cost.observe(0.020, 32, chunk(500))
            else:
                cost.observe(0.008, 32)
            cost.observe(0.200, 0, chunk(8000))
    assert cost.usual_s == pytest.approx(expected_s, rel=0.06)


def test_one_stall_is_soon_forgotten() -> None:
    cost = StepCost()
    cost.observe(0.008, 32)
    lengths: list[int] = []
    for i in range(60):
        length = max(64, cost.chunk_tokens_within(0.012, 0) or 0)
        cost.observe(3.0 if i == 20 else 0.008 + 25e-6 * length, 32, chunk(length))
        lengths.append(length)
    assert min(lengths[1:]) > 350
    assert lengths[-1] == pytest.approx(480, rel=0.05)
