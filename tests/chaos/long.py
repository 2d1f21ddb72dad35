"""The long form: a hundred faults and more, in random mixes, recorded.

    python -m tests.chaos.long [--runs 17] [--faults 6] [--streams 40] [--seed 0] [--minutes 60]

Each run is a fleet of its own that is disturbed `--faults` times (see mix.py); its line in
tests/bench/results/chaos_cpu.jsonl tells what struck, and how long streams paused. A last line
sums up. No run is begun after `--minutes`. Entry point: `main`.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.calls import mixed_calls
from tests.chaos.fleet import Fleet
from tests.chaos.mix import Mix, Outcome, mixed_rounds
from tests.chaos.pauses import Pauses
from tests.chaos.record import append
from tests.tiny_models import save_tiny_model

FILE_NAME = "chaos_cpu.jsonl"
MAX_TOKENS = 60


def run(folder: Path, model: Path, num_streams: int, seed: int, num_faults: int) -> Outcome:
    """A fleet, from its start to its end."""
    flags = ("--check-integrity", "1")
    with Fleet(folder, model=model, scheduler_flags=flags) as fleet:
        mix = Mix(fleet, mixed_calls(model, num_streams, MAX_TOKENS))
        return mix.run(mixed_rounds(seed, num_faults))


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=17)
    parser.add_argument("--faults", type=int, default=6, help="in each run")
    parser.add_argument("--streams", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--minutes", type=float, default=60.0)
    arguments = parser.parse_args(argv)
    pauses, num_faults, num_runs = Pauses(), 0, 0
    until_s = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory(prefix="octavo-chaos-") as name:
        model = save_tiny_model(Path(name) / "model")
        for seed in range(arguments.seed, arguments.seed + arguments.runs):
            if time.monotonic() > until_s:
                break
            folder = Path(name) / f"run-{seed}"
            folder.mkdir()
            outcome = run(folder, model, arguments.streams, seed, arguments.faults)
            num_runs += 1
            num_faults += outcome.num_faults
            pauses.update(outcome.pauses())
            line = {
                "seed": seed,
                "streams": arguments.streams,
                "duration_s": round(outcome.duration_s, 1),
                "answers": outcome.num_answers,
                "tokens": outcome.num_tokens,
                "redis_commands": outcome.num_commands,
                "rounds": [one.name for one in outcome.rounds],
                "pauses": outcome.pauses().summary(),
            }
            append(FILE_NAME, "chaos", line)
            print(f"run {seed}: {outcome.num_faults} faults, {outcome.num_answers} answers")
    print(pauses)
    totals = {"runs": num_runs, "faults": num_faults, "pauses": pauses.summary()}
    append(FILE_NAME, "chaos sum", totals)


if __name__ == "__main__":
    main()
