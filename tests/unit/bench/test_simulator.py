"""tests.bench.simulator: virtual fleets, what they show, and that they survive troubles."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from octavo.settings import SchedulerSettings
from octavo_scheduler.sequence import FinishReason
from tests.bench.simulator.device import Cost
from tests.bench.simulator.experiment import (
    COST,
    SETTINGS,
    Findings,
    flood,
    simulate,
    workload_of,
)
from tests.bench.simulator.fleet import Fleet, Shape, Trouble
from tests.bench.simulator.workload import (
    CHAT_BLOCK_TOKENS,
    SimRequest,
    Workload,
    poisson,
    recorded,
    steady,
    together,
)

ONE_CELL = Shape(num_routers=1, num_cells=1, workers_per_cell=8)
FOUR_CELLS = Shape(num_routers=4, num_cells=4, workers_per_cell=2)
# An H200 with 8B parameters in bf16: weights and KV are read, attention looks back.
H200_8B = Cost(
    prefill_tokens_per_s=41_000,
    prompt_s=0,
    decode_s=0.0052,
    row_s=41e-6,
    pair_s=1.75e-9,
    mixed_s=0.002,
    num_blocks=50_000,
    is_serial=True,
)
# Loaded like the whole trace, and short.
SHARE = 0.05


def run(name: str, shape: Shape, share: float = 1.0) -> Findings:
    workload, cost, ceiling = workload_of(name, share=share)
    found = simulate(workload, shape, cost, ceiling)
    print(found.summary())
    assert all(outcome.reason is FinishReason.LENGTH for outcome in found.outcomes)
    return found


def test_the_ceiling_is_the_published_one() -> None:
    for name, expected in (("conversation", 0.182), ("synthetic", 0.380)):
        workload, _, ceiling = workload_of(name)
        tokens = sum(request.num_prompt_tokens for request in workload.requests)
        assert ceiling / tokens == pytest.approx(expected, abs=0.01)


@pytest.mark.timeout(600)
def test_one_cell_and_four_on_the_beginning_of_the_conversations() -> None:
    one, four = run("conversation", ONE_CELL, SHARE), run("conversation", FOUR_CELLS, SHARE)
    assert one.ceiling_share >= 0.97
    assert four.ceiling_share >= 0.9


def test_a_run_in_which_nothing_repeats_has_missed_nothing() -> None:
    found = Findings("x", ONE_CELL, [], 100, 0, 0, [100], 1.0)
    assert found.ceiling_share == 1.0


def test_short_chats_find_what_they_said_before() -> None:
    assert run("chats", FOUR_CELLS, 0.25).ceiling_share >= 0.9


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_conversation_trace_keeps_its_bounds() -> None:
    one = run("conversation", ONE_CELL)
    assert one.ceiling_share >= 0.97
    assert one.mean_ttft_s <= 0.85
    assert one.ttft_s(99) <= 5.5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_cells_lose_little_on_the_synthetic_trace() -> None:
    four = run("synthetic", FOUR_CELLS)
    assert four.ceiling_share >= 0.9
    assert four.mean_ttft_s <= 1.1


def test_a_flood_makes_its_own_tenant_wait() -> None:
    """The other tenant hardly notices; the flood waits about as long as it may, or is refused."""
    quiet, loud = flood(1.0), flood(3.0)
    assert loud["calm"]["refused"] == 0
    assert loud["calm"]["ttft_p99_s"] <= 1.2 * quiet["calm"]["ttft_p99_s"]
    assert loud["loud"]["refused"] > loud["loud"]["answered"]
    # As long as it may, in 99 of 100 cases; what the calm one sends meanwhile can't be foreseen.
    assert loud["loud"]["ttft_p99_s"] <= 10.0
    assert loud["loud"]["ttft_max_s"] <= 11.0


@pytest.mark.parametrize(("bound_s", "spread"), [(2.0, 0), (4.0, 32)], ids=["equal", "varied"])
def test_what_is_let_in_is_answered_within_the_bound(bound_s: float, spread: int) -> None:
    """Three times what 16 rows can serve: those refused are not missed."""
    rng, duration_s, capacity_tok_s = Random(1), 50.0, 16 / 0.02
    cost = Cost(
        prefill_tokens_per_s=1e6,
        prompt_s=0,
        decode_s=0.02,
        num_blocks=4000,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        is_serial=True,
    )
    arrivals_s = sorted(rng.uniform(0, duration_s) for _ in range(round(duration_s * 37.5)))
    requests = [SimRequest(at, 48, 64 + rng.randint(-spread, spread), ()) for at in arrivals_s]
    workload = Workload("overload", CHAT_BLOCK_TOKENS, tuple(requests))
    settings = replace(SETTINGS, enable_prefix_caching=False, max_queue_wait_s=bound_s)
    outcomes = Fleet(workload, Shape(workers_per_cell=1), cost, settings).run()
    ttfts_s = sorted(o.ttft_s for o in outcomes if o.ttft_s is not None)
    tokens = sum(
        request.num_output_tokens
        for request, outcome in zip(requests, outcomes, strict=True)
        if outcome.ttft_s is not None and (outcome.ended_s or 0.0) <= duration_s
    )
    assert tokens >= 0.95 * capacity_tok_s * duration_s
    assert ttfts_s[int(0.99 * len(ttfts_s))] <= bound_s
    # Nor are they let in with much room to spare.
    assert ttfts_s[len(ttfts_s) // 2] >= 0.6 * bound_s


def gaps_s(
    workload: Workload, cost: Cost, settings: SchedulerSettings, from_s: float = 0.0
) -> list[float]:
    """Between the tokens of each answer while requests come, in order of length."""
    until_s = workload.requests[-1].arrival_s
    fleet = Fleet(workload, Shape(workers_per_cell=1), cost, settings, keeps_times=True)
    gaps = (
        later - earlier
        for outcome in fleet.run()
        for earlier, later in zip(outcome.times_s, outcome.times_s[1:], strict=False)
        if from_s <= later <= until_s
    )
    return sorted(gaps)


def test_chunks_keep_the_inter_token_target() -> None:
    """One lane for prefill and decode: long prompts between rows that decode."""
    cost = Cost(num_blocks=4000, max_num_batched_tokens=8192, prompt_s=0, is_serial=True)
    workload = together(
        "target",
        steady("a", per_s=4.0, duration_s=10.0, num_prompt_tokens=600, num_output_tokens=80),
        steady("b", per_s=0.3, duration_s=10.0, num_prompt_tokens=40_000, num_output_tokens=10),
    )

    def p99_gap_s(settings: SchedulerSettings) -> float:
        gaps = gaps_s(workload, cost, settings)
        return gaps[round(0.99 * len(gaps))]

    assert p99_gap_s(replace(SETTINGS, preset="latency")) <= 0.055
    assert p99_gap_s(replace(SETTINGS, preset="throughput")) >= 0.2


@pytest.mark.parametrize("per_s", [10.0, 20.0])
def test_gaps_stay_close_together_on_a_card(per_s: float) -> None:
    """Conversations at 40 and 80 % of what a card can serve, its times those of an 8B model."""
    workload = poisson(per_s=per_s, duration_s=10.0)
    settings = replace(SETTINGS, preset="latency", enable_prefix_caching=False)
    gaps = gaps_s(workload, H200_8B, settings, from_s=3.0)
    assert gaps[round(0.99 * len(gaps))] <= 3 * gaps[len(gaps) // 2]


# ---- troubles


def small() -> Workload:
    return recorded("conversation", speed=2.5, share=0.02)


def after(*what: tuple[float, Callable[[Fleet], None]]) -> list[Trouble]:
    return [Trouble(at_s, act) for at_s, act in what]


def cell_of(fleet: Fleet, i: int = 0):
    return fleet.cells[f"cell-{i}"]


def troubled(*what: tuple[float, Callable[[Fleet], None]]) -> Findings:
    workload = small()
    found = simulate(workload, FOUR_CELLS, COST, 1, troubles=after(*what))
    # Nothing is lost, whatever happened: every request has its whole answer.
    assert len(found.outcomes) == len(workload.requests)
    assert all(outcome.reason is FinishReason.LENGTH for outcome in found.outcomes)
    return found


def test_a_paused_scheduler_goes_on_where_it_stood() -> None:
    calm = troubled()
    paused = troubled(
        (5.0, lambda fleet: cell_of(fleet).pause()), (9.0, lambda fleet: cell_of(fleet).resume())
    )
    assert max(paused.ttfts_s) > max(calm.ttfts_s) or paused.mean_ttft_s > calm.mean_ttft_s


def test_a_paused_worker_delays_only_what_it_holds() -> None:
    def device(fleet: Fleet):
        return cell_of(fleet).devices[0]

    calm = troubled()
    paused = troubled(
        (5.0, lambda fleet: device(fleet).pause()), (8.0, lambda fleet: device(fleet).resume())
    )
    assert paused.mean_ttft_s <= calm.mean_ttft_s + 1.0


def test_lost_writes_of_a_filter_cost_hits_and_nothing_else() -> None:
    def lose(fleet: Fleet) -> None:
        for cell in fleet.cells.values():
            cell.num_lost_writes = 3

    calm, lost = troubled(), troubled((4.0, lose))
    assert lost.hit_tokens >= 0.8 * calm.hit_tokens


def test_a_worker_attached_twice_keeps_its_blocks_and_its_requests() -> None:
    calm = troubled()
    twice = troubled((10.0, lambda fleet: cell_of(fleet, 1).attach_again(0)))
    assert twice.hit_tokens >= 0.9 * calm.hit_tokens
