"""Builds a step's `StepInputs` from what the host sent and from its rows, on the device.

Must not know: plans' checks, models. Entry points: `step_inputs`, `decode_step_inputs`. Nothing
here asks the host: a CUDA graph can hold it.
"""

from dataclasses import replace
from typing import NamedTuple

import torch

from octavo_worker.attention_inputs import Readout, StepInputs
from octavo_worker.rows import RowTensors
from octavo_worker.sent_step import SentStep
from octavo_worker.step_entries import chunk_entries
from octavo_worker.step_work import StepWork

# So many tokens that nothing is read of are worth a last layer of its own shape: a dozen launches.
_LEAST_UNREAD = 512


class StepBounds(NamedTuple):
    """What the host knows of a step's lengths: block tables are as wide as these need."""

    max_seqlen_q: int
    max_context_prefill: int
    max_context_decode: int
    is_fresh: bool = False  # no chunk has tokens before it

    @classmethod
    def of(cls, work: StepWork) -> "StepBounds":
        return cls(
            max((len(chunk.token_ids) for chunk in work.chunks), default=0),
            max((chunk.end for chunk in work.chunks), default=0),
            work.max_context_decode,
            all(chunk.start == 0 for chunk in work.chunks),
        )


def step_inputs(
    sent: SentStep,
    rows: RowTensors,
    block_size: int,
    bounds: StepBounds | None = None,
    *,
    num_entries: int | None = None,
) -> StepInputs:
    """The step's inputs. Device-dead decode rows get length 0 and slot -1, padding tokens slot -1.

    Without `bounds` the step may be any of its shape: it's what a graph is captured of.
    `num_entries`: of all tokens only the last so many entries are read (see `step_entries`); None =
    all. The inputs say so if it saves enough.
    """
    if bounds is None:
        longest = rows.block_table.shape[1] * block_size
        bounds = StepBounds(sent.shape.num_tokens, longest, longest)
    table = rows.block_table[sent.chunk_rows, : -(-bounds.max_context_prefill // block_size)]
    positions = sent.positions
    blocks = table[sent.owners, positions // block_size].long()
    slots = torch.where(sent.owners >= 0, blocks * block_size + positions % block_size, -1)
    decode_ids, decode_positions, decode_slots = _decode_tokens(sent.decode_rows, rows, block_size)
    num_columns = -(-bounds.max_context_decode // block_size)
    inputs = StepInputs(
        input_ids=torch.cat([sent.input_ids, decode_ids]),
        positions=torch.cat([positions, decode_positions]),
        slot_mapping=torch.cat([slots, decode_slots]),
        num_prefill_tokens=sent.shape.num_tokens,
        cu_seqlens_q=sent.cu_seqlens_q.to(torch.int32),
        prefill_context_lens=sent.context_lens.to(torch.int32),
        prefill_block_table=table,
        max_seqlen_q=bounds.max_seqlen_q,
        max_context_prefill=bounds.max_context_prefill,
        decode_context_lens=_decode_context_lens(sent.decode_rows, rows),
        decode_block_table=rows.block_table[sent.decode_rows, :num_columns],
        max_context_decode=bounds.max_context_decode,
        is_fresh=bounds.is_fresh,
    )
    num_tokens = len(inputs.input_ids)
    if num_entries is None or num_tokens - num_entries < _LEAST_UNREAD:
        return inputs
    return replace(inputs, readout=_readout(sent, inputs, rows, block_size, num_entries))


def _readout(
    sent: SentStep, inputs: StepInputs, rows: RowTensors, block_size: int, num_entries: int
) -> Readout:
    last = chunk_entries(sent, num_entries)
    num_tokens = sent.shape.num_tokens
    decoding = torch.arange(num_tokens, num_tokens + sent.shape.num_rows, device=rows.device)
    tokens = torch.cat([sent.entry_states[last], decoding])
    chunk_lens = sent.entry_positions[last].to(torch.int32)  # what a token is drawn behind
    context_lens = torch.cat([chunk_lens, inputs.decode_context_lens])
    longest = max(inputs.max_context_prefill, inputs.max_context_decode)
    entry_rows = torch.cat([sent.entry_rows[last], sent.decode_rows])
    as_decode = StepInputs.of_rows(
        inputs.input_ids[:0],
        inputs.positions[:0],
        torch.where(context_lens > 0, inputs.slot_mapping[tokens], -1),
        context_lens,
        rows.block_table[entry_rows, : -(-longest // block_size)],
        longest,
    )
    return Readout(tokens, as_decode)


def decode_step_inputs(decode_rows: torch.Tensor, rows: RowTensors, block_size: int) -> StepInputs:
    """Inputs of a step that only decodes `decode_rows` (int64 [S], on the device).

    The block table has all its columns, since how many are needed is known to the host alone.
    """
    ids, positions, slots = _decode_tokens(decode_rows, rows, block_size)
    return StepInputs.of_rows(
        ids,
        positions,
        slots,
        _decode_context_lens(decode_rows, rows),
        rows.block_table[decode_rows],
        rows.block_table.shape[1] * block_size,
    )


def _decode_context_lens(decode_rows: torch.Tensor, rows: RowTensors) -> torch.Tensor:
    """int32 [S]; 0 for dead rows."""
    lens = torch.where(rows.is_live[decode_rows], rows.num_tokens[decode_rows], 0)
    return lens.to(torch.int32)


def _decode_tokens(
    decode_rows: torch.Tensor, rows: RowTensors, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, positions and slots [S] of the decode rows' last tokens."""
    is_live = rows.is_live[decode_rows]
    # A dead row computes at position 0 and stores nothing.
    positions = torch.where(is_live, rows.num_tokens[decode_rows] - 1, 0)
    blocks = rows.block_table[decode_rows, positions // block_size].long()
    slots = torch.where(is_live, blocks * block_size + positions % block_size, -1)
    return rows.last_token[decode_rows], positions, slots
