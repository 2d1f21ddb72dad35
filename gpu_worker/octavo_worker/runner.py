"""Runs steps: read this first.

A step is: take in the plan's changes (`row_book` checks them, `rows` holds them on the
device), build the inputs, run the model, apply the logits' rules (`logit_rules`), draw tokens,
write them back into the rows, and copy ids and events to the host. `submit` launches a step,
`poll` reads the oldest one's outcome. On a CPU a step is over when `submit` returns; on a card it
runs on while the next ones are launched, since nothing that a launch needs waits for a result.

Must not know: gRPC, leaders, clients. Entry points: `Runner.submit`, `Runner.poll`.
"""

import time
from collections import deque
from functools import partial
from typing import Protocol

import numpy as np
import torch

from octavo_worker.attention_inputs import StepInputs
from octavo_worker.backends.base import Backend
from octavo_worker.captured import Capture, Drawn, capture
from octavo_worker.decode_graphs import DecodeGraphs
from octavo_worker.graph_shapes import MOST_CHUNKS, mixed_shapes
from octavo_worker.host_copies import ResultRing
from octavo_worker.logit_rules import LogitRules
from octavo_worker.logprobs import LogprobTensors, gather_logprobs
from octavo_worker.mixed_graphs import MixedGraphs
from octavo_worker.pending_step import Draw, PendingStep, PromptDraw
from octavo_worker.plan import Plan, RowFault, StepOutcome
from octavo_worker.prompt_logprobs import gather_piece
from octavo_worker.row_book import NO_LOGPROBS, RowBook
from octavo_worker.row_limits import RowLimits
from octavo_worker.rows import RowTensors
from octavo_worker.sealed_blocks import SealedBlocks
from octavo_worker.sent_step import SentStep, pack, shape_of
from octavo_worker.step_entries import entries_of
from octavo_worker.step_inputs import StepBounds, decode_step_inputs, step_inputs
from octavo_worker.step_profile import StepProfile
from octavo_worker.step_work import StepWork

KVCaches = list[tuple[torch.Tensor, torch.Tensor]]
# Steps launched and not yet read, at most.
_MAX_IN_FLIGHT = 4


class Model(Protocol):
    """What the runner asks of a model; T tokens, E entries, V vocabulary."""

    def forward(self, inputs: StepInputs, kv_caches: KVCaches, backend: Backend) -> torch.Tensor:
        """Hidden states after the final norm: [T, hidden size], or of `inputs.readout` [E, ...]."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 [E, V] of hidden [E, hidden size]."""
        ...


class DecodeProgram(Protocol):
    """A model's decode step in one piece, sampling and the rows' update included."""

    def step(
        self, rows: torch.Tensor, held: RowTensors, block_size: int, kv_caches: KVCaches
    ) -> torch.Tensor:
        """Tokens and events, int64 [2, S], of `rows` (int64 [S])."""
        ...


class Runner:
    """One worker's steps, in order. Not thread-safe: the engine's thread owns it."""

    def __init__(
        self,
        model: Model,
        backend: Backend,
        kv_caches: KVCaches,
        limits: RowLimits,
        device: torch.device,
        *,
        decode: DecodeProgram | None = None,
    ) -> None:
        """`decode`: a faster way to the same decode steps, for a few rows."""
        self._model = model
        self._decode = decode
        self._backend = backend
        self._kv_caches = kv_caches
        self._device = device
        self._limits = limits
        self._book = RowBook(limits)
        # One spare row, never held and so always dead, pads the batches of captured steps.
        self._spare_row = limits.num_rows
        self._rows = RowTensors(limits.num_rows + 1, limits.max_blocks_per_row, device)
        self._graphs: DecodeGraphs | None = None
        self._mixed_graphs: MixedGraphs | None = None
        # On a CPU a result needs no copy.
        self._results: ResultRing | None = None
        if device.type != "cpu":
            most_values = 2 * (limits.num_rows + MOST_CHUNKS)
            self._results = ResultRing(_MAX_IN_FLIGHT, most_values, is_pinned=True)
        self._rules = LogitRules(limits, self._rows)
        self._pending: deque[PendingStep] = deque()
        self._step = 0
        self._plan_id = 0
        self._repeat = 0
        self._decode_until = 0
        # Where the last step ended: an event, or a time on a device without any.
        self._last_done: torch.cuda.Event | None = None
        self._last_end_ns = 0
        self.sealed = SealedBlocks(limits.num_blocks)
        # By perf_counter: when the last poll found its step done, so that one more may be launched.
        self.room_ns = 0
        # Prompt tokens of a step up to which it is captured, too; set before `capture`.
        self.max_graph_tokens = 0
        # Set by who wants to know where the time of each step goes.
        self.profile: StepProfile | None = None

    @property
    def num_in_flight(self) -> int:
        """Steps launched and not yet read."""
        return len(self._pending)

    @property
    def num_live_rows(self) -> int:
        return self._book.num_live_rows

    def num_steps_left(self, decode_until: int | None = None) -> int:
        """Steps that the last plan, or one with this `decode_until`, allows from here on."""
        until = self._decode_until if decode_until is None else decode_until
        return max(0, until - self._step)

    @property
    def can_repeat(self) -> bool:
        """Whether the last plan allows one more step, and any row would decode in it."""
        return self._step < self._decode_until and self._book.can_decode

    def capture(self, error_mode: str = "global") -> None:
        """Capture steps in CUDA graphs: from now on they are launched as a whole.

        `error_mode`: which threads' other calls spoil a capture; see `torch.cuda.graph`.
        """
        pool = torch.cuda.graph_pool_handle()
        self.pad_steps(partial(capture, pool=pool, error_mode=error_mode))

    @torch.inference_mode()
    def pad_steps(self, capture: Capture) -> None:
        """Run steps in a few shapes from now on, each as `capture` has made it."""
        num_rows, spare_row, device = self._limits.num_rows, self._spare_row, self._device
        shapes = mixed_shapes(self.max_graph_tokens, num_rows)
        mixed = MixedGraphs(self._mixed_step, shapes, spare_row, device)
        mixed.capture(capture)
        graphs = DecodeGraphs(self._decode_step, num_rows, spare_row, device)
        graphs.capture(capture)
        self._graphs, self._mixed_graphs = graphs, mixed

    def reset(self) -> None:
        """A new epoch: no rows, steps and plans count from 1. All steps must have been read."""
        assert not self._pending
        self._step = self._plan_id = self._repeat = self._decode_until = 0
        self._last_done, self._last_end_ns = None, 0
        self._book.clear()
        self._rows.clear()
        self._rules.clear()

    def close(self) -> None:
        """There will be no more steps."""

    @torch.inference_mode()
    def submit(self, plan: Plan | None, arrived_ns: int | None = None) -> None:
        """Launch the step of `plan`, or (None) repeat the decode part of the last one.

        `arrived_ns`: when the plan arrived, by `time.perf_counter_ns`.
        """
        launched_ns = time.perf_counter_ns()
        began = self._record_event()
        had_rows = self._book.num_live_rows > 0
        waited_from = self._last_done if had_rows else None
        gap_ns = launched_ns - self._last_end_ns if had_rows and self._last_end_ns else 0
        self._step += 1
        faults: tuple[RowFault, ...] = ()
        if plan is None:
            self._repeat += 1
            work = self._book.compose(())
        else:
            work, faults = self._apply(plan)
        self.sealed.drop(work.written_blocks)
        draw, prompt = self._run(work) if work.num_tokens else (None, ())
        self._last_done, left_ns = self._record_event(), time.perf_counter_ns()
        self._last_end_ns = left_ns if self._last_done is None else 0
        self._pending.append(
            PendingStep(
                step=self._step,
                plan_id=self._plan_id,
                repeat=self._repeat,
                work=work,
                faults=faults,
                draw=draw,
                prompt=prompt,
                began=began,
                done=self._last_done,
                waited_from=waited_from,
                gap_ns=gap_ns,
                arrived_ns=arrived_ns,
                launched_ns=launched_ns,
                left_ns=left_ns,
            )
        )

    def poll(self, *, wait: bool = True) -> StepOutcome | None:
        """The oldest launched step's outcome; None if there is none (yet, unless `wait`)."""
        if not self._pending:
            return None
        done = self._pending[0].done
        if done is not None:
            if not wait and not done.query():
                return None
            done.synchronize()
        self.room_ns = time.perf_counter_ns()
        step = self._pending.popleft()
        outcome = step.outcome()
        if step.draw is not None and self._results is not None:
            self._results.read()
        self._book.settle(outcome.rows, outcome.generations, outcome.events)
        if self.profile is not None:
            self.profile.note(step)
        return outcome

    # Launching ------------------------------------------------------------------------

    def _apply(self, plan: Plan) -> tuple[StepWork, tuple[RowFault, ...]]:
        """Take in a plan; its step's work and the rows that it failed."""
        self._plan_id, self._repeat, self._decode_until = plan.plan_id, 0, plan.decode_until
        for block_id, block_hash in plan.sealed:
            self.sealed.seal(block_id, block_hash)
        for row in plan.removed_rows:
            self.sealed.touch(self._book.block_ids(row))
        changes = self._book.apply(plan)
        if changes.removed_rows:
            self._rows.remove(changes.removed_rows)
            self._rules.remove(changes.removed_rows)
        if changes.added_rows:
            self._rows.add(changes.added_rows)
            self._rules.add(changes.added_rows)
            for add in changes.added_rows:
                self.sealed.touch(add.block_ids.tolist())
        if len(changes.block_updates):
            self._rows.update_blocks(changes.block_updates)
        failed = [fault.row for fault in changes.faults if self._limits.has_row(fault.row)]
        if failed:
            self._rows.remove(failed)
        return self._book.compose(changes.chunks), changes.faults

    def _run(self, work: StepWork) -> tuple[Draw | None, tuple[PromptDraw, ...]]:
        if (drawn := self._launch(work)) is not None:
            columns = self._copy_result(drawn.columns)
            entries = columns[:, drawn.first : drawn.first + drawn.num_entries]
            return Draw(entries, [], [], None), ()
        shape = shape_of(work)
        sent = SentStep.of(self._rows.upload(pack(work, shape, self._spare_row)), shape)
        inputs = step_inputs(
            *(sent, self._rows, self._limits.block_size, StepBounds.of(work)),
            # Log-probabilities of prompts are read off the hidden states of all their tokens.
            num_entries=None if work.prompt_pieces else len(work.entry_rows),
        )
        hidden = self._model.forward(inputs, self._kv_caches, self._backend)
        draw = self._draw(work, sent, inputs, hidden) if len(work.entry_rows) else None
        to_logits, vocab_size = self._model.logits, self._limits.vocab_size
        prompt: list[PromptDraw] = []
        for piece in work.prompt_pieces:
            tensors = gather_piece(piece, hidden, to_logits, vocab_size)
            prompt.append(PromptDraw(piece, self._logprobs_to_host(tensors)))
        return draw, tuple(prompt)

    def _draw(
        self, work: StepWork, sent: SentStep, inputs: StepInputs, hidden: torch.Tensor
    ) -> Draw:
        """Draw a token for every entry and write it into its row."""
        num_entries = len(work.entry_rows)
        entries = entries_of(sent, inputs, hidden, self._rows, self._spare_row, num_entries)
        rows, positions, was_live = entries.rows, entries.positions, entries.was_live
        logits = self._model.logits(entries.hidden)
        wanted = np.flatnonzero(work.logprob_counts != NO_LOGPROBS)
        counts = work.logprob_counts[wanted].tolist()
        index = self._rows.upload(wanted) if counts else None
        raw_logits = logits[index] if index is not None else None
        tokens, is_good = self._sample(work, logits, rows, positions)
        events = self._rows.advance(rows, positions, tokens, was_live, is_good)
        logprobs = None
        if raw_logits is not None:
            tensors = gather_logprobs(raw_logits, tokens[index], max(counts))
            logprobs = self._logprobs_to_host(tensors)
        packed = torch.stack([tokens, events])
        return Draw(self._copy_result(packed), wanted.tolist(), counts, logprobs)

    def _launch(self, work: StepWork) -> Drawn | None:
        """Launch the step as a whole; None if it isn't captured."""
        if self._graphs is None or self._mixed_graphs is None or not self._is_plain(work):
            return None
        if work.chunks:
            return self._mixed_graphs.launch(work)
        return self._graphs.launch(work.decode_rows)

    def _is_plain(self, work: StepWork) -> bool:
        """Whether rows ask for nothing but tokens: what captured steps compute."""
        return (
            work.rules is None
            and not work.prompt_pieces
            and not self._rows.has_wide_stop_ids(work.entry_rows)
            and bool((work.logprob_counts == NO_LOGPROBS).all())
        )

    def _decode_step(self, rows: torch.Tensor) -> torch.Tensor:
        """The decode step of `rows` (int64 [S]) without the host: tokens and events [2, S]."""
        if self._decode is not None:
            return self._decode.step(rows, self._rows, self._limits.block_size, self._kv_caches)
        inputs = decode_step_inputs(rows, self._rows, self._limits.block_size)
        hidden = self._model.forward(inputs, self._kv_caches, self._backend)
        logits = self._model.logits(hidden)
        positions = inputs.decode_context_lens.long()
        return self._draw_plain(logits, rows, positions, self._rows.is_live[rows])

    def _mixed_step(self, sent: SentStep) -> torch.Tensor:
        """The step that was `sent` without the host: tokens and events [2, C + S]."""
        num_entries = sent.shape.num_chunks + sent.shape.num_rows
        inputs = step_inputs(sent, self._rows, self._limits.block_size, num_entries=num_entries)
        hidden = self._model.forward(inputs, self._kv_caches, self._backend)
        entries = entries_of(sent, inputs, hidden, self._rows, self._spare_row, num_entries)
        logits = self._model.logits(entries.hidden)
        return self._draw_plain(logits, entries.rows, entries.positions, entries.was_live)

    def _draw_plain(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        was_live: torch.Tensor,
    ) -> torch.Tensor:
        """Draw a token for each of `rows` [E], whatever they ask for: int64 [2, E]."""
        is_good = _is_good(logits)
        params = self._rows.sampling_tensors(rows, positions, all_greedy=False, any_filter=True)
        tokens = self._backend.sample(logits, params)
        events = self._rows.advance(
            rows, positions, tokens, was_live, is_good, has_wide_stop_ids=False
        )
        return torch.stack([tokens, events])

    def _sample(
        self, work: StepWork, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens int64 [E], whether each row's logits were good bool [E]); changes `logits`."""
        rules = None
        if work.rules is not None:
            rules = self._rules.of_step(work.rules, work.entry_rows, positions)
            self._rules.apply(rules, logits)
        # No rule hides a NaN or +inf: what they mask, they mask by adding -inf.
        is_good = _is_good(logits)
        params = self._rows.sampling_tensors(
            rows, positions, all_greedy=work.all_greedy, any_filter=work.any_filter
        )
        tokens = self._backend.sample(logits, params)
        if rules is not None:
            self._rules.note(rules, tokens)
        return tokens, is_good

    def _copy_result(self, columns: torch.Tensor) -> torch.Tensor:
        return columns if self._results is None else self._results.copy(columns)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cpu":
            return tensor
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor, non_blocking=True)

    def _logprobs_to_host(self, tensors: LogprobTensors) -> LogprobTensors:
        return LogprobTensors(*map(self._to_host, tensors))

    def _record_event(self) -> torch.cuda.Event | None:
        if self._device.type == "cpu":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _is_good(logits: torch.Tensor) -> torch.Tensor:
    """bool [E]: a token can be drawn from the row's logits [E, V].

    The maximum of a row with a NaN is NaN, of one with nothing finite -inf; a logit of -inf among
    others only says that its token is never drawn.
    """
    return logits.amax(dim=-1).isfinite()
