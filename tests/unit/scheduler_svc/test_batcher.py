"""Batch decisions as properties."""

from hypothesis import given
from hypothesis import strategies as st

from octavo_scheduler.batcher import (
    BatchLimits,
    StepCost,
    admission_room,
    can_lease,
    choose_victim,
    chunk_budget,
    lease_end,
    share_budget,
)

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
    step_ms=st.floats(0.1, 200.0),
    token_us=st.floats(1.0, 5000.0),
)
def test_every_step_leaves_room_for_a_least_chunk(
    rows: int, batched: int, min_chunk: int, target_ms: float, step_ms: float, token_us: float
) -> None:
    limits = BatchLimits.of(rows, batched, min_chunk, target_ms / 1000)
    cost = StepCost()
    cost.observe(step_ms / 1000, 0, 4)
    cost.observe(step_ms / 1000 + token_us * 1e-6 * 100, 100, 4)
    for num_decoding in (0, 1, limits.max_num_seqs):
        budget = chunk_budget(limits, num_decoding, cost)
        assert limits.min_chunk_tokens <= budget <= batched - num_decoding


def test_the_target_bounds_a_chunk_only_while_rows_decode() -> None:
    limits = BatchLimits.of(256, 8192, 64, itl_target_s=0.05)
    cost = StepCost()
    cost.observe(0.010, 0, 4)
    cost.observe(0.030, 1000, 4)  # 20 µs a token on top of a decode step
    assert chunk_budget(limits, 0, cost) == 8192
    assert chunk_budget(limits, 8, cost) == 2000
    assert chunk_budget(BatchLimits.of(256, 8192, 64), 8, cost) == 8184


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


def test_short_chunks_do_not_spoil_the_cost_of_a_token() -> None:
    cost = StepCost()
    cost.observe(0.010, 0, 4)
    cost.observe(0.015, 5, 4)  # a fixed 5 ms, whatever the chunk
    for _ in range(3):
        cost.observe(0.115, 1000, 4)
    assert cost.prefill_token_s < 1.1e-4


def test_what_a_row_costs_is_the_slope_of_recent_steps() -> None:
    cost = StepCost()
    for _ in range(20):
        cost.observe(0.010, 0, 8)
    assert cost.row_s == 0.0, "the same rows all the time tell nothing"
    for rows in (1, 2, 4, 8, 16, 32):
        cost.observe(0.005 + 0.001 * rows, 0, rows)
        cost.observe(0.5, 1000, rows)  # chunks say nothing of rows
    assert 0.0008 < cost.row_s < 0.0012
    for rows in range(300):
        cost.observe(0.005, 0, rows % 30)
    assert cost.row_s < 0.0002, "what is long ago is forgotten"
    falling = StepCost()
    for rows in (1, 2, 3):
        falling.observe(0.01 / rows, 0, rows)
    assert falling.row_s == 0.0
