"""What a cell counts: every token looked up is a hit or has a reason, and nothing counts twice."""

import pytest

from octavo.cancel_reason import CancelReason
from octavo.metrics import MISS_REASONS
from octavo.settings import SchedulerSettings
from octavo_scheduler.recovery import Loss
from octavo_scheduler.sequence import Resume
from tests.fakes.fake_device import FakeSize, expected_tokens
from tests.fakes.simulated_cell import SESSION, SimulatedCell, prompt_of

BLOCK = 16
TOKEN_TIMES = ("prefill_time", "decode_time")


def settings(**changes: object) -> SchedulerSettings:
    return SchedulerSettings(**{"check_integrity": True, **changes})  # type: ignore[arg-type]


def misses(sim: SimulatedCell) -> dict[str, float]:
    counts = {r: sim.counter("prefix_cache_misses_total", reason=r) for r in MISS_REASONS}
    return {reason: count for reason, count in counts.items() if count}


def hits(sim: SimulatedCell) -> float:
    return sim.counter("prefix_cache_hits_total")


def queries(sim: SimulatedCell) -> float:
    return sim.counter("prefix_cache_queries_total")


def finish(sim: SimulatedCell, prompt: list[int], max_tokens: int = 1) -> None:
    sim.submit(prompt, max_tokens)
    sim.run()


# ---- misses


@pytest.mark.parametrize(
    ("length", "cold", "tail"),
    # The last token is always computed: 96 tokens are six blocks, of which five can be hit.
    [(100, 96, 4), (97, 96, 1), (96, 80, 16), (16, 0, 16), (17, 16, 1), (1, 0, 1)],
)
def test_cold_blocks_and_the_tail(length: int, cold: int, tail: int) -> None:
    sim = SimulatedCell()
    finish(sim, prompt_of(length))
    assert (queries(sim), hits(sim)) == (length, 0)
    assert misses(sim) == {k: v for k, v in {"cold": cold, "tail": tail}.items() if v}
    finish(sim, prompt_of(length))
    assert (queries(sim), hits(sim)) == (2 * length, cold)
    assert misses(sim) == {k: v for k, v in {"cold": cold, "tail": 2 * tail}.items() if v}


def test_what_was_evicted_is_told_from_what_never_was() -> None:
    sim = SimulatedCell(FakeSize(num_blocks=12))
    old = prompt_of(100, seed=1)
    finish(sim, old)
    finish(sim, prompt_of(150, seed=2))
    assert misses(sim) == {"cold": 96 + 144, "tail": 4 + 6}
    # 11 blocks: the other prompt took ten, so of the old one's seven the first alone is left
    # (blocks are freed tail first); behind what was there, new text is cold.
    before = hits(sim)
    finish(sim, old + prompt_of(44, seed=3))
    num_hits = hits(sim) - before
    assert num_hits % BLOCK == 0
    found = misses(sim)
    assert found["evicted"] == 96 - num_hits > 0
    assert found["cold"] == 96 + 144 + (144 - BLOCK) - 96
    assert queries(sim) == hits(sim) + sum(found.values())


def test_switched_off_and_prompts_that_are_scored() -> None:
    sim = SimulatedCell(settings=settings(enable_prefix_caching=False))
    finish(sim, prompt_of(50))
    finish(sim, prompt_of(50))
    assert (queries(sim), hits(sim), misses(sim)) == (100, 0, {"disabled": 100})
    sim = SimulatedCell()
    finish(sim, prompt_of(50))
    sim.submit(prompt_of(50), 1, prompt_logprobs=True)
    sim.run()
    assert (queries(sim), hits(sim)) == (100, 0)
    assert misses(sim) == {"cold": 48, "tail": 2, "prompt_logprobs": 50}


def test_what_another_worker_has() -> None:
    sim = SimulatedCell(
        FakeSize(max_num_seqs=1), num_workers=2, settings=settings(affinity_budget_ms=0)
    )
    prompt = prompt_of(100)
    finish(sim, prompt)
    # The worker that has the prefix is taken by a request that hits it; the next one can't wait.
    sim.submit(prompt, 400)
    sim.step()
    sim.submit(prompt, 1)
    sim.run()
    assert hits(sim) == 96
    assert misses(sim) == {"cold": 96, "elsewhere": 96, "tail": 12}


def test_siblings_wait_for_the_first_and_hit() -> None:
    sim = SimulatedCell()
    sim.submit(prompt_of(100), 5, num_sequences=3, seed=1)
    sim.run()
    assert (queries(sim), hits(sim)) == (300, 192)
    assert misses(sim) == {"cold": 96, "tail": 12}


# ---- computed again


@pytest.mark.parametrize("delay", [0, 1, 4])
@pytest.mark.parametrize("caching", [True, False])
def test_every_computed_token_is_accounted_for(delay: int, caching: bool) -> None:
    """Needed once, less what was hit, plus what is said to be computed again."""
    size = FakeSize(num_blocks=40, max_num_seqs=16, max_num_batched_tokens=256)
    options = settings(enable_prefix_caching=caching, growth_reserve=0.0)
    sim = SimulatedCell(size, settings=options)
    (link,) = sim.links.values()
    link.delay = delay
    prompts = [prompt_of(20 + 3 * i, seed=i % 4) for i in range(8)]
    for prompt in prompts:
        sim.submit(prompt, 150)
    sim.run()
    assert sim.counter("preemptions_total") > 0
    again = sim.counter("recomputed_tokens_total", reason="preemption")
    assert again > 0
    assert again == sim.counter("recomputed_tokens_total")
    needed = sum(len(prompt) + 150 - 1 for prompt in prompts)
    assert link.device.num_computed_tokens == needed - hits(sim) + again
    assert queries(sim) == sum(map(len, prompts)) == hits(sim) + sum(misses(sim).values())


@pytest.mark.parametrize("loss", list(Loss))
def test_moves_by_reason_and_what_they_cost(loss: Loss) -> None:
    sim = SimulatedCell(num_workers=2)
    prompts = [prompt_of(40, seed=i) for i in range(6)]
    for prompt in prompts:
        sim.submit(prompt, 50)
    for _ in range(20):
        sim.step()
    lost = sim.members[0]
    moved = [sequence.num_generated for sequence in lost.state.sequences()]
    num_known = int(lost.state.rows.known.sum())
    sim.kill(lost, loss)
    sim.run()
    assert len(moved) > 0
    assert sim.counter("moves_total", reason=loss.value) == len(moved)
    assert sim.counter("moves_total") == len(moved)
    # All of a row but its newest token had been computed.
    again = sim.counter("recomputed_tokens_total", reason="move")
    assert again == sim.counter("recomputed_tokens_total") == num_known - len(moved)
    assert queries(sim) == 40 * 6


def test_a_resumed_request_looks_nothing_up() -> None:
    sim = SimulatedCell()
    prompt = prompt_of(40)
    delivered = expected_tokens(prompt, 30)[:10]
    packed = b"".join(token.to_bytes(4, "little") for token in delivered)
    sim.submit(prompt, 30, resumes=[Resume(0, packed, False)])
    sim.run()
    assert queries(sim) == 0
    assert sim.counter("recomputed_tokens_total", reason="resume") == 49
    # It waited here, but its first token came from another scheduler.
    counts = [sim.counter(f"{name}_seconds_count") for name in ("queue_time", *TOKEN_TIMES)]
    assert counts == [1, 0, 0]


def test_a_sequence_that_is_handed_over_has_no_end_here() -> None:
    sim = SimulatedCell()
    sim.submit(prompt_of(40), 30)
    for _ in range(10):
        sim.step()
    sim.cell.let_go_all()
    assert sim.counter("sequence_outcomes_total", outcome="moved") == 1
    assert [sim.counter(f"{name}_seconds_count") for name in TOKEN_TIMES] == [1, 0]


# ---- times and ends


def test_times_of_a_sequence_add_up() -> None:
    sim = SimulatedCell(FakeSize(max_num_seqs=1))
    first = sim.submit(prompt_of(100, seed=1), 30)
    sim.submit(prompt_of(100, seed=2), 30)
    arrived = sim.clock()
    while sim.answer(first).finished is None:
        sim.step()
    sim.run()
    for name in ("queue_time", "prefill_time", "decode_time"):
        assert sim.counter(f"{name}_seconds_count") == 2
    # One after the other; between and after them, some ticks of the clock.
    took = sim.counter("prefill_time_seconds_sum") + sim.counter("decode_time_seconds_sum")
    assert sim.clock() - arrived == pytest.approx(took, abs=0.01)
    assert sim.counter("queue_time_seconds_sum") == pytest.approx(took / 2, abs=0.01)


def test_a_sequence_that_never_began_has_no_times() -> None:
    sim = SimulatedCell(FakeSize(max_num_seqs=1))
    sim.submit(prompt_of(40, seed=1), 20)
    waiting = sim.submit(prompt_of(40, seed=2), 20)
    sim.step()
    sim.cell.cancel(SESSION, waiting, None, CancelReason.CLIENT)
    sim.run()
    assert sim.counter("sequence_outcomes_total", outcome="cancelled") == 1
    assert sim.counter("sequence_outcomes_total", outcome="length") == 1
    for name in ("queue_time", "prefill_time", "decode_time"):
        assert sim.counter(f"{name}_seconds_count") == 1
