"""The rows of one worker as arrays, so that a step touches in Python only what changes.

Legend: R rows, B block size. A row's `generation` names its present holder; it is raised when
the row is released, so results for an earlier holder never match.

Must not know: policies, protos. Entry points: `RowTable.take`, `release`, `flush`.
"""

import numpy as np

from octavo_scheduler.sequence import Sequence


class RowTable:
    """Arrays [R] over all rows; only rows with a holder have a meaning."""

    def __init__(self, num_rows: int, block_size: int) -> None:
        self.block_size = block_size
        self.holders: list[Sequence | None] = [None] * num_rows
        self.generation = np.zeros(num_rows, np.uint32)
        self.known = np.zeros(num_rows, np.int64)  # tokens whose ids were read
        self.capacity = np.zeros(num_rows, np.int64)  # KV slots of the block table
        self.limit = np.zeros(num_rows, np.int64)  # max_total_tokens
        self.expected = np.zeros(num_rows, np.int64)  # tokens that it is likely to end with
        self.answer = np.ones(num_rows, np.int64)  # of these, those of its answer: at least 1
        self.shared = np.zeros(num_rows, np.int64)  # blocks that it found in the cache
        self.decoding = np.zeros(num_rows, np.bool_)  # its last chunk was planned
        self.session = np.zeros(num_rows, np.int64)
        self.handle = np.zeros(num_rows, np.uint64)
        self.index = np.zeros(num_rows, np.uint32)
        self.tail = np.zeros((num_rows, block_size), np.uint32)
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return len(self.holders) - len(self._free)

    @property
    def left(self) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        """The share of its answer that each holder is likely to draw yet. [R]"""
        return np.clip((self.expected - self.known) / self.answer, 0.0, 1.0)

    def take(self, sequence: Sequence) -> int:
        """Give the sequence a row; its block table counts as capacity."""
        row = self._free.pop()
        self.holders[row] = sequence
        self.known[row] = len(sequence.token_ids)
        self.capacity[row] = len(sequence.block_ids) * self.block_size
        self.limit[row] = sequence.max_total_tokens
        self.expected[row] = sequence.request.num_prompt_tokens + sequence.expected_output
        self.answer[row] = max(1, sequence.expected_output)
        self.shared[row] = len(sequence.block_ids)
        self.decoding[row] = False
        self.session[row] = sequence.request.session_id
        self.handle[row] = sequence.request.submission.handle
        self.index[row] = sequence.index
        sequence.row = row
        return row

    def release(self, row: int) -> None:
        """The holder gives the row up; its newest tokens are flushed to it."""
        sequence = self.holders[row]
        assert sequence is not None, row
        self.flush(row)
        self.holders[row] = None
        self.generation[row] += 1
        self.decoding[row] = False
        self.known[row] = self.capacity[row] = self.limit[row] = 0
        sequence.row = -1
        self._free.append(row)

    def flush(self, row: int) -> None:
        """Append the tail's tokens to the holder's `token_ids`."""
        sequence = self.holders[row]
        assert sequence is not None, row
        flushed = len(sequence.token_ids)
        count = int(self.known[row]) - flushed
        start = flushed % self.block_size
        assert 0 <= count <= self.block_size - start, (flushed, count)
        sequence.token_ids.frombytes(self.tail[row, start : start + count].tobytes())
