"""Who claims which worker: with equal views exactly one does, and never a worker that is led."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from octavo.registry import SchedulerRecord, WorkerRecord
from octavo.succession import successor
from octavo_scheduler.claims import CLAIM_DELAY_S, Fleet

SCHEDULERS = [f"s{i}" for i in range(6)]


def worker(index: int, leader: str = "", last: str = "") -> WorkerRecord:
    name = f"w{index}"
    return WorkerRecord(name, f"{name}:1", "boot", "m", "r", 9, 9, leader, 1, last or leader)


def scheduler(name: str, *, draining: bool = False, takes_workers: bool = True) -> SchedulerRecord:
    return SchedulerRecord(name, f"{name}:1", "m", 0, 0, 0, draining, takes_workers)


def view(
    me: str,
    schedulers: list[SchedulerRecord],
    workers: list[WorkerRecord],
    *,
    lost: tuple[str, ...] = (),
    max_workers: int = 8,
) -> Fleet:
    return Fleet.seen_by(me, schedulers, workers, lost=lost, max_workers=max_workers)


LEADERS = st.sampled_from(["", *SCHEDULERS, "gone"])
WORKERS = st.lists(st.tuples(LEADERS, LEADERS), max_size=12).map(
    lambda pairs: [worker(i, leader, last) for i, (leader, last) in enumerate(pairs)]
)
ALIVE = st.lists(st.sampled_from(SCHEDULERS), unique=True, min_size=1)


@given(WORKERS, ALIVE, st.randoms())
def test_every_free_worker_is_claimed_by_exactly_one(
    workers: list[WorkerRecord], alive: list[str], random: object
) -> None:
    records = [scheduler(name) for name in alive]
    claimed: list[str] = []
    for me in alive:
        random.shuffle(records)  # type: ignore[attr-defined]
        random.shuffle(workers)  # type: ignore[attr-defined]
        fleet = view(me, records, workers, max_workers=12)
        claimed += [record.worker_id for record in fleet.claims(me, {})]
    assert sorted(claimed) == sorted(w.worker_id for w in workers if w.leader_id not in alive)


@given(WORKERS, ALIVE, st.integers(1, 3))
def test_the_bound_holds_but_for_take_overs(
    workers: list[WorkerRecord], alive: list[str], max_workers: int
) -> None:
    records = [scheduler(name) for name in alive]
    fleet = view(alive[0], records, workers, max_workers=max_workers)
    free = {record.worker_id: record for record in fleet.free()}
    for me in alive:
        claims = fleet.claims(me, {})
        lost = [w for w in claims if (w.leader_id or w.last_leader_id) not in {"", *alive}]
        assert all(successor(alive, w.leader_id or w.last_leader_id) == me for w in lost)
        if len(claims) > len(lost):
            assert fleet.led[me] + len(claims) - len(lost) <= max_workers
    # What nobody has room for is led all the same, later, by whoever comes first.
    waited = dict.fromkeys(free, CLAIM_DELAY_S)
    late = {record.worker_id for me in alive for record in fleet.claims(me, waited)}
    assert late == free.keys()


@given(WORKERS, ALIVE)
def test_giving_away_ends(workers: list[WorkerRecord], alive: list[str]) -> None:
    """Givers and claimers settle in as many rounds as there are workers, and then rest."""
    records = [scheduler(name) for name in alive]
    for _ in range(len(workers) + 2):
        fleet = view(alive[0], records, workers, max_workers=12)
        owners = fleet.owners()
        workers = [
            replace(w, leader_id=owners[w.worker_id], last_leader_id=owners[w.worker_id])
            if w.worker_id in owners
            else w
            for w in workers
        ]
        fleet = view(alive[0], records, workers, max_workers=12)
        for me in alive:
            num = fleet.num_to_give(me)
            own = [w.worker_id for w in workers if w.leader_id == me][:num]
            workers = [replace(w, leader_id="") if w.worker_id in own else w for w in workers]
    fleet = view(alive[0], records, workers, max_workers=12)
    assert not fleet.free()
    assert all(fleet.led[me] <= fleet.share for me in alive)


def test_one_scheduler_claims_all_at_once() -> None:
    workers = [worker(i) for i in range(5)]
    assert len(view("s0", [], workers).claims("s0", {})) == 5


def test_a_lost_leaders_workers_go_to_its_successor_at_once() -> None:
    alive = ["s1", "s2", "s3"]
    workers = [worker(0, "", "gone"), worker(1, "gone"), *(worker(2 + i, "s1") for i in range(9))]
    heir = successor(alive, "gone")
    for me in alive:
        claims = view(me, [scheduler(name) for name in alive], workers).claims(me, {})
        assert [w.worker_id for w in claims] == (["w0", "w1"] if me == heir else [])


def test_a_router_knows_sooner_that_a_scheduler_is_lost() -> None:
    records = [scheduler("s0"), scheduler("s1")]
    workers = [worker(0, "s1")]
    assert view("s0", records, workers).claims("s0", {}) == []
    assert view("s0", records, workers, lost=("s1",)).claims("s0", {}) == workers


def test_a_worker_comes_back_to_a_leader_that_lives() -> None:
    records = [scheduler("s0"), scheduler("s1")]
    for last in ("s0", "s1"):
        workers = [worker(0, "", last)]
        assert view("s0", records, workers).owners() == {"w0": last}
        # Others may ask when it doesn't.
        assert len(view("s0", records, workers).claims("s0", {"w0": CLAIM_DELAY_S})) == 1


def test_who_drains_gets_nothing_and_its_workers_go_to_its_successor() -> None:
    records = [scheduler("s0", draining=True), scheduler("s1"), scheduler("s2")]
    workers = [worker(0, "", "s0"), worker(1, "s0"), worker(2)]
    owners = view("s1", records, workers).owners()
    assert owners["w0"] == successor(["s1", "s2"], "s0")
    assert "w1" not in owners
    assert owners["w2"] in ("s1", "s2")


def test_a_list_of_its_own_is_neither_claimed_nor_given_to() -> None:
    records = [scheduler("s0"), scheduler("listed", takes_workers=False)]
    workers = [worker(0, "", "listed"), worker(1, "s0"), worker(2, "s0"), worker(3, "s0")]
    fleet = view("s0", records, workers)
    assert fleet.owners() == {"w0": "listed"}
    assert fleet.num_to_give("s0") == 0


def test_a_newcomer_gets_its_share() -> None:
    records = [scheduler("s0"), scheduler("s1")]
    workers = [worker(i, "s0") for i in range(3)]
    fleet = view("s0", records, workers)
    assert (fleet.num_to_give("s0"), fleet.num_to_give("s1")) == (1, 0)
    given = [replace(workers[0], leader_id=""), *workers[1:]]
    assert view("s0", records, given).owners() == {"w0": "s1"}
