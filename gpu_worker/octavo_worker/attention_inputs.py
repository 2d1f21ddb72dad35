"""What a model's forward pass needs to know about one step, and how one of its layers attends.

`StepInputs` is built by `step_inputs`, `AttentionOptions` by models; backends read both. Must not
know: plans, requests, samplers.

T tokens of the step, C prefill chunks, S decode rows, N blocks, B block size, M block-table
columns. Token order: the tokens of all chunks first, then one token for each decode row.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tensors of one step, all on the worker's device."""

    input_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    slot_mapping: torch.Tensor  # int64 [T]; block id * B + offset, -1 = store nothing

    # The first `num_prefill_tokens` tokens: chunk c is [cu_seqlens_q[c], cu_seqlens_q[c + 1]).
    # What lies behind the last chunk is padding (slot -1), as are empty chunks.
    num_prefill_tokens: int
    cu_seqlens_q: torch.Tensor  # int32 [C + 1]; without chunks it may be empty
    prefill_context_lens: torch.Tensor  # int32 [C]; history plus chunk
    prefill_block_table: torch.Tensor  # int32 [C, M]
    max_seqlen_q: int
    max_context_prefill: int

    # The other tokens, one a row.
    decode_context_lens: torch.Tensor  # int32 [S]; with the token being computed, 0 = dead row
    decode_block_table: torch.Tensor  # int32 [S, M]
    max_context_decode: int

    # No chunk has tokens before it. What isn't known to the host is none.
    is_fresh: bool = False

    # None: the hidden states of all tokens are read.
    readout: "Readout | None" = None

    @classmethod
    def of_rows(
        cls,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        context_lens: torch.Tensor,
        block_table: torch.Tensor,
        max_context: int,
    ) -> Self:
        """A step that only decodes."""
        nothing = context_lens[:0]
        return cls(
            input_ids=input_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            num_prefill_tokens=0,
            cu_seqlens_q=nothing,
            prefill_context_lens=nothing,
            prefill_block_table=nothing.view(0, 0),
            max_seqlen_q=0,
            max_context_prefill=0,
            decode_context_lens=context_lens,
            decode_block_table=block_table,
            max_context_decode=max_context,
        )

    @property
    def num_decode_rows(self) -> int:
        return self.decode_context_lens.shape[0]


@dataclass(frozen=True, slots=True)
class Readout:
    """The E tokens of a step whose hidden states are read; the others leave keys and values alone.

    So the last layer computes only these, once it has stored those of all.
    """

    tokens: torch.Tensor  # int64 [E]; indices among the step's
    # Of a step in which they are decode rows, dead ones of length 0. Ids and positions, of which
    # nothing is computed any more, aren't there.
    inputs: StepInputs


class KvScales(NamedTuple):
    """What keys and values are divided by before they are stored in 8 bits: float32 [K] each."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How a layer attends; what is the same in every step.

    A query at position p sees the keys p - window < key <= p.
    """

    scale: float
    # Keys that a query sees, itself included; None = all up to its own.
    window: int | None = None
    # Scores become c * tanh(score / c): Gemma 2; None = they stay.
    soft_cap: float | None = None
    # Of a cache of 8-bit floats; None = it has the model's dtype.
    kv_scales: KvScales | None = None
