"""The fixed workloads and model shapes of the benchmarks (`workloads.json`), as requests.

No I/O but reading that file. Entry points: `load_workloads`, `load_shapes`, `make_requests`.
"""

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("workloads.json")
_FIRST_ID, _LAST_ID = 10, 30_000
_SEED = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """`num_requests` sent at once; lengths in tokens, drawn from [low, high] inclusive."""

    name: str
    num_requests: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]

    @property
    def num_runs(self) -> int:
        """The best of two counts, except where lengths vary (one long run)."""
        return 1 if self.output_tokens[0] != self.output_tokens[1] else 2

    def scaled(self, factor: float) -> "Workload":
        """Requests and lengths times `factor`, at least 1 each: for small machines."""

        def times(value: int) -> int:
            return max(1, round(value * factor))

        low, high = self.prompt_tokens
        first, last = self.output_tokens
        return replace(
            self,
            num_requests=times(self.num_requests),
            prompt_tokens=(times(low), times(high)),
            output_tokens=(times(first), times(last)),
        )


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request: prompt ids, and how many tokens to generate (EOS ignored)."""

    token_ids: tuple[int, ...]
    num_output_tokens: int


def load_workloads() -> dict[str, Workload]:
    items = json.loads(_FILE.read_text())["workloads"].items()
    return {
        name: Workload(name, item["requests"], _range(item["in"]), _range(item["out"]))
        for name, item in items
    }


def load_shapes() -> dict[str, dict[str, Any]]:
    """Model configurations by name, as in a config.json."""
    return json.loads(_FILE.read_text())["models"]


def make_requests(workload: Workload, vocab_size: int) -> list[BenchRequest]:
    """The workload's requests: the same at every call (ids are uniform, one fixed seed)."""
    source = random.Random(_SEED)
    last_id = last_id_of(vocab_size)
    requests: list[BenchRequest] = []
    for _ in range(workload.num_requests):
        num_prompt_tokens = _draw(source, workload.prompt_tokens)
        num_output_tokens = _draw(source, workload.output_tokens)
        ids = tuple(source.randrange(_FIRST_ID, last_id) for _ in range(num_prompt_tokens))
        requests.append(BenchRequest(ids, num_output_tokens))
    return requests


def last_id_of(vocab_size: int) -> int:
    """Workloads' ids are below it."""
    return min(_LAST_ID, vocab_size)


def _range(value: int | list[int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _draw(source: random.Random, limits: tuple[int, int]) -> int:
    low, high = limits
    return low if low == high else source.randint(low, high)
