"""Registries and records for the contract suite, and how to wait for what must come."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from octavo.redis_link import LinkTiming
from octavo.redis_registry import RedisRegistry, RegistryTiming
from octavo.redis_state import Lease
from octavo.registry import (
    MemoryRegistry,
    MemoryStore,
    Registry,
    SchedulerRecord,
    UsageRecord,
    WorkerRecord,
)

# Ten times faster than in service. Leases keep their length: they must survive a busy machine.
FAST = RegistryTiming(
    write_s=0.01,
    renew_s=0.1,
    read_s=0.03,
    read_filters_s=0.05,
    asked_s=1.0,
    link=LinkTiming(socket_s=0.5, call_s=1.0, min_pause_s=0.01, max_pause_s=0.2),
)
SHORT_LEASE = replace(FAST, lease=Lease(record_s=0.5, filter_s=0.5, member_s=1.0))
# A guard against hanging, no measure.
_PATIENCE_S = 20.0


class Backend:
    """Opens registries that see one another; each stands for a process of its own."""

    def __init__(self, url: str, fleet: str) -> None:
        self.url = url
        self.fleet = fleet
        self._store = MemoryStore()

    def open(self, fleet: str | None = None, timing: RegistryTiming = FAST) -> Registry:
        """A registry that isn't started."""
        if not self.url:
            return MemoryRegistry(self._store if fleet is None else MemoryStore())
        return RedisRegistry(self.url, fleet or self.fleet, timing)

    @asynccontextmanager
    async def running(self, count: int) -> AsyncGenerator[list[Registry]]:
        """`count` started registries, oldest first, closed at the end."""
        async with AsyncExitStack() as stack:
            registries = [self.open() for _ in range(count)]
            for registry in registries:
                await registry.start()
                stack.push_async_callback(registry.close)
            yield registries


async def eventually(look: Callable[[], Any], expected: Any) -> None:
    """Wait until `look()` equals `expected`; fails showing the last thing seen."""
    deadline = time.monotonic() + _PATIENCE_S
    while (seen := look()) != expected:
        assert time.monotonic() < deadline, f"{seen!r} never became {expected!r}"
        await asyncio.sleep(0.01)


async def always(look: Callable[[], Any], expected: Any, during_s: float = 0.5) -> None:
    """`look()` equals `expected` all the time of several writes, renewals and reads."""
    deadline = time.monotonic() + during_s
    while time.monotonic() < deadline:
        assert (seen := look()) == expected, f"{seen!r} is not {expected!r}"
        await asyncio.sleep(0.01)


async def settled(*registries: Registry) -> None:
    """Wait until all that was told is written."""
    for registry in registries:
        await eventually(registry.lag_s, 0.0)


def worker(worker_id: str = "w1", **changes: Any) -> WorkerRecord:
    record = WorkerRecord(
        worker_id=worker_id,
        address="127.0.0.1:8200",
        boot_id="boot-a",
        model="org/model",
        revision="0123abcd",
        num_blocks=4096,
        max_num_seqs=256,
        leader_id="s1",
        epoch=3,
    )
    return replace(record, **changes)


def scheduler(scheduler_id: str = "s1", **changes: Any) -> SchedulerRecord:
    record = SchedulerRecord(
        scheduler_id=scheduler_id,
        address="127.0.0.1:8100",
        model="org/model",
        num_workers=2,
        backlog_tokens=12_345,
        prefill_tokens_per_s=46_000,
        draining=False,
    )
    return replace(record, **changes)


def usage(worker_id: str = "w1", **changes: Any) -> UsageRecord:
    record = UsageRecord(
        worker_id=worker_id,
        leader_id="s1",
        boot_id="boot-a",
        epoch=3,
        num_blocks=4096,
        num_used=16,
        num_cached=100,
        num_free=3979,
        num_rows=7,
        backlog_tokens=999,
        sequence=1,
        used_bitmap=bytes(range(256)) * 2,
    )
    return replace(record, **changes)
