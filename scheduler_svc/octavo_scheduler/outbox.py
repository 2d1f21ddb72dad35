"""What a session is owed, gathered until the next frame: notes, and tokens.

Tokens stay in columns; steps that share a frame are merged so that a sequence has one entry.
A frame is taken when the stream can take one, so a slow reader gets fewer, larger frames.

Must not know: grpc, protos. Entry points: `Outbox.push`, `Outbox.take`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import OctavoError
from octavo_scheduler.plan import U32
from octavo_scheduler.results import TokenColumns
from octavo_scheduler.sequence import FinishReason


@dataclass(frozen=True, slots=True)
class StartedNote:
    """A sequence got a row for the first time."""

    handle: int
    sequence_index: int
    num_cached_tokens: int
    queue_ms: int


@dataclass(frozen=True, slots=True)
class PromptLogprobsNote:
    """Log-probabilities of a prompt's tokens from position `start` on; opaque messages."""

    handle: int
    start: int
    entries: Sequence[Any]


@dataclass(frozen=True, slots=True)
class FinishedNote:
    """A sequence ended; `num_tokens` were sent for it in all (delivered before included)."""

    handle: int
    sequence_index: int
    reason: FinishReason
    num_tokens: int
    num_preemptions: int
    num_moves: int
    error: OctavoError | None = None


@dataclass(frozen=True, slots=True)
class RejectedNote:
    """A request was refused as a whole."""

    handle: int
    error: OctavoError


@dataclass(frozen=True, slots=True)
class SuspectNote:
    """So many workers were lost while they began a request."""

    handle: int
    num_suspicions: int


@dataclass(frozen=True, slots=True)
class TokenFrame:
    """Columns [E] with one entry a sequence, and the entries' ids one after the other."""

    handles: npt.NDArray[np.uint64]
    indexes: U32
    counts: U32
    token_ids: U32
    logprobs: dict[int, Any]


@dataclass(slots=True)
class Frame:
    """Everything owed since the last frame. `number`: 1, 2, 3, ... in a session."""

    number: int = 0
    started: list[StartedNote] = field(default_factory=list[StartedNote])
    prompt_logprobs: list[PromptLogprobsNote] = field(default_factory=list[PromptLogprobsNote])
    tokens: TokenFrame | None = None
    finished: list[FinishedNote] = field(default_factory=list[FinishedNote])
    rejected: list[RejectedNote] = field(default_factory=list[RejectedNote])
    suspects: list[SuspectNote] = field(default_factory=list[SuspectNote])


class Outbox:
    """One session's pending output; `on_dirty` is called when there is something to send."""

    def __init__(self, on_dirty: Callable[[], None]) -> None:
        self._on_dirty = on_dirty
        self._frame = Frame()
        self._pieces: list[TokenColumns] = []
        self._num_taken = 0

    @property
    def is_empty(self) -> bool:
        frame = self._frame
        notes = frame.started or frame.prompt_logprobs or frame.finished or frame.rejected
        return not (self._pieces or notes or frame.suspects)

    def push(self, tokens: TokenColumns) -> None:
        """Tokens of one step, at most one a sequence and call."""
        if tokens.token_ids.size:
            self._pieces.append(tokens)
            self._on_dirty()

    def started(self, note: StartedNote) -> None:
        """It travels with the next frame: one of its own would hold up the first token's."""
        self._frame.started.append(note)

    def prompt_logprobs(self, note: PromptLogprobsNote) -> None:
        self._frame.prompt_logprobs.append(note)
        self._on_dirty()

    def finished(self, note: FinishedNote) -> None:
        self._frame.finished.append(note)
        self._on_dirty()

    def rejected(self, note: RejectedNote) -> None:
        self._frame.rejected.append(note)
        self._on_dirty()

    def suspect(self, note: SuspectNote) -> None:
        """At once: what its worker did not survive may be the end of this process too."""
        self._frame.suspects.append(note)
        self._on_dirty()

    def take(self) -> Frame:
        """The frame that is owed now; nothing is pending afterwards."""
        frame, self._frame = self._frame, Frame()
        pieces, self._pieces = self._pieces, []
        if pieces:
            frame.tokens = _merge(pieces)
        self._num_taken += 1
        frame.number = self._num_taken
        return frame


def _merge(pieces: list[TokenColumns]) -> TokenFrame:
    if len(pieces) == 1:
        piece = pieces[0]
        counts = np.ones(piece.token_ids.size, np.uint32)
        return TokenFrame(piece.handle, piece.index, counts, piece.token_ids, piece.logprobs)
    handles = np.concatenate([piece.handle for piece in pieces])
    indexes = np.concatenate([piece.index for piece in pieces])
    token_ids = np.concatenate([piece.token_ids for piece in pieces])
    # Stable: tokens of a sequence stay in the order of their steps.
    order = np.lexsort((indexes, handles))
    handles, indexes = handles[order], indexes[order]
    is_first = np.ones(order.size, np.bool_)
    is_first[1:] = (handles[1:] != handles[:-1]) | (indexes[1:] != indexes[:-1])
    starts = np.flatnonzero(is_first)
    counts = np.diff(starts, append=order.size).astype(np.uint32)
    logprobs: dict[int, Any] = {}
    if any(piece.logprobs for piece in pieces):
        place = np.empty(order.size, np.int64)
        place[order] = np.arange(order.size)
        base = 0
        for piece in pieces:
            for entry, value in piece.logprobs.items():
                logprobs[int(place[base + entry])] = value
            base += piece.token_ids.size
    return TokenFrame(handles[starts], indexes[starts], counts, token_ids[order], logprobs)
