"""One fault at a time, in a whole fleet under load: every client's stream goes on.

3 workers, 2 schedulers, 2 routers and Valkey; 40 streams of a random 2-layer model over every
door. After each fault: each stream ended once, with the ids of the undisturbed run (greedy ones up
to near-ties), no block is held, and the fleet is whole again. How long streams paused is printed.
"""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.chaos.fleet import Fleet
from tests.chaos.traffic import Call, Door, Report
from tests.e2e.prompts import prompt_ids

NUM_STREAMS = 40
MAX_TOKENS = 120
# All prompts begin with it: a cache that survives shows.
NUM_SHARED = 64
HITS = "octavo_prefix_cache_hits_total"
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 7, "logprobs": 1},
    {"temperature": 1.0, "seed": 11, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    {"temperature": 0.9, "seed": 3, "n": 2},
    {"temperature": 1.0, "seed": 5, "stop": ["zq", "xj"]},
    {"logprobs": 0},
    {"temperature": 0.7, "seed": 19, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1},
    {},
]


@pytest.fixture(scope="module")
def fleet(
    tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Fleet, None, None]:
    with Fleet(
        tmp_path_factory.mktemp("fleet"),
        model=tiny_folder,
        scheduler_flags=("--check-integrity", "1"),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def calls(tiny_folder: Path) -> list[Call]:
    tokenizer = Tokenizer.from_file(str(tiny_folder / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    shared, *own = prompt_ids(encode, [NUM_SHARED, *(3 + 2 * i for i in range(NUM_STREAMS))])
    doors = (Door.GRPC, Door.SSE, Door.GRPC, Door.SSE, Door.WHOLE)
    return [
        Call(
            [*shared, *ids],
            {"max_tokens": MAX_TOKENS, "ignore_eos": True, **KINDS[i % len(KINDS)]},
            doors[i % len(doors)],
        )
        for i, ids in enumerate(own)
    ]


@pytest.fixture(scope="module")
def undisturbed(fleet: Fleet, calls: list[Call]) -> Report:
    report = fleet.traffic.run(calls)
    assert not [answer.error for answer in report.answers if answer.error]
    fleet.wait_idle()
    print(f"\nundisturbed: pauses {report.pauses()}")
    return report


def busiest_scheduler(fleet: Fleet) -> str:
    return max(sorted(fleet.num_led()), key=lambda name: fleet.num_led()[name])


def disturb(
    fleet: Fleet, calls: list[Call], undisturbed: Report, fault: Callable[[], object]
) -> None:
    """Run all calls with a fault in the middle; every stream must be as if there was none."""
    disturbed = fleet.traffic.run(calls, fault, after=400)
    print(f"\npauses {disturbed.pauses()}")
    fleet.check_answers(calls, undisturbed, disturbed)
    fleet.wait_idle()


def test_a_scheduler_is_killed(fleet: Fleet, calls: list[Call], undisturbed: Report) -> None:
    victim = busiest_scheduler(fleet)
    heirs = [name for name in fleet.num_led() if name != victim]
    hits: dict[str, float] = {}

    def kill() -> None:
        fleet.kill(victim)
        hits.update({name: fleet.sum_of(HITS, name) for name in heirs})

    disturb(fleet, calls, undisturbed, kill)
    # What comes again finds the lost cell's cache: whole prompts and what was generated since.
    assert sum(fleet.sum_of(HITS, name) - hits[name] for name in heirs) > NUM_SHARED
    assert sum(fleet.num_led().values()) == 3
    fleet.recover()
