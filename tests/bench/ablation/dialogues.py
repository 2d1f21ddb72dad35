"""What the twins are given: single requests of mixed lengths, and dialogues that share prefixes.

Token ids are random and the same at every call. Must not know: schedulers, workers. Entry points:
`mixed_dialogues`, `shared_dialogues`.
"""

import random
from dataclasses import dataclass, replace

from octavo.cli.workloads import BenchRequest, load_workloads, make_requests

# At full size, in tokens: one system prompt for all, then turns of a question and an answer.
_SYSTEM_TOKENS = 768
_QUESTION_TOKENS = (64, 192)
_ANSWER_TOKENS = (32, 128)
_NUM_TURNS = 3
_FIRST_ID = 10
_SEED = 1


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Turns one after the other; each repeats the whole history as its prompt."""

    turns: tuple[BenchRequest, ...]

    @property
    def num_output_tokens(self) -> int:
        return sum(turn.num_output_tokens for turn in self.turns)

    @property
    def max_total_tokens(self) -> int:
        """Length of the last turn's prompt and answer."""
        return sum(len(turn.token_ids) + turn.num_output_tokens for turn in self.turns)


def mixed_dialogues(num_requests: int, scale: float, vocab_size: int) -> list[Dialogue]:
    """The workload `mixed`, lengths times `scale`: one turn each, nothing shared."""
    workload = replace(load_workloads()["mixed"].scaled(scale), num_requests=num_requests)
    return [Dialogue((request,)) for request in make_requests(workload, vocab_size)]


def shared_dialogues(num_dialogues: int, scale: float, vocab_size: int) -> list[Dialogue]:
    """Dialogues that begin with one system prompt, lengths times `scale`."""
    source = random.Random(_SEED)

    def ids(num_tokens: int) -> tuple[int, ...]:
        return tuple(source.randrange(_FIRST_ID, vocab_size) for _ in range(num_tokens))

    def draw(limits: tuple[int, int]) -> int:
        return max(1, round(scale * source.randint(*limits)))

    system = ids(max(1, round(scale * _SYSTEM_TOKENS)))
    dialogues: list[Dialogue] = []
    for _ in range(num_dialogues):
        turns = [
            BenchRequest(ids(draw(_QUESTION_TOKENS)), draw(_ANSWER_TOKENS))
            for _ in range(_NUM_TURNS)
        ]
        first = BenchRequest(system + turns[0].token_ids, turns[0].num_output_tokens)
        dialogues.append(Dialogue((first, *turns[1:])))
    return dialogues
