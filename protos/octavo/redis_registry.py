"""The registry over Redis: written behind, read on a timer, never waited for.

A writer and a reader each have a task and a connection of their own, and each may fail for
ever. Must not know: services. Entry point: `RedisRegistry`.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from octavo.keys import FleetKeys, Member, MemberKind
from octavo.redis_link import LinkTiming, RedisLink
from octavo.redis_reader import PictureReader, Topic
from octavo.redis_state import HashState, Lease, StringState, Writer, encode_record
from octavo.redis_url import RedisUrl
from octavo.redis_writer import StateWriter
from octavo.registry import SchedulerRecord, UsageRecord, WorkerRecord

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RegistryTiming:
    """Intervals in seconds."""

    # Between two pipelines; between two renewals of all leases.
    write_s: float = 0.1
    renew_s: float = 1.0
    # Between two reads; of filters, which are large and age well.
    read_s: float = 0.5
    read_filters_s: float = 2.0
    # Reading goes on so long after somebody asked.
    asked_s: float = 10.0
    # Spent at most on withdrawing everything at the end.
    close_s: float = 1.0
    link: LinkTiming = field(default_factory=LinkTiming)
    lease: Lease = field(default_factory=Lease)


class RedisRegistry:
    """Implements `octavo.registry.Registry`. Raises ConfigurationError for a wrong URL."""

    def __init__(self, url: str, fleet: str, timing: RegistryTiming | None = None) -> None:
        timing = timing or RegistryTiming()
        self._timing = timing
        self._keys = FleetKeys(fleet)
        self._url = RedisUrl.parse(url)
        self._identity = Writer(uuid.uuid4().hex, time.time_ns() // 1000)
        self._policy = "noeviction"
        self._write_link = RedisLink(self._url, timing.link, self._check_policy)
        self._read_link = RedisLink(self._url, timing.link, self._check_policy)
        self._writer = StateWriter(self._write_link, write_s=timing.write_s, renew_s=timing.renew_s)
        self._reader = PictureReader(
            self._read_link,
            self._keys,
            read_s=timing.read_s,
            read_filters_s=timing.read_filters_s,
            asked_s=timing.asked_s,
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._writer.run_forever(), name="registry-write"),
            asyncio.create_task(self._reader.run_forever(), name="registry-read"),
        ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # A task stopped between two answers leaves its connection out of step.
        await self._read_link.close()
        await self._write_link.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timing.close_s):
                await self._writer.withdraw_all()
        await self._write_link.close()

    def announce_worker(self, record: WorkerRecord) -> None:
        self._set_own(Member(MemberKind.WORKER, record.worker_id), record)

    def announce_scheduler(self, record: SchedulerRecord) -> None:
        self._set_own(Member(MemberKind.SCHEDULER, record.scheduler_id), record)

    def publish_usage(self, record: UsageRecord) -> None:
        self._writer.set(
            HashState(
                keys=self._keys,
                member=Member(MemberKind.USAGE, record.worker_id),
                writer=self._identity,
                lease=self._timing.lease,
                scope=record.boot_id,
                rank=record.epoch,
                values=encode_record(record),
                worker_key=self._keys.worker(record.worker_id),
            )
        )

    def withdraw_usage(self, worker_id: str) -> None:
        self._writer.withdraw(self._keys.usage(worker_id))

    def publish_filter(self, scheduler_id: str, data: bytes) -> None:
        self._writer.set(StringState(self._keys.filter(scheduler_id), self._timing.lease, data))

    def workers(self) -> tuple[WorkerRecord, ...]:
        return self._reader.picture(Topic.WORKERS).workers

    def schedulers(self) -> tuple[SchedulerRecord, ...]:
        return self._reader.picture(Topic.SCHEDULERS).schedulers

    def usages(self) -> tuple[UsageRecord, ...]:
        return self._reader.picture(Topic.USAGES).usages

    def filters(self) -> Mapping[str, bytes]:
        return self._reader.picture(Topic.FILTERS).filters

    def lag_s(self) -> float:
        return self._writer.lag_s()

    def _set_own(self, member: Member, record: WorkerRecord | SchedulerRecord) -> None:
        """This process's record: one scope, and the process that started later ranks higher."""
        self._writer.set(
            HashState(
                keys=self._keys,
                member=member,
                writer=self._identity,
                lease=self._timing.lease,
                scope="",
                rank=self._identity.started_us,
                values=encode_record(record),
            )
        )

    async def _check_policy(self, client: Any) -> None:
        """Warn, once for each policy seen, of a server that may remove our records."""
        policy = (await client.info("memory")).get("maxmemory_policy", "noeviction")
        if policy not in ("noeviction", self._policy):
            logger.warning(
                "Redis at %s has maxmemory-policy %s: it may remove the records of living "
                "processes; set it to noeviction",
                self._url,
                policy,
            )
        self._policy = policy
