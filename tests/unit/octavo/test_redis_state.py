"""Records as Redis hashes: the way there and back, and neighbours of other versions."""

from dataclasses import MISSING, dataclass, fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.redis_state import decode_record, encode_record, filter_version
from octavo.registry import SchedulerRecord, UsageRecord, WorkerRecord

RECORDS = (WorkerRecord, SchedulerRecord, UsageRecord)
_VALUES: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(st.characters(codec="utf-8")),
    int: st.integers(0, 2**64 - 1),
    bool: st.booleans(),
    bytes: st.binary(),
}


def records(cls: type[Any]) -> st.SearchStrategy[Any]:
    return st.builds(cls, **{item.name: _VALUES[item.type] for item in fields(cls)})


def as_stored(values: tuple[Any, ...]) -> dict[bytes, bytes]:
    """What Redis hands back: everything is bytes."""
    raw = [value if isinstance(value, bytes) else str(value).encode() for value in values]
    return dict(zip(raw[::2], raw[1::2], strict=True))


@given(st.one_of(*map(records, RECORDS)))
def test_records_survive_the_way(record: Any) -> None:
    stored = as_stored(encode_record(record))
    assert decode_record(type(record), stored) == record
    stored |= {b"_writer": b"x", b"field_of_a_newer_version": b"y"}
    assert decode_record(type(record), stored) == record


@pytest.mark.parametrize("cls", RECORDS)
def test_a_record_without_one_of_its_first_fields_is_none(cls: type[Any]) -> None:
    kinds: dict[Any, Any] = {str: "x", int: 1, bool: True, bytes: b"x"}
    record = cls(*(kinds[item.type] for item in fields(cls)))
    stored = as_stored(encode_record(record))
    # Those with defaults came later: an older version doesn't write them.
    for item in fields(cls):
        rest = {key: value for key, value in stored.items() if key != item.name.encode()}
        assert (decode_record(cls, rest) is None) == (item.default is MISSING)
    assert decode_record(cls, {}) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [(b"num_workers", b"two"), (b"num_workers", b""), (b"draining", b"yes"), (b"model", b"\xff")],
)
def test_a_record_with_an_unreadable_field_is_none(field: bytes, value: bytes) -> None:
    stored = as_stored(encode_record(SchedulerRecord("s", "a:1", "m", 1, 2, 3, False)))
    assert decode_record(SchedulerRecord, stored | {field: value}) is None


def test_a_field_that_an_older_version_didnt_write_gets_its_default() -> None:
    @dataclass(frozen=True)
    class Newer:
        name: str
        speed: int = 7

    assert decode_record(Newer, {b"name": b"x"}) == Newer("x", 7)


def test_the_version_changes_with_the_filter() -> None:
    assert len(filter_version(b"")) == 8
    assert len({filter_version(data) for data in (b"", b"a", b"b", b"ab")}) == 4
