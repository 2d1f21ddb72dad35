"""Sealed blocks: order of use, and hashes that writing drops."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from octavo_worker.sealed_blocks import SealedBlocks

NUM_BLOCKS = 12
BLOCK = st.integers(1, NUM_BLOCKS - 1)
ACTION = st.one_of(
    st.tuples(st.just("seal"), BLOCK, st.binary(min_size=16, max_size=16)),
    st.tuples(st.just("touch"), st.lists(BLOCK, unique=True), st.none()),
    st.tuples(st.just("drop"), st.lists(BLOCK, unique=True), st.none()),
)


def test_the_head_of_a_prefix_is_the_latest_used() -> None:
    sealed = SealedBlocks(NUM_BLOCKS)
    for block in (1, 2, 3, 4):
        sealed.seal(block, bytes([block]) * 16)
    sealed.touch([2, 9, 1])
    assert [block for block, _ in sealed.inventory()] == [3, 4, 1, 2]


@given(actions=st.lists(ACTION, max_size=40))
def test_any_history_gives_the_order_and_hashes_of_a_plain_list(
    actions: list[tuple[str, object, bytes | None]],
) -> None:
    sealed = SealedBlocks(NUM_BLOCKS)
    plain: list[tuple[int, bytes]] = []
    for kind, what, digest in actions:
        if kind == "seal":
            assert isinstance(what, int)
            assert digest is not None
            sealed.seal(what, digest)
            plain = [item for item in plain if item[0] != what] + [(what, digest)]
            continue
        assert isinstance(what, list)
        if kind == "touch":
            sealed.touch(what)
            for block in reversed(what):
                found = [item for item in plain if item[0] == block]
                plain = [item for item in plain if item[0] != block] + found
        else:
            sealed.drop(np.array(what, np.int64))
            plain = [item for item in plain if item[0] not in what]
        assert len(sealed) == len(plain)
    assert list(sealed.inventory()) == plain
