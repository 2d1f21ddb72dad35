"""What a watched cell remembers for its pictures: the last requests, tokens read, workers lost.

A cell has a chronicle only while somebody watches it; otherwise each event costs one look at
None. It holds numbers and names: never a prompt, an answer, a token id, or whose request it was.

Must not know: protos, pictures. Entry points: `Chronicle.placed`, `first_token`, `ended`,
`count`, `lost`; `entries`, `rates`, `losses` for the picture.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from octavo_scheduler.binding import WARM_SHARE
from octavo_scheduler.recovery import Loss
from octavo_scheduler.sequence import FinishReason, Sequence

_MAX_ENTRIES = 50
# Rates are means over this time, or over as much as was seen.
_RATE_WINDOW_S = 2.0
# A lost worker is shown for so long.
_LOSS_SHOWN_S = 120.0


class Why(Enum):
    """Why a sequence runs where it runs; values are shown."""

    ONLY = "only worker"
    PREFIX = "cached prefix"
    LOAD = "least load"


@dataclass(slots=True)
class Entry:
    """One sequence that got a row, or ended without one. Times in seconds; None = not yet."""

    sequence: Sequence | None  # None: it ended, the numbers are final
    serial: int
    request_id: str
    index: int
    num_prompt_tokens: int
    arrival: float
    worker_id: str = ""
    why: Why | None = None
    num_cached_tokens: int = 0
    num_generated: int = 0
    num_preemptions: int = 0
    num_moves: int = 0
    queue_s: float | None = None
    ttft_s: float | None = None
    outcome: FinishReason | None = None


class Rates(NamedTuple):
    """Per second, over the last moments."""

    steps: float = 0.0
    prefill_tokens: float = 0.0
    decode_tokens: float = 0.0


class LostWorker(NamedTuple):
    """A worker that left the cell, and how."""

    loss: Loss
    at: float


@dataclass(slots=True)
class _Meter:
    """Counts of one worker and what they were at the last pictures: (time, counts)."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    samples: deque[tuple[float, int, int, int]] = field(
        default_factory=deque[tuple[float, int, int, int]]
    )


class Chronicle:
    """Bounded memory of one cell, since it is watched."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._entries: OrderedDict[tuple[int, int], Entry] = OrderedDict()
        self._meters: dict[str, _Meter] = {}
        self._losses: dict[str, LostWorker] = {}

    # ---- events of the cell

    def placed(self, sequence: Sequence, worker_id: str, num_workers: int, now: float) -> None:
        """The sequence got a row on one of `num_workers`; not the first one if it came back."""
        entry = self._entry_of(sequence)
        entry.worker_id = worker_id
        entry.num_cached_tokens = sequence.num_cached
        if num_workers == 1:
            entry.why = Why.ONLY
        elif sequence.num_cached >= WARM_SHARE * len(sequence.token_ids):
            entry.why = Why.PREFIX
        else:
            entry.why = Why.LOAD
        if entry.queue_s is None:
            entry.queue_s = now - entry.arrival

    def first_token(self, sequence: Sequence, now: float) -> None:
        """Its prompt was computed, which draws a token; again for one that came back."""
        entry = self._entries.get(_key(sequence))
        if entry is not None and entry.ttft_s is None:
            entry.ttft_s = now - entry.arrival

    def ended(self, sequence: Sequence, reason: FinishReason) -> None:
        entry = self._entry_of(sequence)
        entry.num_generated = sequence.num_generated
        entry.num_preemptions = sequence.num_preemptions
        entry.num_moves = sequence.num_moves
        entry.outcome = reason
        entry.sequence = None

    def count(self, worker_id: str, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        """A step's result was read."""
        meter = self._meters.get(worker_id)
        if meter is None:
            meter = self._meters[worker_id] = _Meter()
        meter.num_steps += 1
        meter.num_prefill_tokens += num_prefill_tokens
        meter.num_decode_tokens += num_decode_tokens

    def lost(self, worker_id: str, loss: Loss, now: float) -> None:
        self._losses[worker_id] = LostWorker(loss, now)
        self._meters.pop(worker_id, None)

    # ---- for the picture

    @property
    def entries(self) -> list[Entry]:
        """The newest first; those that live are brought up to date."""
        for entry in self._entries.values():
            if entry.sequence is not None:
                entry.num_preemptions = entry.sequence.num_preemptions
                entry.num_moves = entry.sequence.num_moves
        return list(reversed(self._entries.values()))

    def rates(self, worker_id: str, now: float) -> Rates:
        """Means since a picture some seconds ago; this one is remembered for the next ones."""
        meter = self._meters.setdefault(worker_id, _Meter())
        samples = meter.samples
        if not samples:
            samples.append((self._since, 0, 0, 0))
        samples.append((now, meter.num_steps, meter.num_prefill_tokens, meter.num_decode_tokens))
        while len(samples) > 2 and samples[1][0] <= now - _RATE_WINDOW_S:
            samples.popleft()
        past_s = now - samples[0][0]
        if past_s <= 0:
            return Rates()
        return Rates(*((samples[-1][i] - samples[0][i]) / past_s for i in (1, 2, 3)))

    def losses(self, now: float) -> dict[str, LostWorker]:
        """Workers lost lately, by id; the caller knows which of them came back."""
        for worker_id, lost in list(self._losses.items()):
            if now - lost.at > _LOSS_SHOWN_S:
                del self._losses[worker_id]
        return dict(self._losses)

    def _entry_of(self, sequence: Sequence) -> Entry:
        key = _key(sequence)
        entry = self._entries.get(key)
        if entry is None:
            request = sequence.request
            entry = self._entries[key] = Entry(
                sequence,
                request.serial,
                request.submission.request_id,
                sequence.index,
                request.num_prompt_tokens,
                request.arrival,
            )
            if len(self._entries) > _MAX_ENTRIES:
                self._entries.popitem(last=False)
        return entry


def _key(sequence: Sequence) -> tuple[int, int]:
    return sequence.request.serial, sequence.index
