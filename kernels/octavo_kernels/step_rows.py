"""A decode step's two ends as one kernel each: reading the rows, and writing what they drew.

The rows live in tensors of one entry a row (R rows); a step names S of them. `begin` gathers what
the model and the sampler read; `end` appends each row's token, says what became of the row, and
leaves the rows as the next step reads them. As torch operations these are some forty kernels of
two microseconds, which a small model's step can't afford.

Events: 0 goes on, 1 stopped by an ending id, 2 by its length, 3 bad logits, -1 was dead before.
S rows of the step, M block-table columns, W ending ids a row.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.launch import Launch, next_power_of_2, offset64

_TILE = 128


class Begun(NamedTuple):
    """What a step's rows [S] bring along; a dead row has context 0, position 0 and slot -1."""

    input_ids: Tensor  # int64
    positions: Tensor  # int64
    slots: Tensor  # int64
    context_lens: Tensor  # int32
    block_table: Tensor  # int32 [S, M]
    temperature: Tensor  # float32
    top_p: Tensor  # float32
    top_k: Tensor  # int32
    min_p: Tensor  # float32
    seed: Tensor  # int64
    sequence_index: Tensor  # int32
    draw_positions: Tensor  # int64: of the token that will be drawn


@triton.jit
def _begin_kernel(
    input_ids,
    positions,
    slots,
    context_lens,
    block_table_out,
    temperature_out,
    top_p_out,
    top_k_out,
    min_p_out,
    seed_out,
    sequence_index_out,
    draw_positions,
    rows,
    is_live,
    last_token,
    num_tokens,
    block_table,
    temperature,
    top_p,
    top_k,
    min_p,
    seed,
    sequence_index,
    num_columns,
    stride_table,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    index = tl.program_id(0)
    row = tl.load(rows + index)
    live = tl.load(is_live + row) != 0
    length = tl.load(num_tokens + row)
    position = tl.where(live, length - 1, 0)
    table = block_table + offset64(row, stride_table)
    block = tl.load(table + position // BLOCK).to(tl.int64)
    slot = tl.where(live, block * BLOCK + position % BLOCK, -1)
    context = tl.where(live, length, 0)
    tl.store(input_ids + index, tl.load(last_token + row))
    tl.store(positions + index, position)
    tl.store(slots + index, slot)
    tl.store(context_lens + index, context.to(tl.int32))
    tl.store(draw_positions + index, context)
    tl.store(temperature_out + index, tl.load(temperature + row))
    tl.store(top_p_out + index, tl.load(top_p + row))
    tl.store(top_k_out + index, tl.load(top_k + row))
    tl.store(min_p_out + index, tl.load(min_p + row))
    tl.store(seed_out + index, tl.load(seed + row))
    tl.store(sequence_index_out + index, tl.load(sequence_index + row))
    # Columns beyond the context are never read: a long table costs no more than it holds.
    num_used = (context + BLOCK - 1) // BLOCK
    for start in range(0, num_used, TILE):
        column = start + tl.arange(0, TILE)
        mask = column < num_used
        value = tl.load(table + column, mask=mask)
        tl.store(block_table_out + offset64(index, num_columns) + column, value, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _end_kernel(
    drawn,  # int64 [2, S]: tokens, events
    rows,
    sampled,  # int64 [S], -1 = bad logits
    draw_positions,
    is_live,
    last_token,
    num_tokens,
    stop_token_ids,
    min_total_tokens,
    max_total_tokens,
    num_rows,
    STOPS: tl.constexpr,
    STOPS_PAD: tl.constexpr,
):
    index = tl.program_id(0)
    row = tl.load(rows + index)
    was_live = tl.load(is_live + row) != 0
    token = tl.load(sampled + index)
    total = tl.load(draw_positions + index) + 1
    stop = tl.arange(0, STOPS_PAD)
    ids = tl.load(stop_token_ids + row * STOPS + stop, mask=stop < STOPS, other=-1)
    is_bad = token < 0
    token = tl.maximum(token, 0)
    is_ending = tl.sum((ids == token).to(tl.int32), axis=0) > 0
    is_ending = is_ending & (total >= tl.load(min_total_tokens + row))
    event = tl.where(total >= tl.load(max_total_tokens + row), 2, 0)
    event = tl.where(is_ending, 1, event)
    event = tl.where(is_bad, 3, event)
    event = tl.where(was_live, event, -1)
    tl.store(drawn + index, token)
    tl.store(drawn + num_rows + index, event.to(tl.int64))
    tl.store(last_token + row, token)
    tl.store(num_tokens + row, total)
    tl.store(is_live + row, (event == 0).to(tl.int8))


class Rows(NamedTuple):
    """The row tensors, one entry a row: see `octavo_worker.rows.RowTensors`."""

    is_live: Tensor  # bool [R]
    last_token: Tensor  # int64 [R]
    num_tokens: Tensor  # int64 [R]
    block_table: Tensor  # int32 [R, M]
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    seed: Tensor
    sequence_index: Tensor
    stop_token_ids: Tensor  # int64 [R, W]
    min_total_tokens: Tensor  # int64 [R]
    max_total_tokens: Tensor  # int64 [R]


def begin_launch(out: Begun, rows: Tensor, held: Rows, block_size: int) -> Launch:
    num_columns = held.block_table.shape[1]
    sampling = (held.temperature, held.top_p, held.top_k, held.min_p, held.seed)
    return Launch(
        kernel=_begin_kernel,
        grid=(rows.shape[0],),
        args=(
            *out,
            rows,
            held.is_live.view(torch.int8),
            held.last_token,
            held.num_tokens,
            held.block_table,
            *sampling,
            held.sequence_index,
            num_columns,
            held.block_table.stride(0),
        ),
        constants={"BLOCK": block_size, "TILE": _TILE},
        num_warps=1,
    )


def begin(rows: Tensor, held: Rows, block_size: int) -> Begun:
    """What `rows` (int64 [S]) bring along. Of the block table only what a context needs is set."""
    size, device = rows.shape[0], rows.device

    def empty(dtype: torch.dtype, *more: int) -> Tensor:
        return torch.empty((size, *more), dtype=dtype, device=device)

    out = Begun(
        input_ids=empty(torch.int64),
        positions=empty(torch.int64),
        slots=empty(torch.int64),
        context_lens=empty(torch.int32),
        block_table=empty(torch.int32, held.block_table.shape[1]),
        temperature=empty(torch.float32),
        top_p=empty(torch.float32),
        top_k=empty(torch.int32),
        min_p=empty(torch.float32),
        seed=empty(torch.int64),
        sequence_index=empty(torch.int32),
        draw_positions=empty(torch.int64),
    )
    begin_launch(out, rows, held, block_size).run()
    return out


def end_launch(
    drawn: Tensor, rows: Tensor, sampled: Tensor, draw_positions: Tensor, held: Rows
) -> Launch:
    num_stops = held.stop_token_ids.shape[1]
    return Launch(
        kernel=_end_kernel,
        grid=(rows.shape[0],),
        args=(
            drawn,
            rows,
            sampled,
            draw_positions,
            held.is_live.view(torch.int8),
            held.last_token,
            held.num_tokens,
            held.stop_token_ids,
            held.min_total_tokens,
            held.max_total_tokens,
            rows.shape[0],
        ),
        constants={"STOPS": num_stops, "STOPS_PAD": next_power_of_2(num_stops)},
        num_warps=1,
    )


def end(rows: Tensor, sampled: Tensor, draw_positions: Tensor, held: Rows) -> Tensor:
    """Append `sampled` (int64 [S], -1 = bad logits) to `rows`; tokens and events int64 [2, S]."""
    drawn = torch.empty((2, rows.shape[0]), dtype=torch.int64, device=rows.device)
    end_launch(drawn, rows, sampled, draw_positions, held).run()
    return drawn
