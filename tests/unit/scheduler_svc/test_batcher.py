"""Batch decisions as properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_scheduler.batcher import (
    BatchLimits,
    admission_room,
    can_lease,
    choose_victim,
    chunk_budget,
    lease_end,
    share_budget,
    step_target_s,
)
from octavo_scheduler.step_cost import ChunkWork, StepCost

REMAINING = st.lists(st.integers(1, 600), max_size=30)


@given(budget=st.integers(0, 2000), remaining=REMAINING, min_chunk=st.integers(1, 128))
def test_shares_fit_and_the_first_is_sure_of_its_chunk(
    budget: int, remaining: list[int], min_chunk: int
) -> None:
    chunks = share_budget(budget, remaining, min_chunk)
    assert len(chunks) == len(remaining)
    assert sum(chunks) <= budget
    assert all(0 <= chunk <= left for chunk, left in zip(chunks, remaining, strict=True))
    if remaining:
        assert chunks[0] >= min(budget, min_chunk, remaining[0])
    for chunk, left in list(zip(chunks, remaining, strict=True))[1:]:
        assert chunk == 0 or chunk == left or chunk >= min_chunk


@given(budget=st.integers(64, 2000), remaining=REMAINING)
def test_no_budget_is_wasted_while_a_worthwhile_chunk_is_left(
    budget: int, remaining: list[int]
) -> None:
    chunks = share_budget(budget, remaining, 64)
    left = budget - sum(chunks)
    open_rows = [
        rest - chunk for chunk, rest in zip(chunks, remaining, strict=True) if chunk < rest
    ]
    assert not open_rows or left < 64


@given(num_long=st.integers(1, 20), short=st.integers(1, 64))
def test_a_short_prompt_doesnt_wait_for_long_ones(num_long: int, short: int) -> None:
    chunks = share_budget(512, [400] * num_long + [short], 64)
    assert chunks[-1] == short


@given(budget=st.integers(1, 1000), remaining=REMAINING, tokens=st.integers(1, 600))
def test_an_accepted_newcomer_gets_a_chunk(budget: int, remaining: list[int], tokens: int) -> None:
    if not admission_room(budget, remaining, 64).accepts(tokens, 64):
        return
    chunk = share_budget(budget, [*remaining, tokens], 64)[-1]
    assert chunk >= min(tokens, 64, budget)


@given(
    rows=st.integers(1, 4096),
    batched=st.integers(2, 16_384),
    min_chunk=st.integers(1, 256),
    target_ms=st.sampled_from([0.0, 10.0, 50.0]),
    stretch=st.sampled_from([0.0, 0.5, 2.5]),
    step_ms=st.floats(0.1, 200.0),
    token_us=st.floats(1.0, 5000.0),
)
def test_every_step_leaves_room_for_a_least_chunk(
    rows: int,
    batched: int,
    min_chunk: int,
    target_ms: float,
    stretch: float,
    step_ms: float,
    token_us: float,
) -> None:
    limits = BatchLimits.of(rows, batched, min_chunk, target_ms / 1000, itl_stretch=stretch)
    cost = StepCost()
    cost.observe(step_ms / 1000, 4)
    cost.observe(step_ms / 1000 + token_us * 1e-6 * 100, 4, ChunkWork.of(0, 100))
    for num_decoding in (0, 1, limits.max_num_seqs):
        budget = chunk_budget(limits, num_decoding, cost)
        assert limits.min_chunk_tokens <= budget <= batched - num_decoding


def measured() -> StepCost:
    """A decode step of 4 rows takes 10 ms, a prompt token 20 µs on top."""
    cost = StepCost()
    cost.observe(0.010, 4)
    cost.observe(0.030, 4, ChunkWork.of(0, 1000))
    return cost


def test_the_target_bounds_a_chunk_only_while_rows_decode() -> None:
    limits = BatchLimits.of(256, 8192, 64, itl_target_s=0.05)
    assert chunk_budget(limits, 0, measured()) == 8192
    assert chunk_budget(limits, 8, measured()) == pytest.approx(2000, abs=1)
    assert chunk_budget(BatchLimits.of(256, 8192, 64), 8, measured()) == 8184


def test_a_stretch_bounds_a_chunk_by_decode_steps() -> None:
    limits = BatchLimits.of(256, 8192, 64, itl_stretch=2.5)
    assert chunk_budget(limits, 0, measured()) == 8192
    assert chunk_budget(limits, 4, measured()) == pytest.approx(750, rel=0.01)
    assert chunk_budget(limits, 4, StepCost()) == 8188, "nothing was measured yet"


def test_the_shorter_of_target_and_stretch_counts_and_nobody_sees_10_ms() -> None:
    both = BatchLimits.of(256, 8192, 64, itl_target_s=0.05, itl_stretch=2.5)
    assert step_target_s(both, 0.008) == pytest.approx(0.020)
    assert step_target_s(both, 0.030) == pytest.approx(0.050)
    assert step_target_s(both, 0.001) == pytest.approx(0.010)
    assert step_target_s(BatchLimits.of(256, 8192, 64, itl_target_s=0.005), 0.001) == 0.005
    assert step_target_s(BatchLimits.of(256, 8192, 64), 0.008) == 0.0


def test_a_chunk_far_into_its_prompt_is_shorter() -> None:
    limits = BatchLimits.of(256, 8192, 64, itl_stretch=2.5)
    cost = StepCost()
    cost.observe(0.010, 4)
    for start in range(0, 8000, 400):  # the 10,000 tokens before it double a token's 20 µs
        work = ChunkWork.of(start, 400)
        cost.observe(0.010 + 20e-6 * work.num_tokens + 2e-9 * work.num_pairs, 4, work)
        cost.observe(0.010, 4)
    for context in (0, 4000, 8000):
        chunk = ChunkWork.of(context, chunk_budget(limits, 4, cost, context))
        step_s = 0.010 + 20e-6 * chunk.num_tokens + 2e-9 * chunk.num_pairs
        assert step_s == pytest.approx(0.025, rel=0.02)


def test_while_most_steps_have_chunks_these_may_grow_by_a_third() -> None:
    """Streams are used to them, and what waits is computed at last; but gaps stay near others."""
    limits = BatchLimits.of(256, 8192, 64, itl_target_s=0.05, itl_stretch=2.5)
    cost = measured()
    lengths: list[int] = []
    for _ in range(1000):
        lengths.append(chunk_budget(limits, 4, cost))
        cost.observe(0.010 + 20e-6 * lengths[-1], 4, ChunkWork.of(0, lengths[-1]))
    assert lengths[0] < lengths[50] < lengths[-1]
    assert 0.010 + 20e-6 * lengths[-1] == pytest.approx(2.5 * 4 / 3 * 0.010, rel=0.01)
    for _ in range(1000):
        cost.observe(0.010, 4)
    assert chunk_budget(limits, 4, cost) == pytest.approx(lengths[0], rel=0.01)


ORDER = st.tuples(st.integers(-2, 2), st.integers(0, 50), st.just(0))


@given(orders=st.lists(ORDER, min_size=1, max_size=20, unique=True), data=st.data())
def test_a_victim_goes_after_the_needy_and_the_first_always_finds_one(
    orders: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    counts = [data.draw(st.integers(0, 4)) for _ in orders]
    candidates = list(zip(orders, counts, strict=True))
    needy = data.draw(st.sampled_from(orders))
    choice = choose_victim(candidates, needy, 3)
    if choice is not None:
        assert orders[choice] > needy
        assert counts[choice] < 3 or needy == min(orders)
    elif needy == min(orders):
        assert len(orders) == 1
    else:
        assert all(count >= 3 for order, count in candidates if order > needy)


@given(last=st.integers(0, 1000), ahead=st.integers(0, 40), steps=st.integers(3, 64))
def test_a_lease_reaches_beyond_what_is_covered(last: int, ahead: int, steps: int) -> None:
    limits = BatchLimits.of(16, 512, 64, lease_steps=steps)
    end = lease_end(limits, last, last + ahead)
    assert end > last + ahead
    assert end >= last + steps


def test_leases_need_ample_room() -> None:
    limits = BatchLimits.of(64, 512, 64, lease_steps=8)
    assert can_lease(limits, num_decoding=16, num_free=64, block_size=16)
    assert not can_lease(limits, num_decoding=17, num_free=64, block_size=16)
    assert not can_lease(BatchLimits.of(64, 512, 64), 1, 1000, 16)
