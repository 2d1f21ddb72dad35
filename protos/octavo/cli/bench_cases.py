"""What `octavo bench` measures on one start: workloads, greedy or sampled, so many times each.

No I/O. Entry points: `Case`, `warm_ups`, `with_fresh_ids`.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.cli.measurement import Run
from octavo.cli.workloads import BenchRequest, Workload

_GREEDY: dict[str, Any] = {"temperature": 0.0}
_SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95}
_FIRST_ID = 10
# As many tokens as the widest step takes, so that none of its shapes is new afterwards.
_WARM_UP_TOKENS = 8192
_WARM_UP_OUTPUT = 8
_SMALL_PROMPT = 32


@dataclass(frozen=True)
class Case:
    """A workload's requests, all greedy or all sampled; `last_id`: ids are below it."""

    workload: Workload
    is_sampled: bool
    requests: tuple[BenchRequest, ...]
    num_runs: int
    last_id: int

    @property
    def name(self) -> str:
        return f"{self.workload.name} {'sampled' if self.is_sampled else 'greedy'}"

    @property
    def sampling(self) -> dict[str, Any]:
        return _SAMPLED if self.is_sampled else _GREEDY


@dataclass(frozen=True)
class Measured:
    """All runs of a case by one path; `protocol`: None for the bare loop."""

    case: Case
    protocol: str | None
    runs: tuple[Run, ...]

    @property
    def best(self) -> Run:
        return min(self.runs, key=lambda run: run.wall_s)


@dataclass(frozen=True)
class WarmUp:
    """Requests that are sent and not measured."""

    requests: tuple[BenchRequest, ...]
    sampling: dict[str, Any]


def warm_ups(cases: Sequence[Case]) -> list[WarmUp]:
    """For each kind of sampling one small request, then prompts as long as the longest case's.

    Their ids are no measured prompt's.
    """
    found: list[WarmUp] = []
    for is_sampled in sorted({case.is_sampled for case in cases}):
        alike = [case for case in cases if case.is_sampled == is_sampled]
        longest = max(alike, key=lambda case: case.workload.prompt_tokens[1])
        num_tokens = longest.workload.prompt_tokens[1]
        wide = longest.requests[: max(1, _WARM_UP_TOKENS // num_tokens)]
        small = BenchRequest((_FIRST_ID,) * min(_SMALL_PROMPT, num_tokens), _WARM_UP_OUTPUT)
        for number, requests in enumerate(((small,), wide)):
            short = [
                BenchRequest(item.token_ids, min(item.num_output_tokens, _WARM_UP_OUTPUT))
                for item in with_fresh_ids(requests, longest.last_id, -1 - number)
            ]
            found.append(WarmUp(tuple(short), longest.sampling))
    return found


def with_fresh_ids(
    requests: Sequence[BenchRequest], last_id: int, seed: int
) -> tuple[BenchRequest, ...]:
    """The same lengths with other ids, below `last_id`: no prefix cache knows them. `seed` 0
    changes nothing."""
    if seed == 0:
        return tuple(requests)
    source = random.Random(seed)
    return tuple(
        BenchRequest(
            tuple(source.randrange(_FIRST_ID, last_id) for _ in item.token_ids),
            item.num_output_tokens,
        )
        for item in requests
    )
