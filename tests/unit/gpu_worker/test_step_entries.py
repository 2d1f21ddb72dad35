"""What a step's entries draw from: chunks that end their prompt, then decode rows."""

from dataclasses import replace

import numpy as np
import torch

from octavo_worker.graph_shapes import StepShape
from octavo_worker.plan import Chunk
from octavo_worker.rows import RowTensors
from octavo_worker.sent_step import SentStep, pack, shape_of
from octavo_worker.step_entries import Entries, entries_of
from octavo_worker.step_inputs import step_inputs
from octavo_worker.step_work import StepWork

SPARE_ROW, BLOCK_SIZE = 8, 16
# Row 0 goes on with its prompt, 1 and 2 end theirs after 5 and 9 tokens; 3 decodes, 4 has ended.
WORK = replace(
    StepWork.of_nothing(),
    chunks=(
        Chunk(0, 0, np.arange(4), is_last=False),
        Chunk(1, 3, np.arange(2), is_last=True),
        Chunk(2, 6, np.arange(3), is_last=True),
    ),
    decode_rows=np.array([3, 4]),
)


def entries(work: StepWork, shape: StepShape, num_entries: int) -> Entries:
    """A hidden state is its place in the step."""
    rows = RowTensors(SPARE_ROW + 1, 4, torch.device("cpu"))
    rows.num_tokens[3], rows.is_live[3] = 12, True
    sent = SentStep.of(torch.from_numpy(pack(work, shape, SPARE_ROW)), shape)
    inputs = step_inputs(sent, rows, BLOCK_SIZE)
    hidden = torch.arange(len(inputs.input_ids))[:, None]
    return entries_of(sent, inputs, hidden, rows, SPARE_ROW, num_entries)


def test_entries_are_of_chunks_that_end_and_of_decode_rows() -> None:
    found = entries(WORK, shape_of(WORK), 4)
    # Nine tokens of chunks lie before the decode rows'.
    assert found.hidden.flatten().tolist() == [5, 8, 9, 10]
    assert found.rows.tolist() == [1, 2, 3, 4]
    assert found.positions.tolist() == [5, 9, 12, 0]
    assert found.was_live.tolist() == [True, True, True, False]


def test_entries_of_a_padded_step_are_all_its_places() -> None:
    found = entries(WORK, StepShape(16, 5, 4), 9)
    assert found.rows.tolist() == [*[SPARE_ROW] * 3, 1, 2, 3, 4, SPARE_ROW, SPARE_ROW]
    assert found.hidden.flatten()[3:].tolist() == [5, 8, 16, 17, 18, 19]
    assert found.positions[3:7].tolist() == [5, 9, 12, 0]
    assert found.was_live.tolist() == [*[False] * 3, True, True, True, *[False] * 3]


def test_without_a_chunk_that_ends_only_decode_rows_draw() -> None:
    work = replace(WORK, chunks=WORK.chunks[:1])
    found = entries(work, shape_of(work), 2)
    assert found.hidden.flatten().tolist() == [4, 5]
    assert found.rows.tolist() == [3, 4]
    assert found.positions.tolist() == [12, 0]
    assert found.was_live.tolist() == [True, False]
