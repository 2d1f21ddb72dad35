"""What the host tells the device of a step, as one vector: a step takes one upload.

The vector's layout is its shape's. A captured step is padded to a larger shape than its work
needs: padding tokens have position 0 and no owner, padding chunks no tokens, and padding rows are
the spare one, which is always dead. Must not know: graphs, models. Entry points: `pack`,
`SentStep.of`.

T tokens of chunks, C chunks, S decode rows.
"""

from typing import NamedTuple, Self

import numpy as np
import torch

from octavo_worker.graph_shapes import StepShape
from octavo_worker.plan import I64
from octavo_worker.step_work import StepWork

_PADDING = -1


def shape_of(work: StepWork) -> StepShape:
    """The shape without padding."""
    return StepShape(work.num_prefill_tokens, len(work.chunks), len(work.decode_rows))


class SentStep(NamedTuple):
    """int64 each. A chunk that ends its prompt draws a token: those chunks' entries, in order,
    are the last of the C."""

    input_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    owners: torch.Tensor  # [T]; the chunk of each token, -1 = padding
    chunk_rows: torch.Tensor  # [C]
    context_lens: torch.Tensor  # [C]; history plus chunk
    entry_rows: torch.Tensor  # [C]; the spare row = no entry
    entry_positions: torch.Tensor  # [C], of the token drawn
    entry_states: torch.Tensor  # [C]; index of the chunk's last token
    cu_seqlens_q: torch.Tensor  # [C + 1]
    decode_rows: torch.Tensor  # [S]

    @classmethod
    def of(cls, vector: torch.Tensor, shape: StepShape) -> Self:
        """Views of a vector that `pack` has filled, on whatever device."""
        return cls(*vector[: sum(_sizes(shape))].split(_sizes(shape)))

    @property
    def shape(self) -> StepShape:
        return StepShape(len(self.input_ids), len(self.chunk_rows), len(self.decode_rows))


def vector_size(shape: StepShape) -> int:
    return sum(_sizes(shape))


def pack(work: StepWork, shape: StepShape, spare_row: int) -> I64:
    """The vector of `work`, padded to `shape`."""
    vector = np.zeros(vector_size(shape), np.int64)
    bounds = np.cumsum(_sizes(shape))[:-1]
    ids, positions, owners, rows, context_lens, *entries, borders, decode_rows = np.split(
        vector, bounds
    )
    chunks = work.chunks
    lens = np.array([len(chunk.token_ids) for chunk in chunks], np.int64)
    ends = lens.cumsum()
    owners[:] = _PADDING
    rows[:] = decode_rows[:] = entries[0][:] = spare_row
    if chunks:
        num_tokens = int(ends[-1])
        ids[:num_tokens] = np.concatenate([chunk.token_ids for chunk in chunks])
        owners[:num_tokens] = np.repeat(np.arange(len(chunks)), lens)
        starts = np.array([chunk.start for chunk in chunks], np.int64)
        positions[:num_tokens] = np.arange(num_tokens) + np.repeat(starts - ends + lens, lens)
        rows[: len(chunks)] = [chunk.row for chunk in chunks]
        context_lens[: len(chunks)] = starts + lens
        borders[1 : len(chunks) + 1] = ends
        borders[len(chunks) + 1 :] = num_tokens
        last = np.flatnonzero([chunk.is_last for chunk in chunks])
        if len(last):
            for entry, values in zip(entries, (rows, context_lens, ends - 1), strict=True):
                entry[-len(last) :] = values[last]
    decode_rows[: len(work.decode_rows)] = work.decode_rows
    return vector


def _sizes(shape: StepShape) -> list[int]:
    tokens, chunks, rows = shape
    return [*(3 * [tokens]), *(5 * [chunks]), chunks + 1, rows]
