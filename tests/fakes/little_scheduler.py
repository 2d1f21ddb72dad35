"""A little scheduler that plans at random, but lawfully, and checks what comes back.

It adds, chunks, starves, removes and replaces sequences at random, with up to two steps in
flight, and reuses freed blocks at once. `answer_to(prompt)` says what a prompt's tokens are.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np

from octavo.row_event import RowEvent
from octavo_worker.plan import Chunk, Plan, RowAdd, Sampling, StepOutcome
from octavo_worker.runner import Runner
from tests.fakes.tiny_paged_model import VOCAB_SIZE

NUM_ROWS, NUM_BLOCKS, BLOCK_SIZE = 4, 24, 16
MOST_TOKENS = 30
PROMPT_LENS = (1, 15, 16, 40)
PROMPTS = [
    [(13 * i + 7 * j * j) % VOCAB_SIZE for j in range(length)]
    for i, length in enumerate(PROMPT_LENS)
]


@dataclass
class Sequence:
    """What the little scheduler knows of a row's holder."""

    prompt: int
    row: int
    generation: int
    num_tokens: int
    blocks: list[int]
    num_computed: int = 0
    tokens: list[int] = field(default_factory=list)
    end: RowEvent = RowEvent.ALIVE

    @property
    def num_left(self) -> int:
        return len(PROMPTS[self.prompt]) - self.num_computed


class LittleScheduler:
    """Plans at random and checks what comes back."""

    def __init__(
        self, random: Random, runner: Runner, answer_to: Callable[[int], list[int]]
    ) -> None:
        self.random = random
        self.runner = runner
        self.answer_to = answer_to
        self.free = list(range(1, NUM_BLOCKS))
        self.held: dict[int, Sequence] = {}
        self.all: dict[tuple[int, int], Sequence] = {}
        self.num_plans = self.num_steps = 0

    def plan(self) -> Plan:
        self.num_plans += 1
        removed = tuple(row for row in list(self.held) if self._may_leave(self.held[row]))
        for row in removed:
            self.free += self.held.pop(row).blocks
        added = tuple(self._add(row) for row in range(NUM_ROWS) if self._may_add(row))
        updates = [self._grow(s) for s in self.held.values() if self._may_grow(s)]
        chunks = [self._chunk(s) for s in self.held.values() if self._may_compute(s)]
        return Plan(
            self.num_plans,
            decode_until=self.num_steps + 1 + self.random.choice((0, 0, 1, 5)),
            removed_rows=removed,
            added_rows=added,
            block_updates=np.array(updates, np.int64).reshape(-1, 3),
            chunks=tuple(chunks),
        )

    def _may_leave(self, sequence: Sequence) -> bool:
        is_over = sequence.end is not RowEvent.ALIVE
        return self.random.random() < (0.7 if is_over else 0.03)

    def _may_add(self, row: int) -> bool:
        return row not in self.held and len(self.free) >= 5 and self.random.random() < 0.5

    def _add(self, row: int) -> RowAdd:
        prompt = self.random.randrange(len(PROMPTS))
        num_blocks = self.random.randint(-(-len(PROMPTS[prompt]) // BLOCK_SIZE), 5)
        blocks = [self.free.pop(0) for _ in range(num_blocks)]
        num_tokens = self.random.randint(1, MOST_TOKENS)
        sequence = Sequence(prompt, row, self.num_plans, num_tokens, blocks)
        self.held[row] = self.all[row, self.num_plans] = sequence
        stop = Sampling(stop_token_ids=self._stop_ids(prompt))
        total = len(PROMPTS[prompt]) + num_tokens
        return RowAdd(row, self.num_plans, stop, 0, np.array(blocks, np.int64), 0, total)

    def _stop_ids(self, prompt: int) -> tuple[int, ...]:
        return (self.answer_to(prompt)[-1],) if self.random.random() < 0.3 else ()

    def _may_grow(self, sequence: Sequence) -> bool:
        return bool(self.free) and len(sequence.blocks) < 8 and self.random.random() < 0.3

    def _grow(self, sequence: Sequence) -> tuple[int, int, int]:
        block = self.free.pop(0)
        sequence.blocks.append(block)
        return sequence.row, len(sequence.blocks) - 1, block

    def _may_compute(self, sequence: Sequence) -> bool:
        return sequence.num_left > 0 and self.random.random() < 0.7

    def _chunk(self, sequence: Sequence) -> Chunk:
        length = self.random.randint(1, sequence.num_left)
        start = sequence.num_computed
        ids = np.array(PROMPTS[sequence.prompt][start : start + length], np.int64)
        sequence.num_computed += length
        return Chunk(sequence.row, start, ids, is_last=sequence.num_left == 0)

    def take(self, outcome: StepOutcome) -> None:
        assert outcome.faults == ()
        columns = (outcome.rows, outcome.generations, outcome.token_ids, outcome.events)
        for row, generation, token, event in zip(*(c.tolist() for c in columns), strict=True):
            sequence = self.all[row, generation]
            assert sequence.end is RowEvent.ALIVE, "a token after the end"
            sequence.tokens.append(token)
            sequence.end = RowEvent(event)

    def step(self) -> None:
        """A plan, or repeats, with one or two steps in flight; then read some."""
        if self.runner.can_repeat and self.random.random() < 0.6:
            self.runner.submit(None)
        else:
            self.runner.submit(self.plan())
        self.num_steps += 1
        depth = self.random.randint(0, 1)
        while self.runner.num_in_flight > depth:
            outcome = self.runner.poll()
            assert outcome is not None
            self.take(outcome)

    def check(self) -> None:
        for sequence in self.all.values():
            answer = self.answer_to(sequence.prompt)[: sequence.num_tokens]
            tokens = sequence.tokens
            assert tokens == answer[: len(tokens)]
            if sequence.end is RowEvent.LENGTH:
                assert tokens == answer
            if sequence.end is RowEvent.STOP:
                assert tokens[-1] == self.answer_to(sequence.prompt)[-1]
