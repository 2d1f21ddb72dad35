"""The row tensors: what the device must know of every row to run a step by itself.

The token that a step draws is written here and read by the next step, so it never waits for
the host. Must not know: plans' checks (`row_book`), gRPC. Entry point: `RowTensors`.

R rows, M block-table columns, E entries (drawn tokens) of a step, W ending ids a row.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from octavo.row_event import RowEvent
from octavo_worker.host_copies import upload
from octavo_worker.plan import I64, RowAdd
from octavo_worker.sampling import SamplingTensors

# Event of a row that was dead on the device before the step.
NOTHING_DRAWN = -1
_NO_TOKEN = -1
_STOP_IDS = 16


class RowTensors:
    """One entry a row in every tensor; all on `device`."""

    def __init__(self, num_rows: int, max_blocks: int, device: torch.device) -> None:
        self.device = device
        self.block_table = self._zeros((num_rows, max_blocks), torch.int32)
        self.last_token = self._zeros((num_rows,))
        # Known tokens; those of a decoding row are all computed but the last.
        self.num_tokens = self._zeros((num_rows,))
        self.is_live = self._zeros((num_rows,), torch.bool)
        self.temperature = self._zeros((num_rows,), torch.float32)
        self.top_p = self._zeros((num_rows,), torch.float32)
        self.top_k = self._zeros((num_rows,), torch.int32)
        self.min_p = self._zeros((num_rows,), torch.float32)
        self.seed = self._zeros((num_rows,))
        self.sequence_index = self._zeros((num_rows,), torch.int32)
        self.max_total_tokens = self._zeros((num_rows,))
        self.min_total_tokens = self._zeros((num_rows,))
        # Captured steps know this very tensor: what doesn't fit goes into a second, growing one.
        self.stop_token_ids = self._zeros((num_rows, _STOP_IDS)).fill_(_NO_TOKEN)
        self.wide_stop_token_ids = self._zeros((num_rows, 0))
        self._has_wide_stop_ids = np.zeros(num_rows, np.bool_)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def clear(self) -> None:
        """Every row dead."""
        self.is_live.zero_()

    def upload(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        """A host array on the device."""
        return upload(np.ascontiguousarray(array), self.device)

    def remove(self, rows: Sequence[int]) -> None:
        self.is_live[self.upload(np.array(rows, np.int64))] = False

    def add(self, adds: Sequence[RowAdd]) -> None:
        """Rows get new holders; they live once their last chunk has drawn a token."""
        rows = self.upload(np.array([add.row for add in adds], np.int64))
        floats = [[a.sampling.temperature, a.sampling.top_p, a.sampling.min_p] for a in adds]
        columns = self.upload(np.array(floats, np.float32).T)
        self.temperature[rows], self.top_p[rows], self.min_p[rows] = columns
        integers = [[min(a.sampling.top_k, 2**31 - 1), a.sequence_index & 0x7FFFFFFF] for a in adds]
        columns = self.upload(np.array(integers, np.int32).T)
        self.top_k[rows], self.sequence_index[rows] = columns
        totals = [[a.max_total_tokens, a.min_total_tokens] for a in adds]
        columns = self.upload(np.array(totals, np.int64).T)
        self.max_total_tokens[rows], self.min_total_tokens[rows] = columns
        seeds = np.array([add.sampling.seed for add in adds], np.uint64)
        self.seed[rows] = self.upload(seeds.view(np.int64))
        self.is_live[rows] = False
        self._set_stop_ids(rows, adds)
        self._set_tables(rows, adds)

    def _set_stop_ids(self, rows: torch.Tensor, adds: Sequence[RowAdd]) -> None:
        first = [add.sampling.stop_token_ids[:_STOP_IDS] for add in adds]
        rest = [add.sampling.stop_token_ids[_STOP_IDS:] for add in adds]
        self.stop_token_ids[rows] = self.upload(_padded(first, _STOP_IDS))
        self._has_wide_stop_ids[[add.row for add in adds]] = [bool(ids) for ids in rest]
        widest = max(map(len, rest))
        if widest > self.wide_stop_token_ids.shape[1]:
            num_rows, width = self.wide_stop_token_ids.shape
            padding = self._zeros((num_rows, widest - width)).fill_(_NO_TOKEN)
            self.wide_stop_token_ids = torch.cat([self.wide_stop_token_ids, padding], dim=1)
        width = self.wide_stop_token_ids.shape[1]
        if width:
            self.wide_stop_token_ids[rows] = self.upload(_padded(rest, width))

    def has_wide_stop_ids(self, rows: I64) -> bool:
        """Whether any of `rows` (on the host) has more ending ids than `stop_token_ids` holds."""
        return bool(self._has_wide_stop_ids[rows].any())

    def _set_tables(self, rows: torch.Tensor, adds: Sequence[RowAdd]) -> None:
        width = max(len(add.block_ids) for add in adds)
        table = np.zeros((len(adds), width), np.int32)
        for index, add in enumerate(adds):
            table[index, : len(add.block_ids)] = add.block_ids
        self.block_table[rows, :width] = self.upload(table)

    def update_blocks(self, updates: I64) -> None:
        """`updates` [n, 3]: row, table index, block id."""
        rows, indices, block_ids = self.upload(updates.T)
        self.block_table[rows, indices] = block_ids.to(torch.int32)

    def sampling_tensors(
        self, rows: torch.Tensor, positions: torch.Tensor, *, all_greedy: bool, any_filter: bool
    ) -> SamplingTensors:
        """Parameters of `rows` (int64 [E]) that draw the tokens at `positions` (int64 [E])."""
        return SamplingTensors(
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
            min_p=self.min_p[rows],
            seed=self.seed[rows],
            position=positions,
            sequence_index=self.sequence_index[rows],
            all_greedy=all_greedy,
            any_filter=any_filter,
        )

    def advance(
        self,
        rows: torch.Tensor,
        positions: torch.Tensor,
        tokens: torch.Tensor,
        was_live: torch.Tensor,
        is_finite: torch.Tensor,
        *,
        has_wide_stop_ids: bool = True,
    ) -> torch.Tensor:
        """Append `tokens` (int64 [E]), drawn at `positions`, to `rows`; events int64 [E].

        Rows that were dead before the step (`was_live` bool [E]) stay so: NOTHING_DRAWN.
        Ending ids count from min_total_tokens on; an ending id outranks the length, a bad
        value (`is_finite` bool [E]) outranks both.
        """
        total = positions + 1
        is_ending = (self.stop_token_ids[rows] == tokens[:, None]).any(dim=1)
        if has_wide_stop_ids and self.wide_stop_token_ids.shape[1]:
            is_ending |= (self.wide_stop_token_ids[rows] == tokens[:, None]).any(dim=1)
        is_stop = is_ending & (total >= self.min_total_tokens[rows])
        events = torch.zeros_like(tokens)
        events = events.masked_fill(total >= self.max_total_tokens[rows], RowEvent.LENGTH)
        events = events.masked_fill(is_stop, RowEvent.STOP)
        events = events.masked_fill(~is_finite, RowEvent.ERROR)
        events = events.masked_fill(~was_live, NOTHING_DRAWN)
        self.last_token[rows] = tokens
        self.num_tokens[rows] = total
        self.is_live[rows] = events == RowEvent.ALIVE
        return events


def _padded(lists: Sequence[Sequence[int]], width: int) -> I64:
    """Ids [len(lists), width], the rest filled with an id that no token has."""
    ids = np.full((len(lists), width), _NO_TOKEN, np.int64)
    for index, values in enumerate(lists):
        ids[index, : len(values)] = values
    return ids
