"""Which worker a sequence goes to."""

from octavo_scheduler.binding import Candidate, choose_worker


def candidate(
    hit: int = 0,
    backlog: int = 0,
    wait_s: float = 0.0,
    rows: int = 0,
    fits: bool = True,
    row_s: float = 0.0,
) -> Candidate:
    return Candidate(hit, backlog, 1000.0, wait_s, rows, fits, row_s)


def test_the_least_time_to_first_token_wins_among_cold_workers() -> None:
    assert choose_worker([candidate(backlog=500), candidate(backlog=100)], 400, 2.0) == 1


def test_a_warm_worker_wins_over_an_idle_cold_one() -> None:
    workers = [candidate(), candidate(hit=100, backlog=1000), candidate(hit=99)]
    assert choose_worker(workers, 400, 2.0) == 1


def test_equal_times_go_to_the_worker_with_fewer_rows() -> None:
    workers = [candidate(backlog=3, rows=9), candidate(backlog=4, rows=2)]
    assert choose_worker(workers, 400, 2.0) == 1


def test_a_full_warm_worker_is_waited_for_within_the_budget_only() -> None:
    workers = [candidate(hit=400, wait_s=1.9), candidate()]
    assert choose_worker(workers, 400, 2.0) == 0
    workers = [candidate(hit=400, wait_s=2.5), candidate()]
    assert choose_worker(workers, 400, 2.0) == 1


def test_a_worker_that_is_too_small_is_never_chosen() -> None:
    assert choose_worker([candidate(fits=False), candidate(wait_s=9.0)], 400, 2.0) == 1
    assert choose_worker([candidate(fits=False)], 400, 2.0) is None


def test_a_crowd_on_the_warm_worker_outweighs_a_prefix_that_saves_less() -> None:
    """100 hits save 0.1 s; 9 rows at 1 ms a step and row slow 50 tokens by 0.45 s."""

    def choose(hit: int, rows: int, num_output_tokens: int) -> int | None:
        workers = [candidate(hit=hit, rows=rows, row_s=0.001), candidate(row_s=0.001)]
        return choose_worker(workers, 400, 2.0, num_output_tokens)

    assert choose(100, 9, 50) == 1
    assert choose(100, 9, 5) == 0, "a short answer hardly feels the crowd"
    assert choose(100, 1, 50) == 0, "one row is no crowd"
    assert choose(400, 5, 50) == 0, "a long prefix is worth some company"


def test_an_idle_worker_with_work_before_it_is_no_relief() -> None:
    workers = [candidate(hit=100, rows=9, row_s=0.001), candidate(backlog=400, row_s=0.001)]
    assert choose_worker(workers, 400, 2.0, 50) == 0


def test_a_crowd_counts_only_against_workers_with_room() -> None:
    workers = [
        candidate(hit=100, rows=9, row_s=0.001),
        candidate(wait_s=1.0, rows=1, row_s=0.001),
        candidate(rows=8, row_s=0.001),
    ]
    assert choose_worker(workers, 400, 2.0, 50) == 0
