"""States that a process keeps in Redis: how each is written, renewed and taken back.

A state is queued on a pipeline and later told its result. The hash of a record carries who
wrote it, so that a stale process can't overwrite a newer one's (lua/hold.lua). Must not know:
connections, timers. Entry points: `HashState`, `StringState`, `encode_record`,
`decode_record`.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from hashlib import blake2b
from importlib.resources import files
from typing import Any, Protocol, TypeVar

from octavo.keys import FleetKeys, Member, format_member

RecordT = TypeVar("RecordT")
Value = str | int | bytes

_HOLD = files("octavo").joinpath("lua/hold.lua").read_text()
_RELEASE = files("octavo").joinpath("lua/release.lua").read_text()
VERSION_BYTES = 8


class Outcome(Enum):
    """What became of a write or a renewal."""

    HELD = 1
    REFUSED = 0
    # The renewal found nothing of ours: write it whole.
    ABSENT = -1


@dataclass(frozen=True, slots=True)
class Lease:
    """How long records live without a renewal, and members without a sign of life, in s."""

    record_s: float = 3.0
    filter_s: float = 30.0
    member_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Writer:
    """The identity of the process that writes; a later start ranks higher."""

    id: str
    started_us: int


class State(Protocol):
    """What the registry does with each of its states."""

    @property
    def key(self) -> str: ...
    def queue_write(self, pipeline: Any) -> None: ...
    def queue_renewal(self, pipeline: Any) -> None: ...
    def queue_withdrawal(self, pipeline: Any) -> None: ...
    def outcome(self, result: Any) -> Outcome: ...


@dataclass(frozen=True, slots=True)
class HashState:
    """A record's hash and its entry among the members.

    Within `scope` the higher `rank` wins. `worker_key` names the hash that knows which scope
    lives (usage only).
    """

    keys: FleetKeys
    member: Member
    writer: Writer
    lease: Lease
    scope: str
    rank: int
    values: tuple[Value, ...]
    worker_key: str | None = None

    @property
    def key(self) -> str:
        return self.keys.of_member(self.member)

    def queue_write(self, pipeline: Any) -> None:
        self._queue_hold(pipeline, self.values)

    def queue_renewal(self, pipeline: Any) -> None:
        self._queue_hold(pipeline, ())

    def queue_withdrawal(self, pipeline: Any) -> None:
        names = (self.key, self.keys.members)
        member = format_member(self.member)
        pipeline.execute_command("EVAL", _RELEASE, len(names), *names, member, self.writer.id)

    def outcome(self, result: Any) -> Outcome:
        return Outcome(int(result))

    def _queue_hold(self, pipeline: Any, values: tuple[Value, ...]) -> None:
        names = [self.key, self.keys.members]
        if self.worker_key is not None:
            names.append(self.worker_key)
        arguments = (
            format_member(self.member),
            round(self.lease.record_s * 1000),
            round(self.lease.member_s * 1000),
            self.writer.id,
            self.scope,
            self.rank,
        )
        pipeline.execute_command("EVAL", _HOLD, len(names), *names, *arguments, *values)


@dataclass(frozen=True, slots=True)
class StringState:
    """A filter: its version, then its bytes. A hint that heals itself needs no fence."""

    key: str
    lease: Lease
    data: bytes

    def queue_write(self, pipeline: Any) -> None:
        value = filter_version(self.data) + self.data
        pipeline.execute_command("SET", self.key, value, "PX", self._lease_ms)

    def queue_renewal(self, pipeline: Any) -> None:
        pipeline.execute_command("PEXPIRE", self.key, self._lease_ms)

    def queue_withdrawal(self, pipeline: Any) -> None:
        pipeline.execute_command("DEL", self.key)

    def outcome(self, result: Any) -> Outcome:
        return Outcome.HELD if result else Outcome.ABSENT

    @property
    def _lease_ms(self) -> int:
        return round(self.lease.filter_s * 1000)


def filter_version(data: bytes) -> bytes:
    """8 bytes that change with the filter: readers fetch only filters that changed."""
    return blake2b(data, digest_size=VERSION_BYTES).digest()


def encode_record(record: Any) -> tuple[Value, ...]:
    """Field, value, field, value, ... of a record dataclass."""
    values: list[Value] = []
    for item in fields(record):
        value = getattr(record, item.name)
        values += [item.name, int(value) if isinstance(value, bool) else value]
    return tuple(values)


def decode_record(cls: type[RecordT], stored: Mapping[bytes, bytes]) -> RecordT | None:
    """The inverse of `encode_record`; None if a field is missing or no such value.

    Fields of a newer version are passed over.
    """
    values: dict[str, Any] = {}
    for item in fields(cls):  # type: ignore[arg-type]
        raw = stored.get(item.name.encode())
        if raw is None:
            if item.default is MISSING:
                return None
            continue
        try:
            values[item.name] = _DECODERS[item.type](raw)  # type: ignore[index]
        except ValueError:
            return None
    return cls(**values)


_DECODERS: dict[Any, Any] = {
    str: bytes.decode,
    int: int,
    bool: lambda raw: bool(int(raw)),
    bytes: bytes,
}
