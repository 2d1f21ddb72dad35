"""The sealed blocks of a worker's cache: full blocks whose hash the scheduler told.

Kept in order of use, so that the next leader's pool evicts as this one's would have. A block
that is written to loses its hash. Must not know: tensors, rows, gRPC.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt


class SealedBlocks:
    """Block id -> hash, least recently used first."""

    def __init__(self, num_blocks: int) -> None:
        self._hashes: dict[int, bytes] = {}  # insertion order = order of use
        self._is_sealed = np.zeros(num_blocks, np.bool_)

    def __len__(self) -> int:
        return len(self._hashes)

    def seal(self, block_id: int, block_hash: bytes) -> None:
        self._hashes.pop(block_id, None)
        self._hashes[block_id] = block_hash
        self._is_sealed[block_id] = True

    def touch(self, block_ids: Sequence[int]) -> None:
        """A row uses or leaves these blocks of its table: the first one is the latest used.

        A prefix is worth more than what follows it, hence the reverse order.
        """
        for block_id in reversed(block_ids):
            block_hash = self._hashes.pop(block_id, None)
            if block_hash is not None:
                self._hashes[block_id] = block_hash

    def drop(self, block_ids: npt.NDArray[np.int64]) -> None:
        """These blocks are about to be written."""
        for block_id in block_ids[self._is_sealed[block_ids]].tolist():
            self._hashes.pop(block_id, None)
            self._is_sealed[block_id] = False

    def inventory(self) -> Iterable[tuple[int, bytes]]:
        """A copy of all (block id, hash), least recently used first."""
        return list(self._hashes.items())
