"""One worker as the scheduler sees it: its rows, its blocks and the plans on their way.

Three numbers order everything: `last_step`, the newest step whose result was read;
`applied.plan_id`, the plan that step belonged to; `next_plan_id`, the plan being drafted.
Plans between the two are in flight: the worker may have run them or not.

    read results ... applied | in flight: applied+1 ... next-1 | draft: next
                             '-- what the worker may be doing -'

A row is *released* in the draft (`removed_rows`), and its blocks are free for the same draft:
the worker runs plans in order, so nothing that was sent before can write after it. If plans in
flight may still draw tokens for its holder, the holder is kept in `leaving` under (row,
generation) until the draft that released it is itself read: then no more can come.

Must not know: the queue, sessions, protos, time. Entry points: `admit`, `preempt`, `release`,
`grow`, `add_chunk`, `freeze`; `results.py` reads, `composer.py` decides.
"""

from collections import deque
from collections.abc import Iterator

import numpy as np

from octavo.capacity import Capacity
from octavo_scheduler.batcher import BatchLimits
from octavo_scheduler.block_pool import BlockPool
from octavo_scheduler.draft import Draft, Leaving, SentChunk, SentPlan
from octavo_scheduler.growth import OutputLengths, peak_blocks
from octavo_scheduler.plan import AddedRow, Chunk, Plan
from octavo_scheduler.rows import RowTable
from octavo_scheduler.sequence import FinishReason, Lost, Sequence, State
from octavo_scheduler.step_cost import ChunkWork, StepCost


class WorkerState:
    """State of one attached worker; made at attach, dropped when the stream is lost."""

    def __init__(
        self,
        worker_id: str,
        capacity: Capacity,
        block_size: int,
        limits: BatchLimits,
        *,
        watermark: float = 0.01,
        growth_reserve: float = 1.0,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.worker_id = worker_id
        self.block_size = block_size
        self.limits = limits
        self.caching = enable_prefix_caching
        self.pool = BlockPool(capacity.num_blocks)
        self.watermark_blocks = int(watermark * self.pool.num_usable)
        self.growth_reserve = growth_reserve
        self.rows = RowTable(limits.max_num_seqs, block_size)
        self.cost = StepCost()
        self.lengths = OutputLengths()  # the cell's, once it is a member
        self.prefilling: list[Sequence] = []  # rows with tokens to plan, by order
        self.computing: dict[bytes, Sequence] = {}  # hash -> who computes that block now
        self.unproven: Sequence | None = None  # a suspect that runs again
        self.last_step = 0
        self.applied = SentPlan()
        self.in_flight: deque[SentPlan] = deque()
        self.next_plan_id = 1
        self.draft = Draft()
        self.leaving: dict[tuple[int, int], Leaving] = {}
        self.pending_seals: dict[int, bytes] = {}

    # ---- numbers

    @property
    def num_unread(self) -> int:
        """Plans sent whose own step's result was not read."""
        return len(self.in_flight)

    @property
    def owes_steps(self) -> bool:
        """Whether results are to come without a further plan."""
        is_leased = self.applied.decode_until > self.last_step
        return bool(self.in_flight) or (is_leased and bool(self.rows.decoding.any()))

    @property
    def horizon(self) -> int:
        """No step beyond this number runs with the plans that were sent."""
        horizon = max(self.last_step, self.applied.decode_until)
        for plan in self.in_flight:
            horizon = max(horizon + 1, plan.decode_until)
        return horizon

    @property
    def sure_until(self) -> int:
        """The worker has steps to run up to this number, whenever the plans reach it.

        A plan ends the lease of the one before it at once: only the last one's can be relied on.
        """
        newest = self.in_flight[-1] if self.in_flight else self.applied
        return max(self.last_step + len(self.in_flight), newest.decode_until)

    @property
    def num_decoding(self) -> int:
        return int(np.count_nonzero(self.rows.decoding))

    @property
    def backlog_tokens(self) -> int:
        """Known tokens of its rows that no plan computes yet."""
        return sum(len(s.token_ids) - s.num_planned for s in self.prefilling)

    @property
    def in_flight_tokens(self) -> int:
        """Prompt tokens of the plans whose results were not read."""
        return sum(plan.num_prefill_tokens for plan in self.in_flight)

    def num_tokens_to_generate(self) -> int:
        """Upper bound over its rows."""
        return int(np.sum(self.rows.limit - self.rows.known))

    @property
    def rows_per_s(self) -> float:
        """How many answers end in a second while all rows are held; 0 = not measured."""
        turn_s = float(self.rows.answer.mean()) * self.cost.decode_step_s(self.num_decoding)
        return self.rows.answer.size / turn_s if turn_s else 0.0

    def wait_for_row_s(self) -> float:
        """Rough time until a row of it ends and makes room."""
        rows = self.rows
        left = (rows.limit - rows.known)[rows.decoding]
        num_steps = int(left.min()) if left.size else 1
        return max(num_steps, 1) * max(self.cost.decode_s, 1e-3)

    def utilization(self) -> float:
        """Filled slots over slots of distinct allocated blocks; 1 when nothing is allocated.

        Filled: computed, or being computed by plans in flight that are sure to run.
        """
        slots = self.pool.num_used * self.block_size
        if not slots:
            return 1.0
        rows = self.rows
        filled = rows.known[rows.decoding] - 1 + self.num_unread
        empty = int(np.sum(np.maximum(rows.capacity[rows.decoding] - filled, 0)))
        empty += sum(len(s.block_ids) * self.block_size - s.num_planned for s in self.prefilling)
        return 1.0 - empty / slots

    def sequences(self) -> Iterator[Sequence]:
        """Holders of rows."""
        return (holder for holder in self.rows.holders if holder is not None)

    def num_blocks_for(self, num_slots: int) -> int:
        return -(-num_slots // self.block_size)

    def restore(self, blocks: list[int], hashes: list[bytes]) -> None:
        """A piece of the worker's inventory, least recently used first."""
        if self.caching:
            self.pool.restore(blocks, hashes)

    # ---- admission

    def fits(self, sequence: Sequence) -> bool:
        """Whether the pool could hold the whole sequence if it were alone."""
        return sequence.max_total_tokens <= self.pool.num_usable * self.block_size

    def find_hits(self, sequence: Sequence) -> list[int]:
        """Cached blocks of its prefix; at least its last known token stays to compute."""
        if not self.caching or sequence.reports_prompt:
            return []
        return self.pool.match(sequence.block_hashes, self.max_hits(sequence))

    def waits_for_block(self, sequence: Sequence, num_hits: int) -> bool:
        """Whether its next missing block is being computed for somebody else right now."""
        if not self.caching or sequence.reports_prompt or num_hits >= self.max_hits(sequence):
            return False
        return sequence.block_hashes[num_hits] in self.computing

    def has_blocks_for(self, sequence: Sequence, hits: list[int]) -> bool:
        """Whether all known tokens and the next one fit above the watermark now.

        Beside other rows, there must also be room for what all are likely to draw.
        """
        slots = min(len(sequence.token_ids) + 1, sequence.max_total_tokens - 1)
        needed = self.num_blocks_for(slots) - len(hits)
        free = self.pool.num_free - self.pool.num_free_among(hits) - self._promised_blocks()
        if not self.rows.num_held:
            return needed <= free
        left = free - needed - self.watermark_blocks
        if left < 0 or not self.growth_reserve:
            return left >= 0
        return self._has_room_to_grow(sequence, len(hits), int(left / self.growth_reserve))

    def expected_output(self, sequence: Sequence) -> int:
        """Tokens of its whole answer, as recent answers let expect."""
        return self.lengths.expect(sequence.request.submission.max_tokens)

    def admit(self, sequence: Sequence, hits: list[int]) -> None:
        """Give the sequence a row in the draft; its first `len(hits)` blocks are computed."""
        assert sequence.state is State.WAITING
        self.pool.touch(hits)
        sequence.block_ids = list(hits)
        sequence.num_sealed = len(hits)
        sequence.num_cached = len(hits) * self.block_size
        sequence.num_planned = sequence.num_computed = sequence.num_cached
        sequence.state = State.RUNNING
        sequence.expected_output = self.expected_output(sequence)
        self.rows.take(sequence)
        self.draft.added.append(sequence)
        self.prefilling.append(sequence)
        self.prefilling.sort(key=lambda s: s.order)
        if self.caching:
            num_full = len(sequence.token_ids) // self.block_size
            for block_hash in sequence.block_hashes[len(hits) : num_full]:
                self.computing.setdefault(block_hash, sequence)
        if sequence.is_suspect:
            self.unproven = sequence

    # ---- leaving a row

    def release(self, sequence: Sequence, *, is_dead: bool) -> None:
        """Take the row and the blocks away. `is_dead`: the device ended the row itself."""
        row = sequence.row
        if sequence in self.draft.added:
            raise AssertionError("a row is released after its plan was sent, never before")
        num_computed = self.num_computed(sequence)
        self.rows.release(row)
        self.draft.drop_updates(row)
        self.draft.removed.append(row)
        self.draft.is_urgent |= not is_dead
        self.pool.free(sequence.block_ids)
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
        self._stop_computing(sequence, sequence.num_sealed)
        if self.unproven is sequence:
            self.unproven = None
        sequence.lose_kv(num_computed, None)

    def preempt(self, sequence: Sequence) -> None:
        """Release; it is queued again when nothing in flight can draw for it any more."""
        sequence.num_preemptions += 1
        self._leave(sequence, None)
        sequence.lost_by = Lost.PREEMPTION

    def end_after_flight(self, sequence: Sequence, reason: FinishReason) -> None:
        """Release; it ends with `reason` unless a token in flight ends it before."""
        self._leave(sequence, reason)

    def _leave(self, sequence: Sequence, end_as: FinishReason | None) -> None:
        key = (sequence.row, int(self.rows.generation[sequence.row]))
        self.release(sequence, is_dead=False)
        sequence.state = State.LEAVING
        self.leaving[key] = Leaving(sequence, self.next_plan_id, end_as)

    @property
    def num_returning(self) -> int:
        """Preempted sequences that are about to queue again. From any thread."""
        return sum(
            leaving.end_as is None and leaving.sequence.state is State.LEAVING
            for leaving in list(self.leaving.values())
        )

    # ---- drafting

    def grow(self, sequence: Sequence, num_blocks: int) -> None:
        """Append blocks to its table; the caller checked the pool."""
        blocks = self.pool.allocate(num_blocks)
        if sequence not in self.draft.added:
            first = len(sequence.block_ids)
            for i, block in enumerate(blocks):
                self.draft.updates += (sequence.row, first + i, block)
        sequence.block_ids += blocks
        self.rows.capacity[sequence.row] = len(sequence.block_ids) * self.block_size

    def add_chunk(self, sequence: Sequence, length: int) -> None:
        """Compute the next `length` known tokens of a prefilling row; capacity is there."""
        start, row = sequence.num_planned, sequence.row
        end = start + length
        known = len(sequence.token_ids)
        assert start < end <= known, (start, end, known)
        assert end <= self.rows.capacity[row]
        is_last = end == known
        token_ids = sequence.token_ids[start:end].tobytes()
        self.draft.chunks.append(Chunk(row, start, token_ids, is_last))
        self.draft.sent_chunks.append(SentChunk(sequence, end, is_last))
        self.draft.work = self.draft.work.plus(ChunkWork.of(start, length))
        sequence.num_planned = end
        if is_last:
            self.prefilling.remove(sequence)
            self.rows.decoding[row] = True

    def freeze(self, decode_until: int) -> Plan:
        """The draft becomes a plan in flight; a new draft begins."""
        draft, self.draft = self.draft, Draft()
        seals = [(b, h) for b, h in self.pending_seals.items() if self.pool.hash_of(b) == h]
        self.pending_seals.clear()
        plan = Plan(
            plan_id=self.next_plan_id,
            removed_rows=tuple(draft.removed),
            added_rows=tuple(self._added_row(sequence) for sequence in draft.added),
            block_updates=tuple(draft.updates),
            chunks=tuple(draft.chunks),
            sealed_blocks=tuple(block for block, _ in seals),
            sealed_hashes=b"".join(block_hash for _, block_hash in seals),
            decode_until=decode_until,
        )
        sent_chunks, added = tuple(draft.sent_chunks), tuple(draft.added)
        self.in_flight.append(SentPlan(plan.plan_id, decode_until, sent_chunks, added, draft.work))
        self.next_plan_id += 1
        return plan

    def _added_row(self, sequence: Sequence) -> AddedRow:
        row, submission = sequence.row, sequence.request.submission
        num_prompt_tokens = sequence.request.num_prompt_tokens
        needs_history = submission.needs_history or sequence.reports_prompt
        # Blocks that the draft itself gave the row travel with it.
        return AddedRow(
            row=row,
            generation=int(self.rows.generation[row]),
            sampling=submission.sampling,
            sequence_index=sequence.index,
            block_ids=tuple(sequence.block_ids),
            num_computed_tokens=sequence.num_cached,
            max_total_tokens=sequence.max_total_tokens,
            # The total counts the ending id itself: it may come after min_tokens others.
            min_total_tokens=num_prompt_tokens + submission.min_tokens + 1,
            num_prompt_tokens=num_prompt_tokens,
            history=sequence.token_ids.tobytes() if needs_history else b"",
            reports_prompt=sequence.reports_prompt,
            traceparent="" if sequence.trace is None else sequence.trace.traceparent,
        )

    # ---- sealing

    def seal(self, sequence: Sequence, num_blocks: int) -> None:
        """The first `num_blocks` blocks of the table are computed and their results read."""
        if not self.caching:
            return
        for i in range(sequence.num_sealed, num_blocks):
            block, block_hash = sequence.block_ids[i], sequence.block_hashes[i]
            if self.computing.get(block_hash) is sequence:
                del self.computing[block_hash]
            if self.pool.index(block, block_hash):
                self.pending_seals[block] = block_hash
        sequence.num_sealed = max(sequence.num_sealed, num_blocks)

    def forget_computed(self, sequence: Sequence) -> None:
        """The row failed: nothing that it computed itself may be found again."""
        for block in sequence.block_ids[sequence.num_cached // self.block_size :]:
            self.pool.forget(block)

    # ---- helpers

    def check_integrity(self) -> None:
        """Assert that rows, blocks and counters agree."""
        holders = list(self.sequences())
        self.pool.check_integrity([sequence.block_ids for sequence in holders])
        assert len(holders) == self.rows.num_held
        for sequence in holders:
            row = sequence.row
            assert self.rows.holders[row] is sequence
            assert sequence.state is State.RUNNING
            assert self.rows.capacity[row] == len(sequence.block_ids) * self.block_size
            assert sequence.num_sealed * self.block_size <= int(self.rows.known[row])
            assert sequence.num_computed <= sequence.num_planned <= int(self.rows.known[row])
            assert bool(self.rows.decoding[row]) == (sequence not in self.prefilling)
        for leaving in self.leaving.values():
            assert leaving.plan_id <= self.next_plan_id
            assert leaving.sequence.row == -1
        for owner in self.computing.values():
            assert owner.state is State.RUNNING
        plan_ids = [plan.plan_id for plan in self.in_flight]
        assert plan_ids == list(range(self.applied.plan_id + 1, self.next_plan_id))

    def max_hits(self, sequence: Sequence) -> int:
        """Blocks of its known tokens that a prefix may cover: the last token never."""
        return (len(sequence.token_ids) - 1) // self.block_size

    def num_computed(self, sequence: Sequence) -> int:
        """Known tokens of a holder whose KV is computed, by the results that were read."""
        if sequence.num_computed < sequence.num_planned or not self.rows.decoding[sequence.row]:
            return sequence.num_computed
        return int(self.rows.known[sequence.row]) - 1

    def _promised_blocks(self) -> int:
        """Blocks that admitted rows still need for their known tokens and the next one."""
        return sum(
            self.num_blocks_for(min(len(s.token_ids) + 1, s.max_total_tokens - 1))
            - len(s.block_ids)
            for s in self.prefilling
        )

    def _has_room_to_grow(self, sequence: Sequence, num_hits: int, num_free: int) -> bool:
        """Whether the rows' likely growth, the sequence's included, fits into `num_free` blocks."""
        rows, block_size = self.rows, self.block_size
        held = np.flatnonzero(rows.limit)
        total = sequence.request.num_prompt_tokens + self.expected_output(sequence)
        known = np.append(rows.known[held], len(sequence.token_ids))
        limit = np.append(rows.limit[held], sequence.max_total_tokens)
        expected = np.append(rows.expected[held], total)
        # A row that outlived what was expected is taken to go on for a block.
        remaining = np.minimum(np.maximum(expected - known, block_size), limit - known)
        if int(remaining.sum()) // block_size + remaining.size <= num_free:
            return True
        capacity = np.append(rows.capacity[held], 0)
        capacity = np.maximum(capacity, (known // block_size + 1) * block_size)
        returned = capacity // block_size - np.append(rows.shared[held], num_hits)
        return peak_blocks(remaining, capacity - known, returned, block_size) <= num_free

    def _stop_computing(self, sequence: Sequence, first: int) -> None:
        for block_hash in sequence.block_hashes[first:]:
            if self.computing.get(block_hash) is sequence:
                del self.computing[block_hash]
