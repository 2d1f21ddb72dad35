"""A fleet that works for long: no process's memory may grow.

    python -m tests.chaos.soak --minutes 30 [--record]

Waves of streams of every kind, each with prompts of its own, over a whole fleet whose caches are
full after the first; every process's resident memory is looked at after each wave. The first
third warms up. `--record` appends to tests/bench/results/soak_cpu.jsonl.
Entry points: `soak`, `Growth`.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.chaos.calls import mixed_calls
from tests.chaos.fleet import Fleet
from tests.chaos.record import append
from tests.e2e.edge import resident_mib
from tests.tiny_models import TINY_VOCAB_SIZE, save_tiny_model

FILE_NAME = "soak_cpu.jsonl"
MAX_GROWTH = 0.05
NUM_STREAMS = 40
MAX_TOKENS = 60
# Fewer than a wave's tokens need: blocks are evicted from the first wave on.
NUM_KV_BLOCKS = 100
_WARM_UP = 1 / 3


@dataclass(frozen=True)
class Growth:
    """A process's resident memory, MiB, after each wave but those of the warm-up."""

    name: str
    samples_mib: Sequence[float]

    @property
    def share(self) -> float:
        """Of the first quarter's median: how much larger the last quarter's is."""
        size = max(len(self.samples_mib) // 4, 1)
        first = statistics.median(self.samples_mib[:size])
        return statistics.median(self.samples_mib[-size:]) / first - 1.0


def soak(fleet: Fleet, duration_s: float) -> tuple[list[Growth], int]:
    """How each process grew, and the number of answers, all of which were right."""
    rng = random.Random(0)
    samples: dict[str, list[float]] = {name: [] for name in fleet.services}
    start_s = time.monotonic()
    num_answers = 0
    calls = mixed_calls(fleet.model, NUM_STREAMS, MAX_TOKENS)
    while (spent_s := time.monotonic() - start_s) < duration_s:
        wave = [
            replace(call, prompt_ids=[rng.randrange(3, TINY_VOCAB_SIZE) for _ in call.prompt_ids])
            for call in calls
        ]
        for client in fleet.traffic.run(wave):
            (answer,) = client.answers
            assert not answer.error, f"{answer.error}\n{fleet.logs()}"
            assert sum(len(c.token_ids) for c in answer.choices) == answer.completion_tokens
            num_answers += 1
        if spent_s > _WARM_UP * duration_s:
            for name, service in fleet.services.items():
                samples[name].append(resident_mib(service.process.pid))
    fleet.wait_idle()
    return [Growth(name, sizes) for name, sizes in samples.items()], num_answers


def soak_fleet(folder: Path, model: Path) -> Fleet:
    """3 workers with small caches, 2 schedulers, 2 routers."""
    return Fleet(folder, model=model, worker_flags=("--num-kv-blocks", str(NUM_KV_BLOCKS)))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--record", action="store_true", help=f"append to {FILE_NAME}")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="octavo-soak-") as name:
        folder = Path(name)
        model = save_tiny_model(folder / "model")
        with soak_fleet(folder, model) as fleet:
            growths, num_answers = soak(fleet, arguments.minutes * 60)
    for growth in growths:
        print(f"{growth.name:12} {growth.samples_mib[-1]:7.1f} MiB  {growth.share:+.1%}")
    if arguments.record:
        measured = {
            "minutes": arguments.minutes,
            "answers": num_answers,
            "rss_mib": {g.name: [round(mib, 1) for mib in g.samples_mib] for g in growths},
            "growth": {g.name: round(g.share, 4) for g in growths},
        }
        append(FILE_NAME, "soak", measured)
    worst = max(growths, key=lambda growth: growth.share)
    assert worst.share <= MAX_GROWTH, f"{worst.name} grew by {worst.share:.1%}"


if __name__ == "__main__":
    main()
