"""The registry: who is there, how full they are, and what their caches hold.

Processes announce themselves and read about others; memory decides, Redis only remembers. So
nothing here raises or waits because of Redis, reads answer from the last picture seen, and a
record's absence may stop discovery but never ends a connection that lives. All methods belong
to one event loop's thread. Must not know: services. Entry point: `open_registry`.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

RecordT = TypeVar("RecordT")


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker, told by itself. `last_leader_id` stays when nobody leads it."""

    worker_id: str
    address: str
    boot_id: str
    model: str
    revision: str
    num_blocks: int
    max_num_seqs: int
    leader_id: str
    epoch: int
    last_leader_id: str = ""


@dataclass(frozen=True, slots=True)
class SchedulerRecord:
    """A scheduler and its cell, told by itself.

    `takes_workers`: it leads workers that the registry shows, not a list of its own.
    """

    scheduler_id: str
    address: str
    model: str
    num_workers: int
    backlog_tokens: int
    prefill_tokens_per_s: int
    draining: bool
    takes_workers: bool = True


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """How full a worker is, told by its leader.

    `sequence` rises with each change that the leader tells; bit `b` of `used_bitmap`
    (little-endian bit order) says that block `b` is referenced.
    """

    worker_id: str
    leader_id: str
    boot_id: str
    epoch: int
    num_blocks: int
    num_used: int
    num_cached: int
    num_free: int
    num_rows: int
    backlog_tokens: int
    sequence: int
    used_bitmap: bytes


class Registry(Protocol):
    """What every service may ask and tell. See the module's docstring for the rules."""

    async def start(self) -> None:
        """Begin to write and read in the background; returns at once."""
        ...

    async def close(self) -> None:
        """Withdraw what was announced and stop; takes a second at most."""
        ...

    def announce_worker(self, record: WorkerRecord) -> None:
        """Set this process's latest state; a newer process of the same id wins over it."""
        ...

    def announce_scheduler(self, record: SchedulerRecord) -> None:
        """As `announce_worker`."""
        ...

    def publish_usage(self, record: UsageRecord) -> None:
        """Set a led worker's usage; a higher epoch, or the worker's other boot, wins over it."""
        ...

    def withdraw_usage(self, worker_id: str) -> None:
        """This process doesn't lead the worker any more."""
        ...

    def publish_filter(self, scheduler_id: str, data: bytes) -> None:
        """Set the Bloom filter (`octavo.bloom`) of an announced scheduler's sealed blocks."""
        ...

    def workers(self) -> tuple[WorkerRecord, ...]:
        """Workers last seen, by id."""
        ...

    def schedulers(self) -> tuple[SchedulerRecord, ...]:
        """Schedulers last seen, by id."""
        ...

    def usages(self) -> tuple[UsageRecord, ...]:
        """Usage last seen, by worker id."""
        ...

    def filters(self) -> Mapping[str, bytes]:
        """Filters last seen of schedulers; an unchanged one is the same object."""
        ...

    def lag_s(self) -> float:
        """Age of the oldest state not yet written, in seconds; 0 = all written."""
        ...


# Records of one id by the rank of the registry that told them: later registries rank higher.
_Claims = dict[str, dict[int, RecordT]]


@dataclass(slots=True)
class MemoryStore:
    """What several MemoryRegistries share; stands for Redis."""

    workers: _Claims[WorkerRecord] = field(default_factory=dict[str, dict[int, WorkerRecord]])
    schedulers: _Claims[SchedulerRecord] = field(
        default_factory=dict[str, dict[int, SchedulerRecord]]
    )
    usages: _Claims[UsageRecord] = field(default_factory=dict[str, dict[int, UsageRecord]])
    filters: _Claims[bytes] = field(default_factory=dict[str, dict[int, bytes]])
    ranks: "itertools.count[int]" = field(default_factory=itertools.count)


def _newest(claims: _Claims[RecordT]) -> dict[str, RecordT]:
    return {name: held[max(held)] for name, held in sorted(claims.items()) if held}


class MemoryRegistry:
    """The registry of one process, without leases: memory ends with those who wrote it."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self._store = store or MemoryStore()
        self._rank = next(self._store.ranks)

    async def start(self) -> None:
        """Nothing to do: announcing is writing."""

    async def close(self) -> None:
        """Withdraw everything that this registry told."""
        store = self._store
        tables: tuple[_Claims[Any], ...] = (
            store.workers,
            store.schedulers,
            store.usages,
            store.filters,
        )
        for claims in tables:
            for held in claims.values():
                held.pop(self._rank, None)

    def announce_worker(self, record: WorkerRecord) -> None:
        self._store.workers.setdefault(record.worker_id, {})[self._rank] = record

    def announce_scheduler(self, record: SchedulerRecord) -> None:
        self._store.schedulers.setdefault(record.scheduler_id, {})[self._rank] = record

    def publish_usage(self, record: UsageRecord) -> None:
        self._store.usages.setdefault(record.worker_id, {})[self._rank] = record

    def withdraw_usage(self, worker_id: str) -> None:
        self._store.usages.get(worker_id, {}).pop(self._rank, None)

    def publish_filter(self, scheduler_id: str, data: bytes) -> None:
        self._store.filters.setdefault(scheduler_id, {})[self._rank] = data

    def workers(self) -> tuple[WorkerRecord, ...]:
        return tuple(_newest(self._store.workers).values())

    def schedulers(self) -> tuple[SchedulerRecord, ...]:
        return tuple(_newest(self._store.schedulers).values())

    def usages(self) -> tuple[UsageRecord, ...]:
        workers = _newest(self._store.workers)
        return tuple(
            usage
            for name, held in sorted(self._store.usages.items())
            if (usage := _current_usage(held, workers.get(name))) is not None
        )

    def filters(self) -> Mapping[str, bytes]:
        seen = _newest(self._store.schedulers)
        filters = _newest(self._store.filters)
        return MappingProxyType({name: data for name, data in filters.items() if name in seen})

    def lag_s(self) -> float:
        return 0.0


def _current_usage(
    held: Mapping[int, UsageRecord], worker: WorkerRecord | None
) -> UsageRecord | None:
    """The highest epoch of the boot that the worker names, else of the first boot told."""
    if not held:
        return None
    boot_id = worker.boot_id if worker else next(iter(held.values())).boot_id
    usages = [usage for usage in held.values() if usage.boot_id == boot_id]
    return max(usages, key=lambda usage: usage.epoch, default=None)


def open_registry(url: str, fleet: str) -> Registry:
    """A registry on the Redis at `url`, or a private one in memory for "".

    Raises ConfigurationError for a URL or a fleet name that can't be right. Never logs the
    URL's password.
    """
    if not url:
        return MemoryRegistry()
    from octavo.redis_registry import RedisRegistry

    return RedisRegistry(url, fleet)
