"""tests.bench.ablation: a twin differs from Octavo in its one rule, and in no answer."""

from array import array
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.capacity import Capacity
from octavo.cli.measurement import RequestTiming
from octavo.cli.workloads import BenchRequest
from octavo.settings import SchedulerSettings, WorkerSettings
from octavo_scheduler.batcher import BatchLimits
from octavo_scheduler.sequence import Request, Submission
from octavo_scheduler.sequence import Sequence as Generation
from tests.bench.ablation.dialogues import Dialogue, mixed_dialogues, shared_dialogues
from tests.bench.ablation.experiment import Size, ratios, worker_settings
from tests.bench.ablation.occupancy import Occupancy, OccupancyMeter
from tests.bench.ablation.race import BenchWorker, Result, load_worker, race
from tests.bench.ablation.twins import (
    CACHED,
    CLASSIC,
    CONTIGUOUS,
    PAGED,
    TWINS,
    Reservation,
    ReservingState,
    RunPool,
)

MAX_MODEL_LEN = 128
NUM_RESERVED = 4
BLOCK = 16
SETTINGS = SchedulerSettings(preset="throughput", check_integrity=True)


@pytest.fixture(scope="module")
def worker(tiny_folder: Path) -> BenchWorker:
    """Memory for four requests of the greatest length."""
    settings = WorkerSettings(
        model=str(tiny_folder),
        backend="cpu",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        num_kv_blocks=1 + NUM_RESERVED * MAX_MODEL_LEN // BLOCK,
    )
    return load_worker(settings)


def requests_of(lengths: Sequence[tuple[int, int]]) -> list[Dialogue]:
    """A dialogue of one turn for each (prompt tokens, output tokens)."""
    return [
        Dialogue((BenchRequest(tuple(range(10 + i, 10 + i + num_prompt)), num_output),))
        for i, (num_prompt, num_output) in enumerate(lengths)
    ]


LENGTHS = [(20, 30), (40, 5), (7, 60), (50, 12), (16, 33), (33, 16), (9, 3), (60, 41), (5, 1)]


def test_no_twin_changes_an_answer(worker: BenchWorker) -> None:
    """Greedy in float32: the same ids whatever runs beside them, padded and preempted or not."""
    single = requests_of(LENGTHS)
    dialogues = shared_dialogues(5, 0.05, worker.model.vocab_size)
    for workload in (single, dialogues):
        num_turns = sum(len(dialogue.turns) for dialogue in workload)
        # Handles of later turns depend on who ends first: the answers alone, then.
        answers: list[list[tuple[int, ...]]] = []
        for twin in TWINS:
            result = race(twin, worker, workload, SETTINGS)
            assert len(result.timings) == num_turns
            assert sum(map(len, result.answers.values())) == result.num_useful_tokens
            wanted = sum(dialogue.num_output_tokens for dialogue in workload)
            assert result.num_useful_tokens == wanted
            answers.append(sorted(result.answers.values()))
        assert answers == [answers[0]] * len(TWINS)


def test_a_static_batch_ends_before_the_next_one_begins(worker: BenchWorker) -> None:
    result = race(CLASSIC, worker, requests_of(LENGTHS), SETTINGS)
    batches = [range(start, min(start + NUM_RESERVED, 9)) for start in range(0, 9, NUM_RESERVED)]
    timings = result.timings
    for before, after in pairwise(batches):
        assert max(timings[i].last_s for i in before) < min(timings[i].first_s for i in after)
    assert result.occupancy.max_sequences == NUM_RESERVED
    # Each row computes its prompt, and one token less than its batch's longest answer.
    num_computed = 0
    for batch in batches:
        longest = max(LENGTHS[i][1] for i in batch)
        num_computed += sum(LENGTHS[i][0] + longest - 1 for i in batch)
    assert result.num_computed_tokens == num_computed
    assert result.num_preemptions == 0


def test_a_continuous_twin_starts_a_request_when_another_ends(worker: BenchWorker) -> None:
    longest = race(CONTIGUOUS[0], worker, requests_of(LENGTHS), SETTINGS)
    # No row runs on after its end, and the fifth request doesn't wait for the third.
    num_computed = sum(num_prompt + output - 1 for num_prompt, output in LENGTHS)
    assert longest.num_computed_tokens == num_computed
    assert longest.timings[4].first_s < longest.timings[2].last_s
    assert longest.occupancy.max_sequences == NUM_RESERVED
    assert longest.num_steps < race(CLASSIC, worker, requests_of(LENGTHS), SETTINGS).num_steps


def test_less_reserved_means_more_at_once(worker: BenchWorker) -> None:
    workload = mixed_dialogues(24, 0.0625, worker.model.vocab_size)
    runs = [race(twin, worker, workload, SETTINGS) for twin in (*CONTIGUOUS, PAGED)]
    means = [run.occupancy.mean_sequences for run in runs]
    used = [run.occupancy.kv_utilization for run in runs]
    assert means == sorted(means), means
    assert used == sorted(used), used
    assert runs[0].occupancy.max_sequences == NUM_RESERVED
    assert runs[-1].occupancy.max_sequences > NUM_RESERVED
    assert [run.num_preemptions for run in runs[:-1]] == [0, 0, 0]


def test_only_the_prefix_cache_spares_tokens(worker: BenchWorker) -> None:
    workload = shared_dialogues(3, 0.06, worker.model.vocab_size)
    without, cached = (race(twin, worker, workload, SETTINGS) for twin in (PAGED, CACHED))
    assert without.num_preemptions == cached.num_preemptions == 0
    assert sum(timing.num_cached_tokens for timing in without.timings) == 0
    num_cached = sum(timing.num_cached_tokens for timing in cached.timings)
    # The system prompt for all but the first, the history for every later turn.
    system = round(0.06 * 768) // BLOCK * BLOCK
    assert num_cached >= 8 * system
    assert without.num_computed_tokens - cached.num_computed_tokens == num_cached


# ---- the parts


@given(st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=60))
def test_runs_are_the_first_free_neighbours(orders: list[tuple[int, bool]]) -> None:
    """Against a plain model: a string with a mark for each used block."""
    pool, used, held = RunPool(24), "x" + "." * 23, []
    for count, is_free in orders:
        if is_free and held:
            run = held.pop(count % len(held))
            pool.free(run)
            used = used[: run[0]] + "." * len(run) + used[run[0] + len(run) :]
        else:
            first = used.find("." * count)
            assert pool.find_run(count) == first
            if first < 0:
                continue
            assert pool.allocate(count) == list(range(first, first + count))
            held.append(list(range(first, first + count)))
            used = used[:first] + "x" * count + used[first + count :]
        pool.check_integrity(held)
        assert pool.num_free == used.count(".")


def sequence_of(num_prompt: int, max_tokens: int, handle: int = 1) -> Generation:
    token_ids = array("I", range(num_prompt))
    submission = Submission(
        *(handle, "r", token_ids.tobytes(), b"", (), b"", max_tokens, 0, frozenset())
    )
    request = Request(submission, 1, handle, 0.0, None, num_prompt)
    return Generation(request, 0, token_ids, [], num_prompt)


def state_of(reservation: Reservation, num_blocks: int = 33) -> ReservingState:
    return ReservingState(
        *("w", Capacity(num_blocks, 8, 64), BLOCK, BatchLimits.of(8, 64, 16)),
        enable_prefix_caching=False,
        reservation=reservation,
        max_model_len=MAX_MODEL_LEN,
    )


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "oracle", "pow2"),
    [
        (1, 1, 2, 2),
        (10, 25, 35, 42),
        (64, 32, 96, 96),
        (64, 33, 97, 128),
        (7, 64, 71, 71),
        (60, 65, 125, 128),
    ],
)
def test_what_each_twin_reserves(num_prompt: int, max_tokens: int, oracle: int, pow2: int) -> None:
    wanted = {Reservation.ORACLE: oracle, Reservation.POW2: pow2, Reservation.MAX: MAX_MODEL_LEN}
    for reservation, num_tokens in wanted.items():
        state = state_of(reservation)
        sequence = sequence_of(num_prompt, max_tokens)
        assert state.reserved_blocks(sequence) == -(-num_tokens // BLOCK)
        state.admit(sequence, [])
        assert state.pool.num_used == len(sequence.block_ids) == -(-num_tokens // BLOCK)
        state.check_integrity()


def test_free_blocks_in_pieces_hold_no_row() -> None:
    state = state_of(Reservation.ORACLE, num_blocks=9)
    rows = [sequence_of(16, 16, handle) for handle in range(1, 5)]
    for sequence in rows:
        assert state.has_blocks_for(sequence, [])
        state.admit(sequence, [])
    assert [sequence.block_ids for sequence in rows] == [[1, 2], [3, 4], [5, 6], [7, 8]]
    state.freeze(0)
    for sequence in (rows[0], rows[2]):
        state.release(sequence, is_dead=True)
    assert state.pool.num_free == 4
    assert state.has_blocks_for(sequence_of(16, 16), [])
    assert not state.has_blocks_for(sequence_of(32, 16), [])


def test_occupancy_counts_what_is_still_of_use() -> None:
    state = state_of(Reservation.MAX)
    meter = OccupancyMeter(state)
    first, second = sequence_of(60, 20, 1), sequence_of(32, 20, 2)
    for sequence in (first, second):
        state.admit(sequence, [])
        state.add_chunk(sequence, len(sequence.token_ids))
    meter.sample(0)
    # 60 and 32 computed tokens of twice 128 slots (and of 512 in all), but for the last known.
    assert meter.occupancy() == Occupancy(2.0, 2, round(90 / 256, 4), round(90 / 512, 4))
    meter.note_answered(1)
    meter.sample(1)  # requests wait: from now on only this counts
    seen = meter.occupancy()
    assert (seen.mean_sequences, seen.max_sequences) == (1.0, 2)
    assert seen.kv_utilization == pytest.approx(31 / 256, abs=0.01)
    meter.forget(1)
    meter.sample(1)
    assert meter.occupancy().mean_sequences == 1.5


def test_every_ratio_above_one_is_a_gain() -> None:
    def result(twin: Any, speed: int) -> Result:
        """`speed` times as good in every measure."""
        time_s = 10.0 / speed
        timing = RequestTiming(8, 0.0, num_output_tokens=100)
        timing.frame(time_s)
        occupancy = Occupancy(2.0 * speed, 9, 0.9, 0.8)
        return Result(twin, (timing,), {}, time_s, 600 // speed, 1200 // speed, 0, occupancy)

    mixed = [result(twin, speed) for speed, twin in enumerate((CLASSIC, *CONTIGUOUS, PAGED), 1)]
    gains = ratios(mixed, [result(PAGED, 2), result(CACHED, 6)])
    expected = {
        "continuous_over_static": 2.0,
        "paged_over_contiguous_max": 2.5,
        "paged_over_contiguous_pow2": 5 / 3,
        "paged_over_contiguous_oracle": 1.25,
        "continuous_and_paged_over_neither": 5.0,
        "prefix_cache_on_over_off": 3.0,
    }
    assert gains.keys() == expected.keys()
    measures = ("useful_tok_s", "fewer_steps", "sequences", "fewer_computed_tok", "ttft_p50")
    for name, value in expected.items():
        assert gains[name] == dict.fromkeys(measures, pytest.approx(value, rel=0.001))


def test_the_memory_is_for_so_many_of_the_longest_requests() -> None:
    size = Size(4, 2, 0.25, 8, 1)
    settings = worker_settings(size, WorkerSettings())
    assert (settings.max_model_len, settings.num_kv_blocks) == (512, 8 * 32 + 1)
    settings = worker_settings(size, WorkerSettings(block_size=32, max_model_len=1000))
    assert (settings.max_model_len, settings.num_kv_blocks) == (1000, 8 * 32 + 1)
    assert worker_settings(size, WorkerSettings(num_kv_blocks=77)).num_kv_blocks == 77
    assert worker_settings(size, WorkerSettings(kv_cache_memory="1GiB")).num_kv_blocks == 0
    workloads = (mixed_dialogues(300, 0.25, 2048), shared_dialogues(300, 0.25, 2048))
    for workload in workloads:
        assert max(dialogue.max_total_tokens for dialogue in workload) <= 512
