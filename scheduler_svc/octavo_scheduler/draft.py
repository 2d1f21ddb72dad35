"""A worker's plans: the one being drafted, those that were sent, and whose rows they end.

Must not know: blocks, results, time. Entry points: `Draft`, `SentPlan`, `Leaving`.
"""

from dataclasses import dataclass, field

from octavo_scheduler.plan import Chunk
from octavo_scheduler.sequence import FinishReason, Sequence
from octavo_scheduler.step_cost import NO_CHUNKS, ChunkWork


@dataclass(frozen=True, slots=True)
class SentChunk:
    """A chunk of a sent plan: which holder's known tokens are computed up to `end`."""

    sequence: Sequence
    end: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class SentPlan:
    """What results are read against."""

    plan_id: int = 0
    decode_until: int = 0
    chunks: tuple[SentChunk, ...] = ()
    added: tuple[Sequence, ...] = ()
    work: ChunkWork = NO_CHUNKS

    @property
    def num_prefill_tokens(self) -> int:
        return self.work.num_tokens


@dataclass(frozen=True, slots=True)
class Leaving:
    """A holder whose row was released in plan `plan_id`; then it queues again, or ends."""

    sequence: Sequence
    plan_id: int
    end_as: FinishReason | None = None


@dataclass(slots=True)
class Draft:
    """What the next plan will carry."""

    removed: list[int] = field(default_factory=list[int])
    added: list[Sequence] = field(default_factory=list[Sequence])
    updates: list[int] = field(default_factory=list[int])
    chunks: list[Chunk] = field(default_factory=list[Chunk])
    sent_chunks: list[SentChunk] = field(default_factory=list[SentChunk])
    work: ChunkWork = NO_CHUNKS
    # A row that lives on the device is released: don't wait for other reasons to send.
    is_urgent: bool = False

    def drop_updates(self, row: int) -> None:
        """Forget the row's table entries: the draft's next holder must not get them."""
        triples = zip(*[iter(self.updates)] * 3, strict=True)
        self.updates = [value for triple in triples if triple[0] != row for value in triple]
