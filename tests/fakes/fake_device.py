"""A worker's device without a model: obeys the rules at the top of worker.proto exactly.

A drawn token depends on every token before it, read through the row's block table as
attention would: each KV slot holds a number made of its token and position, each block the
sum over its slots, and the next token is a hash of the sum over the row's blocks. A wrong
block table, a stale or foreign block, a lost or doubled token changes the text. Orders that
break a rule are noted in `violations`; tests assert that there are none.

Entry points: `FakeDevice.step`, `expected_tokens`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.v1 import common_pb2, worker_pb2

U64 = npt.NDArray[np.uint64]

NONE, STOP, LENGTH, ERROR = 0, 1, 2, 3


def mix(values: U64) -> U64:
    """A well-stirred 64-bit function (the finalizer of SplitMix64)."""
    with np.errstate(over="ignore"):
        x = values + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def slot_values(token_ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> U64:
    """What the KV slots of these tokens hold."""
    return mix((token_ids.astype(np.uint64) << np.uint64(32)) | positions.astype(np.uint64))


def salt_of(sampling: common_pb2.SamplingParams, sequence_index: int) -> int:
    """Greedy rows draw the same; sampled ones by seed and sequence index."""
    if not sampling.temperature:
        return 0
    mixed = mix(np.array([sampling.seed, sequence_index + 1], np.uint64))
    return int(mixed[0] ^ mixed[1])


def expected_tokens(
    prompt: Sequence[int],
    max_tokens: int,
    *,
    vocab_size: int = 32_000,
    salt: int = 0,
    ending_ids: Iterable[int] = (),
    min_tokens: int = 0,
) -> list[int]:
    """The answer that an undisturbed device gives, computed without blocks."""
    endings = set(ending_ids)
    known = np.array(prompt, np.int64)
    total = np.add.reduce(slot_values(known, np.arange(known.size)))
    answer: list[int] = []
    for position in range(known.size, known.size + max_tokens):
        token = int(mix(np.array([total ^ np.uint64(salt)]))[0] % np.uint64(vocab_size))
        answer.append(token)
        if token in endings and len(answer) > min_tokens:
            break
        with np.errstate(over="ignore"):
            total += slot_values(np.array([token]), np.array([position]))[0]
    return answer


@dataclass(frozen=True, slots=True)
class FakeSize:
    """How large the device is."""

    num_blocks: int = 1024
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    block_size: int = 16
    max_model_len: int = 8192
    vocab_size: int = 32_000


class FakeDevice:
    """Rows, blocks and the step counter of one epoch. Arrays over R rows or N blocks."""

    def __init__(self, size: FakeSize) -> None:
        self.size = size
        self.violations: list[str] = []
        self.num_computed_tokens = 0  # in all epochs
        self.sealed: dict[int, bytes] = {}  # least recently used first
        self._sums = np.zeros(size.num_blocks, np.uint64)
        self._filled = np.zeros(size.num_blocks, np.int64)
        self.poison_rows: set[int] = set()  # rows to fail at their next draw
        self.reset()

    def reset(self) -> None:
        """A new epoch: rows go, sealed blocks stay."""
        size = self.size
        rows = size.max_num_seqs
        self.last_step = self.plan_id = self.repeat = self.decode_until = 0
        self._live = np.zeros(rows, np.bool_)
        self._generation = np.zeros(rows, np.int64)
        self._known = np.zeros(rows, np.int64)
        self._computed = np.zeros(rows, np.int64)
        self._last_token = np.zeros(rows, np.int64)
        self._max_total = np.zeros(rows, np.int64)
        self._min_total = np.zeros(rows, np.int64)
        self._salt = np.zeros(rows, np.uint64)
        self._endings: list[frozenset[int]] = [frozenset()] * rows
        self._logprobs: list[bool] = [False] * rows
        self._history: list[npt.NDArray[np.int64] | None] = [None] * rows
        self._num_prompt = np.zeros(rows, np.int64)
        # Rows that report their prompts: log-probability -id / 1e6, rank = position.
        self._reports_prompt = np.zeros(rows, np.bool_)
        self._prompt_logprobs: list[worker_pb2.PromptLogprobs] = []
        self._num_blocks = np.zeros(rows, np.int64)
        width = -(-size.max_model_len // size.block_size)
        self._table = np.zeros((rows, width), np.int64)

    @property
    def num_live_rows(self) -> int:
        return int(self._live.sum())

    @property
    def can_repeat(self) -> bool:
        """Rule 5, and there is something to repeat."""
        return self.last_step < self.decode_until and self._decode_rows().size > 0

    def utilization(self) -> float:
        """Filled slots over slots of the distinct blocks in live rows' tables."""
        filled: dict[int, int] = {}
        block_size = self.size.block_size
        for row in np.flatnonzero(self._live):
            left = int(self._computed[row])
            for block in self._table[row, : self._num_blocks[row]]:
                filled[int(block)] = max(filled.get(int(block), 0), min(max(left, 0), block_size))
                left -= block_size
        return sum(filled.values()) / (len(filled) * block_size) if filled else 1.0

    def step(self, plan: worker_pb2.Plan | None) -> worker_pb2.StepResult:
        """Run one plan, or (None) one repeat of the decode part."""
        self.last_step += 1
        entries: list[tuple[int, int, int]] = []  # row, token, event
        # Rule 2: rows that this step's chunks complete decode from the next step on.
        if plan is None:
            self.repeat += 1
            decodes = self._decode_rows()
        else:
            if plan.plan_id != self.plan_id + 1:
                self._violate(f"plan {plan.plan_id} follows plan {self.plan_id}")
            self.plan_id, self.repeat, self.decode_until = plan.plan_id, 0, plan.decode_until
            self._apply(plan)
            decodes = self._decode_rows()
            for chunk in plan.chunks:
                entries += self._compute_chunk(chunk)
                self.num_computed_tokens += len(chunk.token_ids) // 4
            num_tokens = sum(len(chunk.token_ids) // 4 for chunk in plan.chunks) + decodes.size
            if num_tokens > self.size.max_num_batched_tokens:
                self._violate(f"{num_tokens} tokens in a step")
        entries += self._decode(decodes)
        self.num_computed_tokens += decodes.size
        return self._result(entries)

    # ---- a plan's changes

    def _apply(self, plan: worker_pb2.Plan) -> None:
        if plan.HasField("sealed"):
            self._seal(plan.sealed)
        for row in np.frombuffer(plan.removed_rows, "<u4"):
            self._live[row] = False
            self._num_blocks[row] = 0
        for added in plan.added_rows:
            self._add(added)
        for row, index, block in np.frombuffer(plan.block_updates, "<u4").reshape(-1, 3).tolist():
            if not self._live[row]:
                continue
            if index != self._num_blocks[row] or not 0 < block < self.size.num_blocks:
                self._violate(f"row {row}: block {block} at {index} of {self._num_blocks[row]}")
            self._table[row, index] = block
            self._num_blocks[row] = max(self._num_blocks[row], index + 1)

    def _seal(self, sealed: worker_pb2.SealedBlocks) -> None:
        for i, block in enumerate(np.frombuffer(sealed.block_ids, "<u4").tolist()):
            if self._filled[block] != self.size.block_size:
                self._violate(f"block {block} sealed with {self._filled[block]} tokens")
            self.sealed.pop(block, None)
            self.sealed[block] = sealed.block_hashes[16 * i : 16 * i + 16]

    def _add(self, added: worker_pb2.RowAdd) -> None:
        row = added.row
        if self._live[row]:
            self._violate(f"row {row} is taken")
        blocks = np.frombuffer(added.block_ids, "<u4").astype(np.int64)
        num_cached = added.num_computed_tokens // self.size.block_size
        if (self._filled[blocks[:num_cached]] != self.size.block_size).any():
            self._violate(f"row {row}: a hit on a block that isn't full")
        self._live[row] = True
        self._generation[row] = added.generation
        self._computed[row] = added.num_computed_tokens
        self._known[row] = self.size.max_model_len + 1  # until its last chunk
        self._max_total[row] = added.max_total_tokens
        self._min_total[row] = added.min_total_tokens
        self._salt[row] = salt_of(added.sampling, added.sequence_index)
        self._endings[row] = frozenset(np.frombuffer(added.sampling.stop_token_ids, "<u4").tolist())
        self._logprobs[row] = added.sampling.HasField("logprobs")
        history = np.frombuffer(added.history_token_ids, "<u4").astype(np.int64)
        self._history[row] = history if history.size else None
        self._num_prompt[row] = added.num_prompt_tokens
        self._reports_prompt[row] = added.sampling.HasField("prompt_logprobs")
        if not history.size and (self._reports_prompt[row] or added.sampling.presence_penalty):
            self._violate(f"row {row}: its history is missing")
        self._num_blocks[row] = blocks.size
        self._table[row, : blocks.size] = blocks

    # ---- computing

    def _compute_chunk(self, chunk: worker_pb2.Chunk) -> list[tuple[int, int, int]]:
        row = chunk.row
        if not self._live[row]:
            return []
        token_ids = np.frombuffer(chunk.token_ids, "<u4").astype(np.int64)
        positions = np.arange(chunk.start, chunk.start + token_ids.size)
        if chunk.start != self._computed[row] or not token_ids.size:
            self._violate(f"row {row}: chunk at {chunk.start} of {self._computed[row]}")
        blocks = self._table[row, positions // self.size.block_size]
        if positions[-1] >= self._num_blocks[row] * self.size.block_size:
            self._violate(f"row {row}: chunk beyond the block table")
        self._write(blocks, positions, token_ids)
        self._computed[row] = positions[-1] + 1
        if (history := self._history[row]) is not None:
            is_end = bool(positions[-1] + 1 == history.size)
            if not np.array_equal(history[positions], token_ids) or chunk.is_last != is_end:
                self._violate(f"row {row}: the chunk isn't what the history says")
            self._report_prompt(row, int(positions[0]) + 1, int(positions[-1]) + 2)
        if not chunk.is_last:
            return []
        return self._draw(np.array([row]))

    def _report_prompt(self, row: int, start: int, end: int) -> None:
        """Of the prompt tokens [start, end), if the row was asked to."""
        history = self._history[row]
        end = min(end, int(self._num_prompt[row]))
        if not self._reports_prompt[row] or history is None or start >= end:
            return
        item = worker_pb2.PromptLogprobs(
            row=row, generation=int(self._generation[row]), start=start
        )
        for position in range(start, end):
            item.entries.add(logprob=-int(history[position]) / 1e6, rank=position)
        self._prompt_logprobs.append(item)

    def _decode_rows(self) -> npt.NDArray[np.int64]:
        """Rules 2 and 4."""
        is_ready = self._live & (self._computed == self._known - 1)
        has_slot = self._computed < self._num_blocks * self.size.block_size
        return np.flatnonzero(is_ready & has_slot)

    def _decode(self, rows: npt.NDArray[np.int64]) -> list[tuple[int, int, int]]:
        if not rows.size:
            return []
        positions = self._computed[rows]
        blocks = self._table[rows, positions // self.size.block_size]
        self._write(blocks, positions, self._last_token[rows])
        self._computed[rows] += 1
        return self._draw(rows)

    def _write(
        self,
        blocks: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        token_ids: npt.NDArray[np.int64],
    ) -> None:
        """Fill KV slots; a block begun anew forgets what it held (rule 7)."""
        begun = blocks[positions % self.size.block_size == 0]
        self._sums[begun] = 0
        self._filled[begun] = 0
        np.add.at(self._sums, blocks, slot_values(token_ids, positions))
        np.add.at(self._filled, blocks, 1)
        for block in begun.tolist():
            self.sealed.pop(block, None)
        if (self._filled[blocks] > self.size.block_size).any() or (blocks == 0).any():
            self._violate("a slot was written twice, or in the null block")

    def _draw(self, rows: npt.NDArray[np.int64]) -> list[tuple[int, int, int]]:
        computed = self._computed[rows]
        used = -(-computed // self.size.block_size)
        width = int(used.max())
        sums = self._sums[self._table[rows, :width]]
        sums = np.where(np.arange(width) < used[:, None], sums, np.uint64(0))
        totals = np.add.reduce(sums, axis=1)
        tokens = (mix(totals ^ self._salt[rows]) % np.uint64(self.size.vocab_size)).astype(np.int64)
        known = computed + 1
        self._known[rows] = known
        self._last_token[rows] = tokens
        events = np.where(known >= self._max_total[rows], LENGTH, NONE)
        for i in np.flatnonzero([bool(self._endings[row]) for row in rows]):
            row = rows[i]
            if int(tokens[i]) in self._endings[row] and known[i] >= self._min_total[row]:
                events[i] = STOP
        for row in self.poison_rows.intersection(rows.tolist()):
            events[np.flatnonzero(rows == row)] = ERROR
            self.poison_rows.discard(row)
        self._live[rows[events != NONE]] = False
        return list(zip(rows.tolist(), tokens.tolist(), events.tolist(), strict=True))

    def _result(self, entries: list[tuple[int, int, int]]) -> worker_pb2.StepResult:
        rows = np.array([row for row, _, _ in entries], "<u4")
        generations = self._generation[rows.astype(np.int64)].astype("<u4")
        result = worker_pb2.StepResult(
            step=self.last_step,
            plan_id=self.plan_id,
            repeat=self.repeat,
            rows=rows.tobytes(),
            generations=generations.tobytes(),
            token_ids=np.array([token for _, token, _ in entries], "<u4").tobytes(),
            events=bytes(event for _, _, event in entries),
            prompt_logprobs=self._prompt_logprobs,
        )
        self._prompt_logprobs = []
        for i, (row, token, event) in enumerate(entries):
            if event == ERROR:
                result.errors.add(row=row, generation=generations[i], message="poisoned")
            elif self._logprobs[row]:
                result.logprobs.add(
                    entry=i, logprobs=common_pb2.TokenLogprobs(logprob=-token / 1e6)
                )
        return result

    def _violate(self, text: str) -> None:
        self.violations.append(f"step {self.last_step}: {text}")
