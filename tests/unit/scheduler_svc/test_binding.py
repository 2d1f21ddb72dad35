"""Which worker a sequence goes to."""

from octavo_scheduler.binding import Candidate, choose_worker


def candidate(
    hit: int = 0, backlog: int = 0, wait_s: float = 0.0, rows: int = 0, fits: bool = True
) -> Candidate:
    return Candidate(hit, backlog, 1000.0, wait_s, rows, fits)


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
