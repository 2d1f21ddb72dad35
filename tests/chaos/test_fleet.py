"""A whole fleet under load, disturbed in every way: every stream goes on as if nothing was.

3 workers, 2 schedulers, 2 routers and Valkey; 40 clients of a random 2-layer model over every
door. See mix.py for what holds after each run. How long streams paused is printed. The slow forms
disturb 200 streams of that model, and 12 of the demo model, in random mixes.
"""

from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from tests.chaos.calls import NUM_SHARED, mixed_calls
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.fleet import Fleet
from tests.chaos.mix import Mix, Outcome, mixed_rounds

NUM_STREAMS, MAX_TOKENS = 40, 45
NUM_TRIES = 5
FLAGS = ("--check-integrity", "1")
# Half of the default, which the slow forms have: a frozen worker is waited for so long.
SHORT_FLAGS = (*FLAGS, "--hang-floor-s", "2.5")
MOVES, RECOMPUTED = "octavo_router_moves_total", "octavo_recomputed_tokens_total"
# What strikes together, in this order; most ways to fail are in one of them. A scheduler that is
# back takes its share while the next strikes, which needs only one.
TOGETHER = [
    ("redis full", "scheduler frozen"),
    ("redis killed", "worker killed"),
    ("router-scheduler link cut",),
    ("redis back empty", "worker frozen", "router killed"),
    ("scheduler-worker link silent",),
    ("redis 200 ms late", "worker told to go", "router told to go"),
]
REST = ("router-scheduler link silent", "scheduler-worker link cut")


@pytest.fixture(scope="module")
def mix(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Mix, None, None]:
    folder = tmp_path_factory.mktemp("fleet")
    with Fleet(folder, model=tiny_folder, scheduler_flags=SHORT_FLAGS) as fleet:
        yield Mix(fleet, mixed_calls(tiny_folder, NUM_STREAMS, MAX_TOKENS))


def disturb(mix: Mix, rounds: Sequence[Sequence[Fault]]) -> Outcome:
    outcome = mix.run(rounds)
    print(f"\n{outcome}\n{outcome.pauses()}")
    return outcome


@pytest.mark.parametrize("names", TOGETHER, ids=" + ".join)
def test_streams_survive(mix: Mix, names: Sequence[str]) -> None:
    outcome = disturb(mix, [[FAULTS[name] for name in names]])
    if "router killed" in names:
        assert outcome.num_retries


def take_over(mix: Mix, names: Sequence[str]) -> tuple[float, float]:
    """(streams that moved, tokens that the scheduler which took over computed again)."""
    fleet = mix.fleet
    processes = [service.process for service in fleet.of_kind("scheduler")]
    recomputed = {name: fleet.sum_of(RECOMPUTED, name) for name in fleet.num_led()}
    num_moves = fleet.sum_of(MOVES, "router")
    disturb(mix, [[FAULTS[name] for name in names]])
    (heir,) = (name for name in recomputed if fleet.services[name].process in processes)
    num_recomputed = fleet.sum_of(RECOMPUTED, heir) - recomputed[heir]
    return fleet.sum_of(MOVES, "router") - num_moves, num_recomputed


@pytest.mark.parametrize(
    "names", [("redis frozen", "scheduler killed"), ("scheduler told to go",)], ids=" + ".join
)
def test_streams_and_caches_survive(mix: Mix, names: Sequence[str]) -> None:
    """The scheduler that takes over finds in the workers' caches what the lost one had there."""
    num_moves, num_recomputed = take_over(mix, names)
    for _ in range(NUM_TRIES - 1):
        if num_moves:
            break
        # Streams of one length start and end together: it may strike when none is under way.
        num_moves, num_recomputed = take_over(mix, names)
    assert num_moves
    # A few blocks were not sealed yet. Without a cache it were all of prompt and answer.
    assert num_recomputed < NUM_SHARED * num_moves


@pytest.mark.slow
@pytest.mark.parametrize("name", REST)
def test_streams_survive_the_rest(mix: Mix, name: str) -> None:
    disturb(mix, [[FAULTS[name]]])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_200_streams_survive_a_mix(tiny_folder: Path, tmp_path: Path) -> None:
    with Fleet(tmp_path, model=tiny_folder, scheduler_flags=FLAGS) as fleet:
        disturb(Mix(fleet, mixed_calls(tiny_folder, 200, MAX_TOKENS)), mixed_rounds(1, 6))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_demo_model_survives_a_mix(demo_folder: Path, tmp_path: Path) -> None:
    with Fleet(tmp_path, model=demo_folder, scheduler_flags=FLAGS) as fleet:
        disturb(Mix(fleet, mixed_calls(demo_folder, 12, 40)), mixed_rounds(2, 4))
