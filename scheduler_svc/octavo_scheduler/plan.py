"""What travels between the scheduler's stages: plans and results. Plain data.

`worker.proto` is the law that these follow; `dispatch.py` turns them into messages and back.
Must not know: protos, policies.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]
U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class AddedRow:
    """A sequence takes a row; `sampling` is an opaque serialized message.

    `history` is packed u32: all known tokens, or empty for a row that doesn't need them.
    """

    row: int
    generation: int
    sampling: bytes
    sequence_index: int
    block_ids: tuple[int, ...]
    num_computed_tokens: int
    max_total_tokens: int
    min_total_tokens: int
    num_prompt_tokens: int
    history: bytes = b""
    reports_prompt: bool = False
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Known tokens [start, start + len) of a row to compute; `token_ids` is packed u32."""

    row: int
    start: int
    token_ids: bytes
    is_last: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """The order for one step. `block_updates` is flat: row, table index, block id, ..."""

    plan_id: int
    removed_rows: tuple[int, ...] = ()
    added_rows: tuple[AddedRow, ...] = ()
    block_updates: tuple[int, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    sealed_blocks: tuple[int, ...] = ()
    sealed_hashes: bytes = b""
    decode_until: int = 0


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """Log-probabilities of prompt tokens from position `start` on; opaque messages."""

    row: int
    generation: int
    start: int
    entries: Sequence[Any]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One step's result: columns with one entry per drawn token.

    `logprobs`: entry -> opaque message; `errors`: (row, generation) -> what went wrong.
    """

    step: int
    plan_id: int
    repeat: int
    rows: U32
    generations: U32
    token_ids: U32
    events: U8
    logprobs: dict[int, Any] = field(default_factory=dict[int, Any])
    errors: dict[tuple[int, int], str] = field(default_factory=dict[tuple[int, int], str])
    step_us: int = 0
    prompt_logprobs: Sequence[PromptPiece] = ()
