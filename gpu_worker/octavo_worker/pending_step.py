"""A launched step, and what it drew, on the way to the host.

Must not know: how steps are launched (`runner`). Entry point: `PendingStep.outcome`.

E entries (drawn tokens) of a step, E' of them asked for logprobs.
"""

import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from octavo.row_event import RowEvent
from octavo_worker.logprobs import LogprobTensors, to_entries
from octavo_worker.plan import I64, EntryLogprobs, RowFault, StepOutcome
from octavo_worker.prompt_logprobs import to_prompt_logprobs
from octavo_worker.prompt_piece import PromptPiece
from octavo_worker.rows import NOTHING_DRAWN
from octavo_worker.step_work import StepWork


@dataclass(frozen=True, slots=True)
class Draw:
    """What a step drew."""

    tokens_and_events: torch.Tensor  # int64 [2, E], filled once the step is done
    logprob_entries: list[int]  # [E']
    logprob_counts: list[int]  # [E'] alternatives that each wants
    logprobs: LogprobTensors | None


class PromptDraw(NamedTuple):
    """Log-probabilities of prompt tokens, filled once the step is done."""

    piece: PromptPiece
    tensors: LogprobTensors


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A launched step. `began`, `done`: where it lies in the stream, None if it was over when
    launched. `waited_from`: where the step before it ended, None if no row was live in between
    or the steps have no events; then `gap_ns` counts. Times by perf_counter: when the plan arrived
    (None for a repeat), when its launch began, and when the host had launched it."""

    step: int
    plan_id: int
    repeat: int
    work: StepWork
    faults: tuple[RowFault, ...]
    draw: Draw | None
    prompt: tuple[PromptDraw, ...]
    began: torch.cuda.Event | None
    done: torch.cuda.Event | None
    waited_from: torch.cuda.Event | None
    gap_ns: int
    arrived_ns: int | None
    launched_ns: int
    left_ns: int

    @property
    def wait_us(self) -> int:
        """From the plan's arrival to its launch."""
        return 0 if self.arrived_ns is None else (self.launched_ns - self.arrived_ns) // 1000

    def gap_us(self) -> int:
        """How long the device idled before the step although rows were live."""
        if self.began is None or self.waited_from is None:
            return self.gap_ns // 1000
        return int(1000 * self.waited_from.elapsed_time(self.began))

    def step_us(self) -> int:
        """How long the step took, waiting behind earlier ones not counted."""
        if self.began is None or self.done is None:
            return (time.perf_counter_ns() - self.launched_ns) // 1000
        return int(1000 * self.began.elapsed_time(self.done))

    def outcome(self) -> StepOutcome:
        """The result; only once the step is done."""
        work = self.work
        columns = np.empty((4, 0), np.int64)
        logprobs: tuple[EntryLogprobs, ...] = ()
        if self.draw is not None:
            tokens, events = self.draw.tokens_and_events.numpy()
            is_drawn = events != NOTHING_DRAWN
            columns = np.stack([work.entry_rows, work.entry_generations, tokens, events])
            logprobs = _logprobs(self.draw, events)
            columns = columns[:, is_drawn]
        faults = (*self.faults, *_device_faults(columns, work))
        columns = np.concatenate([columns, _fault_columns(self.faults)], axis=1)
        return StepOutcome(
            step=self.step,
            plan_id=self.plan_id,
            repeat=self.repeat,
            rows=columns[0].astype(np.uint32),
            generations=columns[1].astype(np.uint32),
            token_ids=columns[2].astype(np.uint32),
            events=columns[3].astype(np.uint8),
            logprobs=logprobs,
            faults=faults,
            num_prefill_tokens=work.num_prefill_tokens,
            num_decode_tokens=len(work.decode_rows),
            wait_us=self.wait_us,
            step_us=self.step_us(),
            gap_us=self.gap_us(),
            launch_us=(self.left_ns - self.launched_ns) // 1000,
            prompt_logprobs=tuple(to_prompt_logprobs(*drawn) for drawn in self.prompt),
        )


def _logprobs(draw: Draw, events: npt.NDArray[np.int64]) -> tuple[EntryLogprobs, ...]:
    """Of the entries that drew a token, by their place among these."""
    if draw.logprobs is None:
        return ()
    place = np.cumsum(events != NOTHING_DRAWN) - 1
    entries = [int(place[entry]) for entry in draw.logprob_entries]
    has_value = [
        events[entry] not in (NOTHING_DRAWN, RowEvent.ERROR) for entry in draw.logprob_entries
    ]
    found = to_entries(draw.logprobs, entries, draw.logprob_counts)
    return tuple(item for item, is_kept in zip(found, has_value, strict=True) if is_kept)


def _device_faults(columns: I64, work: StepWork) -> list[RowFault]:
    bad = columns[:2, columns[3] == RowEvent.ERROR].T.tolist()
    if not bad:
        return []
    ruled = set(work.entry_rows[work.rules.all()].tolist()) if work.rules is not None else set()
    return [RowFault(row, generation, _bad_value(row in ruled)) for row, generation in bad]


def _bad_value(has_rules: bool) -> str:
    """What a row can fail of on the device."""
    if has_rules:
        return "non-finite logits, or bias, allowed_token_ids, bad_words and min_tokens bar all"
    return "non-finite logits"


def _fault_columns(faults: tuple[RowFault, ...]) -> I64:
    """Each failed row's last event is ERROR."""
    entries = [(fault.row, fault.generation, 0, int(RowEvent.ERROR)) for fault in faults]
    return np.array(entries, np.int64).reshape(-1, 4).T
