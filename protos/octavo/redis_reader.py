"""Reads the fleet's picture on a timer, only while somebody asks for it.

A failed read leaves the last picture as it is. Must not know: writers. Entry points:
`PictureReader.picture`, `PictureReader.run_forever`.
"""

import asyncio
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from octavo.keys import FleetKeys, Member, MemberKind, parse_member
from octavo.redis_link import RedisLink, execute
from octavo.redis_state import VERSION_BYTES, decode_record
from octavo.registry import SchedulerRecord, UsageRecord, WorkerRecord

RecordT = TypeVar("RecordT")


class Topic(Enum):
    """What somebody may ask for."""

    WORKERS = "workers"
    SCHEDULERS = "schedulers"
    USAGES = "usages"
    FILTERS = "filters"


_KINDS = {
    Topic.WORKERS: MemberKind.WORKER,
    Topic.SCHEDULERS: MemberKind.SCHEDULER,
    Topic.USAGES: MemberKind.USAGE,
    # A filter shows only beside its scheduler.
    Topic.FILTERS: MemberKind.SCHEDULER,
}


@dataclass(frozen=True, slots=True)
class Picture:
    """Records last seen, ordered by id."""

    workers: tuple[WorkerRecord, ...] = ()
    schedulers: tuple[SchedulerRecord, ...] = ()
    usages: tuple[UsageRecord, ...] = ()
    filters: Mapping[str, bytes] = field(default_factory=lambda: MappingProxyType({}))


class _Filter(NamedTuple):
    version: bytes
    data: bytes


class PictureReader:
    """The picture of one fleet."""

    def __init__(
        self,
        link: RedisLink,
        keys: FleetKeys,
        *,
        read_s: float,
        read_filters_s: float,
        asked_s: float,
    ) -> None:
        self._link = link
        self._keys = keys
        self._read_s = read_s
        self._read_filters_s = read_filters_s
        self._asked_s = asked_s
        self._picture = Picture()
        self._filters: dict[str, _Filter] = {}
        self._filters_read_at = -math.inf
        self._asked_at: dict[Topic, float] = {}
        self._asked = asyncio.Event()

    def picture(self, topic: Topic) -> Picture:
        """What was last seen; `topic` is read again soon and for a while."""
        self._asked_at[topic] = time.monotonic()
        self._asked.set()
        return self._picture

    async def run_forever(self) -> None:
        """Read; ends only by cancellation."""
        while True:
            await self._asked.wait()
            since = time.monotonic() - self._asked_s
            topics = {topic for topic, asked_at in self._asked_at.items() if asked_at >= since}
            if not topics:
                self._asked.clear()
            elif await self._link.call(partial(self._read, topics=topics)):
                await asyncio.sleep(self._read_s)

    async def _read(self, client: Any, *, topics: Collection[Topic]) -> None:
        kinds = {_KINDS[topic] for topic in topics}
        raw: list[bytes] = await client.zrange(self._keys.members, 0, -1)
        parsed = (parse_member(text.decode(errors="replace")) for text in raw)
        members = sorted(
            (member for member in parsed if member is not None and member.kind in kinds),
            key=lambda member: member.id,
        )
        pipeline = client.pipeline(transaction=False)
        for member in members:
            pipeline.hgetall(self._keys.of_member(member))
        hashes = await _read_all(pipeline)
        picture = self._picture
        if MemberKind.WORKER in kinds:
            workers = _decode(WorkerRecord, MemberKind.WORKER, members, hashes)
            picture = replace(picture, workers=workers)
        if MemberKind.USAGE in kinds:
            usages = _decode(UsageRecord, MemberKind.USAGE, members, hashes)
            picture = replace(picture, usages=usages)
        if MemberKind.SCHEDULER in kinds:
            schedulers = _decode(SchedulerRecord, MemberKind.SCHEDULER, members, hashes)
            picture = replace(picture, schedulers=schedulers)
        if Topic.FILTERS in topics:
            ids = [record.scheduler_id for record in picture.schedulers]
            picture = replace(picture, filters=await self._read_filters(client, ids))
        self._picture = picture

    async def _read_filters(self, client: Any, ids: Sequence[str]) -> Mapping[str, bytes]:
        """Filters of the schedulers `ids`; fetches those whose version changed."""
        now = time.monotonic()
        if now >= self._filters_read_at + self._read_filters_s:
            pipeline = client.pipeline(transaction=False)
            for name in ids:
                pipeline.getrange(self._keys.filter(name), 0, VERSION_BYTES - 1)
            versions = dict(zip(ids, await _read_all(pipeline), strict=True))
            kept = {
                name: known
                for name, known in self._filters.items()
                if known.version == versions.get(name)
            }
            changed = [name for name, version in versions.items() if version and name not in kept]
            pipeline = client.pipeline(transaction=False)
            for name in changed:
                pipeline.get(self._keys.filter(name))
            for name, value in zip(changed, await _read_all(pipeline), strict=True):
                if value:
                    kept[name] = _Filter(value[:VERSION_BYTES], value[VERSION_BYTES:])
            self._filters = kept
            self._filters_read_at = now
        return MappingProxyType(
            {name: self._filters[name].data for name in ids if name in self._filters}
        )


async def _read_all(pipeline: Any) -> list[Any]:
    """The results; None for a command that failed by itself."""
    results = await execute(pipeline)
    return [None if isinstance(result, Exception) else result for result in results]


def _decode(
    cls: type[RecordT], kind: MemberKind, members: Sequence[Member], hashes: Sequence[Any]
) -> tuple[RecordT, ...]:
    """Records of `kind`; members whose hash is gone, or unreadable, are left out."""
    stored = (values for member, values in zip(members, hashes, strict=True) if member.kind is kind)
    records = (decode_record(cls, values) for values in stored if values)
    return tuple(record for record in records if record is not None)
