"""The entries of a step: its places that draw a token.

Chunks that end their prompt, in order, then decode rows. Must not know: plans' checks, models.
Entry points: `entries_of`, `chunk_entries`, which ask the host nothing: a CUDA graph can hold them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from octavo_worker.attention_inputs import StepInputs
from octavo_worker.rows import RowTensors
from octavo_worker.sent_step import SentStep


class Entries(NamedTuple):
    """What E entries draw from."""

    hidden: Tensor  # [E, hidden size]
    rows: Tensor  # int64 [E]
    positions: Tensor  # int64 [E], of the token drawn
    was_live: Tensor  # bool [E]


def chunk_entries(sent: SentStep, num_entries: int) -> slice:
    """Which of the C places of chunks belong to a step's last `num_entries` entries."""
    num_chunks, num_rows = sent.shape.num_chunks, sent.shape.num_rows
    return slice(num_chunks + num_rows - num_entries, num_chunks)


def entries_of(
    sent: SentStep,
    inputs: StepInputs,
    hidden: Tensor,
    rows: RowTensors,
    spare_row: int,
    num_entries: int,
) -> Entries:
    """The last `num_entries` places of a step's chunks and decode rows; of a captured step all.

    hidden: of these places, [E, hidden size], if that's what the inputs say is read; else of all
    tokens of the step. Of all chunks those that draw nothing are there as `spare_row`, which is
    dead.
    """
    last = chunk_entries(sent, num_entries)
    positions = inputs.decode_context_lens.long()
    is_live = rows.is_live[sent.decode_rows]
    if inputs.readout is None:
        decoding = hidden[inputs.num_prefill_tokens :]
        is_cut = last.start < last.stop
        hidden = torch.cat([hidden[sent.entry_states[last]], decoding]) if is_cut else decoding
    if last.start == last.stop:
        return Entries(hidden, sent.decode_rows, positions, is_live)
    chunk_rows = sent.entry_rows[last]
    return Entries(
        hidden,
        torch.cat([chunk_rows, sent.decode_rows]),
        torch.cat([sent.entry_positions[last], positions]),
        # A row that has just computed its last chunk becomes live by this draw.
        torch.cat([chunk_rows != spare_row, is_live]),
    )
