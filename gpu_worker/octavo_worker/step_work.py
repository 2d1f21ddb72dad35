"""The rows of one step: what the row book decides and the runner computes.

Must not know: row states, tensors.

E entries (drawn tokens) of a step, S decode rows.
"""

from dataclasses import dataclass

import numpy as np

from octavo_worker.plan import I64, Chunk
from octavo_worker.prompt_piece import PromptPiece


@dataclass(frozen=True, slots=True)
class RuleEntries:
    """Indices of the entries whose logits change before the draw, by kind of rule."""

    penalties: I64
    bias: I64
    phrases: I64
    unfinished: I64  # an ending id would come too early

    def all(self) -> I64:
        """Entries with any rule; some may be there twice."""
        return np.concatenate([self.penalties, self.bias, self.phrases, self.unfinished])


@dataclass(frozen=True, slots=True)
class StepWork:
    """The rows of one step. Entries: last chunks in order, then decode rows."""

    chunks: tuple[Chunk, ...]
    decode_rows: I64  # [S]
    max_context_decode: int
    entry_rows: I64  # [E]
    entry_generations: I64  # [E]
    logprob_counts: I64  # [E] alternatives wanted, NO_LOGPROBS = none at all
    all_greedy: bool
    any_filter: bool
    rules: RuleEntries | None  # None: no entry has any
    prompt_pieces: tuple[PromptPiece, ...]
    written_blocks: I64

    @classmethod
    def of_nothing(cls) -> "StepWork":
        none = np.empty(0, np.int64)
        return cls((), none, 0, none, none, none, True, False, None, (), none)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + len(self.decode_rows)
