"""Block hashes against golden vectors, which bind every version and language."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.blocks import HASH_BYTES, BlockHashRoot, block_hash, chain, salt_of

GOLDEN = json.loads((Path(__file__).parent / "golden" / "blocks.json").read_text("utf-8"))
ROOT = BlockHashRoot("org/model", "0123abcd", 16, "bf16")
token_id_lists = st.lists(st.integers(0, 2**32 - 1), max_size=100)


def ids(values: Any) -> np.ndarray:
    return np.array(values, dtype=np.uint32)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_golden_vectors(case: dict[str, Any]) -> None:
    root = BlockHashRoot(**case["root"])
    assert root.digest().hex() == case["root_digest"]
    hashes = chain(root.digest(), ids(case["token_ids"]), root.block_size)
    assert [block.hex() for block in hashes] == case["block_hashes"]


def test_the_golden_roots_all_differ_unless_they_are_the_same() -> None:
    digests = {json.dumps(case["root"]): case["root_digest"] for case in GOLDEN}
    assert len(set(digests.values())) == len(digests)


def test_every_field_of_the_root_counts() -> None:
    others = [
        BlockHashRoot("org/model2", "0123abcd", 16, "bf16"),
        BlockHashRoot("org/model", "0123abce", 16, "bf16"),
        BlockHashRoot("org/model", "0123abcd", 32, "bf16"),
        BlockHashRoot("org/model", "0123abcd", 16, "fp8e4m3-head"),
        # A border between two fields that moves.
        BlockHashRoot("org/model0", "123abcd", 16, "bf16"),
        BlockHashRoot("org/model", "0123abcd1", 6, "bf16"),
        BlockHashRoot("org/model", "0123abcd", 16, "bf16", adapter=""),
        BlockHashRoot("org/model", "0123abcd", 16, "bf16", salt=""),
        BlockHashRoot("org/model", "0123abcd", 16, "bf16", adapter="", salt=""),
    ]
    assert len({root.digest() for root in (ROOT, *others)}) == len(others) + 1


def test_adapter_and_salt_cant_pass_for_one_another() -> None:
    pairs: list[tuple[str | None, str | None]] = [
        *(("X", ""), ("", "X"), ("X", None), (None, "X"), ("a", "b|c"), ("a|b", "c")),
        *(("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc"), (None, None)),
        *(("\x02", None), (None, "\x01"), ("a\x02", "b"), ("a", "\x02b")),
    ]
    roots = {
        BlockHashRoot("m", "r", 16, "bf16", adapter=adapter, salt=salt).digest()
        for adapter, salt in pairs
    }
    assert len(roots) == len(pairs)


def test_prompts_that_a_weak_hash_takes_for_equal_differ() -> None:
    one = list(range(101, 117))
    two = list(range(201, 217))
    # What h = 31 * h + id takes for equal.
    shifted = one.copy()
    shifted[3], shifted[4] = one[3] + 1, one[4] - 31
    prompts = [
        one + two,
        two + one,
        # Ids that a byte each would take for equal.
        [1, 256, *one[2:], *two],
        [257, 0, *one[2:], *two],
        [one[1], one[0], *one[2:], *two],
        shifted + two,
        [0, *one[:15], *two],
        [0, 0, *one[:14], *two],
        [0] * 16 + one,
        [0] * 32,
    ]
    ends = {chain(ROOT.digest(), ids(prompt), 16)[-1] for prompt in prompts}
    assert len(ends) == len(prompts)


def test_a_root_is_no_block() -> None:
    parent, data = bytes(16), bytes(64)
    assert block_hash(parent, data) != BlockHashRoot("", "", 16, "").digest()
    assert chain(ROOT.digest(), ids([1] * 16), 16)[0] != ROOT.digest()


tenants = st.one_of(st.none(), st.text(max_size=6), st.text("tc0123456789:", max_size=8))


@given(st.tuples(tenants, tenants), st.tuples(tenants, tenants))
def test_two_tenants_never_share_a_salt(
    first: tuple[str | None, str | None], second: tuple[str | None, str | None]
) -> None:
    assert (salt_of(*first) == salt_of(*second)) == (first == second)


def test_a_salt_is_absent_only_if_both_its_parts_are() -> None:
    assert salt_of(None, None) is None
    assert salt_of("", None) is not None
    assert salt_of(None, "") is not None


@given(token_id_lists, st.sampled_from([1, 16, 32]))
def test_a_chain_has_the_full_blocks_and_extends_its_prefixes(
    token_ids: list[int], block_size: int
) -> None:
    hashes = chain(ROOT.digest(), ids(token_ids), block_size)
    assert len(hashes) == len(token_ids) // block_size
    assert all(len(block) == HASH_BYTES for block in hashes)
    for end in range(0, len(token_ids), block_size):
        assert chain(ROOT.digest(), ids(token_ids[:end]), block_size) == hashes[: end // block_size]


@given(st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=40), st.data())
def test_a_changed_token_changes_its_block_and_all_after_it(
    token_ids: list[int], data: st.DataObject
) -> None:
    block_size = 4
    place = data.draw(st.integers(0, len(token_ids) // block_size * block_size - 1))
    changed = token_ids.copy()
    changed[place] ^= 1 << data.draw(st.integers(0, 31))
    before = chain(ROOT.digest(), ids(token_ids), block_size)
    after = chain(ROOT.digest(), ids(changed), block_size)
    differs = [one != other for one, other in itertools.zip_longest(before, after)]
    assert differs == [index >= place // block_size for index in range(len(before))]


@pytest.mark.parametrize("dtype", [np.uint32, np.int64, ">u4", np.uint16])
def test_the_hash_is_of_the_ids_not_of_their_array(dtype: Any) -> None:
    wanted = chain(ROOT.digest(), ids(range(64)), 16)
    assert chain(ROOT.digest(), np.arange(64).astype(dtype), 16) == wanted
    strided = np.arange(128).astype(dtype)[::2] // np.array(2, dtype)
    assert chain(ROOT.digest(), strided, 16) == wanted
