"""Builds a step's `StepInputs` from its rows: chunks come from the host, the rest is on the device.

Must not know: plans' checks, models. Entry point: `build_step_inputs`.
"""

import numpy as np
import torch

from octavo_worker.attention_inputs import StepInputs
from octavo_worker.plan import Chunk
from octavo_worker.row_book import StepWork
from octavo_worker.rows import RowTensors


def build_step_inputs(work: StepWork, rows: RowTensors, block_size: int) -> StepInputs:
    """The step's inputs. Device-dead decode rows get length 0 and slot -1."""
    chunks = work.chunks
    lens = np.array([len(chunk.token_ids) for chunk in chunks], np.int64)
    context_lens = np.array([chunk.end for chunk in chunks], np.int64)
    max_context = int(context_lens.max(initial=0))
    ids, positions, slots, table = _prefill_tokens(chunks, rows, max_context, block_size)
    decode_rows = rows.upload(work.decode_rows)
    decode_ids, decode_positions, decode_slots = _decode_tokens(decode_rows, rows, block_size)
    decode_lens = torch.where(rows.is_live[decode_rows], rows.num_tokens[decode_rows], 0)
    num_columns = -(-work.max_context_decode // block_size)
    return StepInputs(
        input_ids=torch.cat([ids, decode_ids]),
        positions=torch.cat([positions, decode_positions]),
        slot_mapping=torch.cat([slots, decode_slots]),
        num_prefill_tokens=int(lens.sum()),
        cu_seqlens_q=rows.upload(np.concatenate([[0], lens.cumsum()]).astype(np.int32)),
        prefill_context_lens=rows.upload(context_lens.astype(np.int32)),
        prefill_block_table=table,
        max_seqlen_q=int(lens.max(initial=0)),
        max_context_prefill=max_context,
        decode_context_lens=decode_lens.to(torch.int32),
        decode_block_table=rows.block_table[decode_rows, :num_columns],
        max_context_decode=work.max_context_decode,
    )


def decode_step_inputs(decode_rows: torch.Tensor, rows: RowTensors, block_size: int) -> StepInputs:
    """Inputs of a step that only decodes `decode_rows` (int64 [S], on the device).

    Nothing here asks the host: a CUDA graph can hold it. The block table has all its columns,
    since how many are needed is known to the host alone.
    """
    ids, positions, slots = _decode_tokens(decode_rows, rows, block_size)
    context_lens = torch.where(rows.is_live[decode_rows], rows.num_tokens[decode_rows], 0)
    nothing = torch.zeros(0, dtype=torch.int32, device=rows.device)
    return StepInputs(
        input_ids=ids,
        positions=positions,
        slot_mapping=slots,
        num_prefill_tokens=0,
        cu_seqlens_q=torch.zeros(1, dtype=torch.int32, device=rows.device),
        prefill_context_lens=nothing,
        prefill_block_table=nothing.view(0, 0),
        max_seqlen_q=0,
        max_context_prefill=0,
        decode_context_lens=context_lens.to(torch.int32),
        decode_block_table=rows.block_table[decode_rows],
        max_context_decode=rows.block_table.shape[1] * block_size,
    )


def _prefill_tokens(
    chunks: tuple[Chunk, ...], rows: RowTensors, max_context: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, positions and slots [Tp] of the chunks' tokens; block tables [C, M]."""
    table = rows.block_table[rows.upload(np.array([chunk.row for chunk in chunks], np.int64))]
    table = table[:, : -(-max_context // block_size)]
    no_tokens = np.empty(0, np.int64)
    host = np.stack(
        [
            np.concatenate([no_tokens, *(chunk.token_ids for chunk in chunks)]),
            np.concatenate([no_tokens, *(np.arange(c.start, c.end) for c in chunks)]),
            np.repeat(np.arange(len(chunks)), [len(chunk.token_ids) for chunk in chunks]),
        ]
    ).astype(np.int64)
    ids, positions, owners = rows.upload(host)
    slots = table[owners, positions // block_size].long() * block_size + positions % block_size
    return ids, positions, slots, table


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
