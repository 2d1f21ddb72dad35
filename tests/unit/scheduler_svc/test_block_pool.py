"""BlockPool against a plain model, and its corners by hand."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo_scheduler.block_pool import BlockPool


def hash_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


class PoolMachine(RuleBasedStateMachine):
    """Tables of blocks come and go; the pool agrees with a model that recounts everything."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.tables: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # block -> indexed hash
        self.lru: list[int] = []  # free cached blocks, least recently freed first

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        if count > self.pool.num_free:
            return
        blocks = self.pool.allocate(count)
        for block in blocks:
            if block in self.content:
                # Only when nothing without content is left, and the oldest goes first.
                assert block == self.lru.pop(0)
                del self.content[block]
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free(table)
        for block in reversed(table):
            is_free = all(block not in other for other in self.tables)
            if is_free and block in self.content:
                self.lru.append(block)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), number=st.integers(0, 12))
    def index(self, data: st.DataObject, number: int) -> None:
        blocks = sorted({block for table in self.tables for block in table} - set(self.content))
        if not blocks:
            return
        block = data.draw(st.sampled_from(blocks))
        is_new = hash_of(number) not in self.content.values()
        assert self.pool.index(block, hash_of(number)) is is_new
        if is_new:
            self.content[block] = hash_of(number)

    @rule(numbers=st.lists(st.integers(0, 12), max_size=4, unique=True), limit=st.integers(0, 4))
    def hit(self, numbers: list[int], limit: int) -> None:
        by_hash = {value: block for block, value in self.content.items()}
        expected: list[int] = []
        for number in numbers[:limit]:
            if hash_of(number) not in by_hash:
                break
            expected.append(by_hash[hash_of(number)])
        blocks = self.pool.match([hash_of(number) for number in numbers], limit)
        assert blocks == expected
        assert self.pool.num_free_among(blocks) == len(set(blocks) & set(self.lru))
        self.pool.touch(blocks)
        self.lru = [block for block in self.lru if block not in blocks]
        self.tables.append(blocks)

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.content)))
        self.pool.forget(block)
        del self.content[block]
        self.lru = [other for other in self.lru if other != block]

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity(self.tables)
        used = {block for table in self.tables for block in table}
        assert self.pool.num_used == len(used)
        assert self.pool.num_cached == len(self.lru)
        assert self.pool.num_indexed == len(self.content)
        bits = int.from_bytes(self.pool.used_bitmap(), "little")
        assert {block for block in range(9) if bits >> block & 1} == used


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_a_table_is_freed_tail_first() -> None:
    pool = BlockPool(4)
    table = pool.allocate(3)
    for i, block in enumerate(table):
        pool.index(block, hash_of(i))
    pool.free(table)
    # The tail of a prefix is the first to be evicted: its head stays useful without it.
    assert pool.allocate(2) == [table[2], table[1]]
    assert pool.match([hash_of(0), hash_of(1)], 2) == [table[0]]


def test_blocks_without_content_are_reused_before_cached_ones() -> None:
    pool = BlockPool(4)
    cached, plain = pool.allocate(1), pool.allocate(1)
    pool.index(cached[0], hash_of(1))
    pool.free(cached)
    pool.free(plain)
    assert cached[0] not in pool.allocate(2)


def test_restore_lists_oldest_first_and_ignores_nonsense() -> None:
    pool = BlockPool(5)
    pool.restore([3, 1, 0, 9, 2], [hash_of(n) for n in (3, 1, 7, 8, 3)])
    pool.check_integrity([])
    assert pool.match([hash_of(1)], 1) == [1]
    assert pool.num_cached == 2
    # Blocks 2 and 4 hold nothing, then 3 is older than 1.
    assert set(pool.allocate(2)) == {2, 4}
    assert pool.allocate(2) == [3, 1]


def test_check_integrity_can_fail() -> None:
    pool = BlockPool(4)
    table = pool.allocate(2)
    with pytest.raises(AssertionError):
        pool.check_integrity([table, table])
    pool.num_free += 1
    with pytest.raises(AssertionError):
        pool.check_integrity([table])


def test_evictions_are_remembered_for_a_while() -> None:
    pool = BlockPool(5)
    hashes = [bytes([i]) * 16 for i in range(1, 200)]
    for i in range(4):
        (block,) = pool.allocate(1)
        pool.index(block, hashes[i])
        pool.free([block])
    assert pool.num_evicted(hashes, 0, 199) == 0
    table = pool.allocate(3)
    # The least recently used ones went; a run ends at what is still here, or never was.
    assert pool.num_evicted(hashes, 0, 199) == 3
    assert pool.num_evicted(hashes, 1, 2) == 1
    assert pool.num_evicted(hashes, 2, 2) == 0
    assert pool.num_evicted(hashes, 3, 199) == 0
    # What was made void has not been evicted.
    pool.index(table[0], hashes[4])
    pool.forget(table[0])
    pool.free(table)
    assert pool.num_evicted(hashes, 4, 199) == 0
    # The memory is bounded: what was evicted long ago is forgotten.
    for block_hash in hashes[5:]:
        (block,) = pool.allocate(1)
        pool.index(block, block_hash)
        pool.free([block])
    assert 0 < sum(pool.num_evicted(hashes, i, i + 1) for i in range(199)) <= 4 * 5
    pool.check_integrity()
