"""Bloom filters: no false "no", few false "yes", and bytes that say what they are."""

import struct
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.bloom import BloomFilter, build_filter

hash_lists = st.lists(st.binary(min_size=16, max_size=16), max_size=200)


def numbered_hashes(start: int, stop: int) -> list[bytes]:
    return [blake2b(str(i).encode(), digest_size=16).digest() for i in range(start, stop)]


@given(hash_lists, st.floats(0.0001, 0.5))
def test_whatever_was_added_is_held(hashes: list[bytes], rate: float) -> None:
    made = BloomFilter.from_bytes(build_filter(hashes, rate))
    assert made.leading_run(hashes) == len(hashes)
    assert made.num_items == len(hashes)
    assert all(made.holds(block_hash) for block_hash in hashes)


@given(hash_lists, hash_lists)
def test_adding_in_parts_equals_adding_at_once(first: list[bytes], second: list[bytes]) -> None:
    at_once, in_parts = BloomFilter.sized(500), BloomFilter.sized(500)
    at_once.add(first + second)
    in_parts.add(first)
    in_parts.add(second)
    assert in_parts.to_bytes() == at_once.to_bytes()


@given(hash_lists, hash_lists)
def test_a_run_ends_at_the_first_hash_that_is_not_held(
    added: list[bytes], asked: list[bytes]
) -> None:
    made = BloomFilter.sized(max(1, len(added)))
    made.add(added)
    run = 0
    while run < len(asked) and made.holds(asked[run]):
        run += 1
    assert made.leading_run(asked) == run


@pytest.mark.parametrize("run", [0, 1, 63, 64, 65, 191, 192, 193, 1000])
def test_a_run_may_end_anywhere(run: int) -> None:
    held, other = numbered_hashes(0, 1000), numbered_hashes(1000, 1001)
    made = BloomFilter.sized(1000, 1e-6)
    made.add(held)
    assert made.leading_run(held[:run] + other + held[run:]) == run


@pytest.mark.parametrize("rate", [0.1, 0.01, 0.001])
def test_the_rate_of_wrong_answers_is_as_asked(rate: float) -> None:
    made = BloomFilter.sized(5000, rate)
    made.add(numbered_hashes(0, 5000))
    wrong = sum(made.holds(other) for other in numbered_hashes(5000, 25_000))
    # Deterministic; the bounds are some five standard deviations wide.
    assert 0.5 * rate < wrong / 20_000 < 1.6 * rate


def test_an_empty_filter_holds_nothing() -> None:
    made = BloomFilter.from_bytes(build_filter([]))
    assert made.leading_run(numbered_hashes(0, 10)) == 0
    assert made.leading_run([]) == 0


def test_the_format_is_the_documented_one() -> None:
    made = BloomFilter(64, 2)
    made.add([struct.pack("<QQ", 5, 8), struct.pack("<QQ", 2**64 - 1, 2**64 - 2)])
    # 5, 5 + 9; and 2**64 - 1, (2**64 - 1) + (2**64 - 1) = 2**64 - 2, each modulo 64.
    expected_bits = sum(1 << bit for bit in (5, 14, 63, 62))
    header = b"OBF1" + bytes([1, 2, 0, 0]) + struct.pack("<QQ", 64, 2)
    assert made.to_bytes() == header + expected_bits.to_bytes(8, "little")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[:0],
        lambda data: data[:23],
        lambda data: data[:24],
        lambda data: data[:-1],
        lambda data: data + b"\x00",
        lambda data: b"OBF2" + data[4:],
        lambda data: data[:4] + b"\x02" + data[5:],
        lambda data: data[:5] + b"\x00" + data[6:],
        lambda data: data[:5] + b"\xff" + data[6:],
    ],
)
def test_other_bytes_are_refused(spoil) -> None:
    with pytest.raises(ValueError):
        BloomFilter.from_bytes(spoil(build_filter(numbered_hashes(0, 10))))


@given(st.binary(max_size=100))
def test_garbage_is_refused_or_read_but_never_worse(data: bytes) -> None:
    try:
        made = BloomFilter.from_bytes(data)
    except ValueError:
        return
    assert made.to_bytes() == data
