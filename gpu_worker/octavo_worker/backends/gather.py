"""Gathers: where in the paged cache the contexts of a step lie, for the CPU backend.

A row's blocks lie scattered, so attention first copies them, head by head, into one padded
batch. Layers of like window gather the same blocks: the index is made once a step and window, and
starts with the block of the first key that a query sees. Must not know: layers, scores. Entry
points: `gather_decode`, `gather_prefill`.

S' rows of a batch, K kv heads, D head dim, N blocks, B block size, L padded context.
"""

from dataclasses import dataclass

import torch

from octavo_worker.attention_inputs import StepInputs

# Rows of like length share a padded batch: lengths of one batch differ by at most 2 x.
_LEAST_PADDED_LEN = 64


@dataclass(frozen=True, slots=True)
class Gather:
    """Which cache rows make up a padded batch of contexts."""

    rows: torch.Tensor  # int64 [S'], of the decode rows; the chunk
    # int64 [S' * K * blocks], into the cache seen as [N * K, B * D]
    index: torch.Tensor
    unused: torch.Tensor  # int64 [n], slots that no query sees, of the S' * K * L gathered ones
    mask: torch.Tensor  # added to the scores, broadcastable to [S', heads, queries, L]


def gather_decode(inputs: StepInputs, cache: torch.Tensor, window: int | None) -> list[Gather]:
    """The live decode rows, in batches of like length."""
    block_size = cache.shape[2]
    table = inputs.decode_block_table
    lens: list[int] = inputs.decode_context_lens.tolist()
    firsts = [_first_block(length - 1, window, block_size) for length in lens]
    ends = [-(-length // block_size) for length in lens]
    batches: dict[int, list[int]] = {}
    for row, length in enumerate(lens):
        if length > 0:
            num_gathered = max(length - firsts[row] * block_size, _LEAST_PADDED_LEN)
            batches.setdefault(num_gathered.bit_length(), []).append(row)
    gathers: list[Gather] = []
    for batch in batches.values():
        rows = torch.tensor(batch)
        num_blocks = max(ends[row] - firsts[row] for row in batch)
        first = torch.tensor([firsts[row] for row in batch])
        columns = first[:, None] + torch.arange(num_blocks)
        keys = (columns[..., None] * block_size + torch.arange(block_size)).flatten(1)
        queries = inputs.decode_context_lens[rows, None] - 1
        is_seen = _is_seen(keys, queries, window)
        gathers.append(
            Gather(
                rows=rows,
                # Columns behind a table's end are of slots that are unused.
                index=_index(table[rows[:, None], columns.clamp(max=table.shape[1] - 1)], cache),
                unused=_unused(is_seen, cache),
                mask=_mask(is_seen[:, None, None, :], cache),
            )
        )
    return gathers


def gather_prefill(inputs: StepInputs, cache: torch.Tensor, window: int | None) -> list[Gather]:
    """The chunks that have tokens, each a batch of its own."""
    block_size = cache.shape[2]
    bounds: list[int] = inputs.cu_seqlens_q.tolist()
    lens: list[int] = inputs.prefill_context_lens.tolist()
    gathers: list[Gather] = []
    for chunk, length in enumerate(lens):
        if bounds[chunk] == bounds[chunk + 1]:
            continue
        history = length - (bounds[chunk + 1] - bounds[chunk])
        first, end = _first_block(history, window, block_size), -(-length // block_size)
        keys = torch.arange(first * block_size, end * block_size)
        is_seen = _is_seen(keys[None, :], torch.arange(history, length)[:, None], window)
        gathers.append(
            Gather(
                rows=torch.tensor([chunk]),
                index=_index(inputs.prefill_block_table[chunk : chunk + 1, first:end], cache),
                unused=_unused(is_seen.any(dim=0, keepdim=True), cache),
                mask=_mask(is_seen[None, None], cache),
            )
        )
    return gathers


def bits_of(cache: torch.Tensor) -> torch.Tensor:
    """8-bit floats as uint8, which torch can index; any other dtype as it is."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache


def _first_block(query: int, window: int | None, block_size: int) -> int:
    """The table's column of the first key that the query at this position sees."""
    return 0 if window is None else max(query - window + 1, 0) // block_size


def _is_seen(keys: torch.Tensor, queries: torch.Tensor, window: int | None) -> torch.Tensor:
    """Whether queries see keys, both positions."""
    is_seen = keys <= queries
    return is_seen if window is None else is_seen & (keys > queries - window)


def _index(block_table: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Cache rows [S' * K * blocks] of the blocks in `block_table` [S', blocks], by kv head."""
    num_kv_heads = cache.shape[1]
    heads = torch.arange(num_kv_heads)
    return (block_table.long()[:, None, :] * num_kv_heads + heads[None, :, None]).flatten()


def _mask(is_seen: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """0 where `is_seen`, else -inf; made once a step, where a bool is converted in each layer."""
    dtype = torch.float32 if cache.dtype.itemsize == 1 else cache.dtype
    return torch.zeros(is_seen.shape, dtype=dtype).masked_fill_(~is_seen, -torch.inf)


def _unused(is_used: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Gathered slots, of S' * K * L, of which `is_used` [S', L] says no."""
    num_kv_heads = cache.shape[1]
    is_unused = ~is_used[:, None, :].expand(-1, num_kv_heads, -1)
    return is_unused.flatten().nonzero().flatten()
