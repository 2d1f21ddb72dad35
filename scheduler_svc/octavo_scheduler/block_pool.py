"""The KV blocks of one worker: who holds them, what they contain, which one to reuse next.

All blocks are made at the start. A block is *used* (reference count > 0), or it lies in one
free list, threaded through plain lists with the null block 0 as its anchor:

    anchor 0 -> [ blocks without content | cached blocks, least recently used first ] -> anchor 0
                  ^ allocated first                                    freed here ^

A cached block keeps its hash in the index until it is allocated for something else (lazy
eviction). Two blocks with one hash: the first is indexed, the other holds no hash and is
never found. Every operation is O(1) per block.

Evicted hashes are remembered for a while, to tell misses apart: a table of 32-bit tags, one slot
for each hash modulo its size, where a later eviction overwrites an earlier one.

Must not know: rows, sequences, workers, time. Entry points: `allocate`, `free`, `touch`,
`match`, `num_evicted`, `index`, `restore`, `check_integrity`.
"""

from array import array
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt


class BlockState(IntEnum):
    """What a block is to somebody who looks on."""

    FREE = 0
    CACHED = 1  # free, and a prefix can still hit it
    USED = 2
    SHARED = 3  # used by several block tables


# Evictions remembered per block of the pool, at most: 16 bytes each.
_EVICTED_PER_BLOCK = 4


class BlockPool:
    """Blocks 1 .. num_blocks-1; block 0 is the null block and never handed out."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, num_blocks
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self.num_cached = 0  # free blocks whose content is still indexed
        self.num_changes = 0  # of the index
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self._used = bytearray(num_blocks)
        self._evicted = array("I", bytes(4 * _EVICTED_PER_BLOCK * num_blocks))
        self._next = [*range(1, num_blocks), 0]
        self._previous = [num_blocks - 1, *range(num_blocks - 1)]

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_free

    @property
    def num_indexed(self) -> int:
        """Blocks that a prefix can hit, used or free."""
        return len(self._index)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks for new content; the caller checked `num_free`."""
        assert count <= self.num_free, (count, self.num_free)
        blocks: list[int] = []
        for _ in range(count):
            block = self._next[0]
            self._unlink(block)
            self._references[block] = 1
            self._used[block] = 1
            if (block_hash := self._hashes[block]) is not None:
                self._note_eviction(block_hash)
                self.forget(block)
            blocks.append(block)
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each block of a table, its tail first."""
        for block in reversed(blocks):
            references = self._references[block] - 1
            assert references >= 0, block
            self._references[block] = references
            if references:
                continue
            self._used[block] = 0
            if self._hashes[block] is None:
                self._link(block, 0, self._next[0])
            else:
                self._link(block, self._previous[0], 0)

    def touch(self, blocks: Sequence[int]) -> None:
        """Add one reference to each block (a prefix hit)."""
        for block in blocks:
            if self._references[block] == 0:
                self._unlink(block)
                self._used[block] = 1
            self._references[block] += 1

    def match(self, hashes: Sequence[bytes], limit: int) -> list[int]:
        """Blocks that hold the longest indexed run of `hashes[:limit]`."""
        blocks: list[int] = []
        find = self._index.get
        for i in range(min(limit, len(hashes))):
            block = find(hashes[i])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def has(self, block_hash: bytes) -> bool:
        """Whether a prefix can hit the block."""
        return block_hash in self._index

    def num_evicted(self, hashes: Sequence[bytes], start: int, limit: int) -> int:
        """How many of `hashes[start:limit]`, from the first on, were here and were evicted.

        A hash that was not seen for long, or never, ends the run.
        """
        evicted = self._evicted
        for i in range(start, min(limit, len(hashes))):
            slot, tag = divmod(int.from_bytes(hashes[i][:8], "little"), 1 << 32)
            if evicted[slot % len(evicted)] != tag:
                return i - start
        return max(0, min(limit, len(hashes)) - start)

    def _note_eviction(self, block_hash: bytes) -> None:
        slot, tag = divmod(int.from_bytes(block_hash[:8], "little"), 1 << 32)
        self._evicted[slot % len(self._evicted)] = tag

    def num_free_among(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` lie in the free list."""
        return sum(not self._used[block] for block in blocks)

    def index(self, block: int, block_hash: bytes) -> bool:
        """The used block's KV is complete: let prefixes find it. False for a duplicate."""
        assert self._references[block] > 0, block
        assert self._hashes[block] is None, block
        if block_hash in self._index:
            return False
        self._index[block_hash] = block
        self._hashes[block] = block_hash
        self.num_changes += 1
        return True

    def hash_of(self, block: int) -> bytes | None:
        return self._hashes[block]

    def hashes_of(self, blocks: slice) -> list[bytes]:
        """Hashes of those of the blocks that a prefix can hit."""
        return [block_hash for block_hash in self._hashes[blocks] if block_hash is not None]

    def forget(self, block: int) -> None:
        """The block's content is void: no prefix may find it."""
        block_hash = self._hashes[block]
        if block_hash is not None:
            self._hashes[block] = None
            del self._index[block_hash]
            self.num_changes += 1
            self.num_cached -= not self._used[block]

    def restore(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Index free blocks of a worker's inventory, least recently used first."""
        for block, block_hash in zip(blocks, hashes, strict=True):
            if not 0 < block < self.num_blocks or self._used[block] or self._hashes[block]:
                continue
            if block_hash in self._index:
                continue
            self._unlink(block)
            self._index[block_hash] = block
            self._hashes[block] = block_hash
            self._link(block, self._previous[0], 0)
            self.num_changes += 1

    def used_bitmap(self) -> bytes:
        """One bit a block, little-endian bit order, 1 = used."""
        flags = np.frombuffer(bytes(self._used), dtype=np.uint8)
        return np.packbits(flags, bitorder="little").tobytes()

    def states_of(self, blocks: slice) -> npt.NDArray[np.uint8]:
        """The `BlockState` of each of the blocks, some 50 ns a block."""
        references = np.array(self._references[blocks], np.int64)
        has_content = np.array([h is not None for h in self._hashes[blocks]], np.bool_)
        states = np.where(has_content, BlockState.CACHED, BlockState.FREE).astype(np.uint8)
        states[references == 1] = BlockState.USED
        states[references > 1] = BlockState.SHARED
        return states

    def check_integrity(self, tables: Sequence[Sequence[int]] | None = None) -> None:
        """Assert every invariant; with all block tables, that references are exactly theirs."""
        free: list[int] = []
        block = self._next[0]
        while block != 0:
            assert self._previous[self._next[block]] == block, block
            assert len(free) <= self.num_blocks, "free list has a cycle"
            free.append(block)
            block = self._next[block]
        assert len(free) == len(set(free)) == self.num_free, (len(free), self.num_free)
        assert self._references[0] == 0
        assert self._hashes[0] is None
        is_free = set(free)
        assert self.num_cached == sum(block in is_free for block in self._index.values())
        for block in range(1, self.num_blocks):
            assert (self._references[block] == 0) == (block in is_free), block
            assert bool(self._used[block]) == (self._references[block] > 0), block
        held = {block: h for block, h in enumerate(self._hashes) if h is not None}
        assert {h: block for block, h in held.items()} == self._index
        assert len(held) == len(self._index)
        if tables is None:
            return
        counts = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), table
            for block in table:
                counts[block] += 1
        assert counts == self._references, "references differ from the block tables"

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self.num_free -= 1
        self.num_cached -= self._hashes[block] is not None

    def _link(self, block: int, before: int, after: int) -> None:
        self._previous[block], self._next[block] = before, after
        self._next[before] = block
        self._previous[after] = block
        self.num_free += 1
        self.num_cached += self._hashes[block] is not None
