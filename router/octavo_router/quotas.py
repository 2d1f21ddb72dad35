"""Tenants' quotas in this router: their meters, and the deals made behind the requests' backs.

A request only does arithmetic; a task of its own tells the store what was spent and takes the next
share: at once when a tenant appears, every tenth of a second while one is busy, every second while
it isn't, and not at all a minute later. Must not know: HTTP, how a store works.
Entry points: `Quotas.meter`, `Quotas.start`, `open_quotas`.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo_router.buckets import (
    BucketStore,
    DealRequest,
    MemoryBuckets,
    MemoryStore,
)
from octavo_router.meter import Meter
from octavo_router.quota import QuotaTable

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class QuotaTiming:
    """Seconds between deals of a busy tenant, of an idle one, and until it is dropped."""

    busy_s: float = 0.1
    idle_s: float = 1.0
    drop_s: float = 60.0
    # Spent at most on giving back at the end.
    close_s: float = 1.0


class Quotas:
    """The meters of one router. `start` and `close` enclose its life."""

    def __init__(
        self,
        table: QuotaTable,
        store: BucketStore,
        timing: QuotaTiming | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table = table
        self._store = store
        self._timing = timing or QuotaTiming()
        self._clock = clock
        self._meters: dict[str, Meter] = {}
        self._has_news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to deal in the background."""
        self._task = asyncio.create_task(self._run(), name="quotas")

    async def close(self) -> None:
        """Give back what this router holds; takes a second at most."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        # A task stopped between two answers leaves its connection out of step.
        await self._store.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timing.close_s):
                await self._deal(list(self._meters.values()), is_leaving=True)
        await self._store.close()

    def meter(self, tenant: str) -> Meter | None:
        """The tenant's meter; None = it has no quota."""
        meter = self._meters.get(tenant)
        if meter is None:
            quota = self._table.of(tenant)
            if quota is None:
                return None
            meter = self._meters[tenant] = Meter(tenant, quota, self._clock, self._has_news.set)
            self._has_news.set()
        return meter

    def lag_s(self) -> float:
        """Age of the oldest spending that the store doesn't know of, in s."""
        times = [meter.news_since for meter in list(self._meters.values())]
        since = min((at for at in times if at is not None), default=None)
        return 0.0 if since is None else self._clock() - since

    async def _run(self) -> None:
        while True:
            if self._meters:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._timing.idle_s):
                        await self._has_news.wait()
            else:
                await self._has_news.wait()
            self._has_news.clear()
            try:
                await self._deal(self._due())
                await self._drop_idle()
            except Exception:
                # A mistake of ours must not end all deals of this process.
                log.exception("dealing quotas")
            await asyncio.sleep(self._timing.busy_s)

    def _due(self) -> list[Meter]:
        idle_before = self._clock() - self._timing.idle_s
        return [
            meter
            for meter in self._meters.values()
            if meter.news_since is not None or meter.dealt_at <= idle_before
        ]

    async def _drop_idle(self) -> None:
        before = self._clock() - self._timing.drop_s
        idle = [
            meter
            for meter in self._meters.values()
            if meter.used_at <= before and not meter.num_charges
        ]
        await self._deal(idle, is_leaving=True)
        for meter in idle:
            # One that the store still knows must go on: a new one would count from 0.
            if meter.used_at <= before and meter.dealt_at > before:
                del self._meters[meter.tenant]

    async def _deal(self, meters: Sequence[Meter], *, is_leaving: bool = False) -> None:
        if not meters:
            return
        now = self._clock()
        needs = [meter.needs(now) for meter in meters]
        requests = [
            DealRequest(meter.tenant, need, meter.num_routers, is_leaving)
            for meter, need in zip(meters, needs, strict=True)
        ]
        deals = await self._store.deal(requests)
        for meter, need, deal in zip(meters, needs, deals, strict=True):
            if deal is not None:
                meter.apply(need, deal)
                if meter.news_since is not None:
                    self._has_news.set()


def open_quotas(parts: Sequence[str], redis_url: str, router_id: str) -> Quotas | None:
    """As the settings want them; None without any. Raises ConfigurationError."""
    table = QuotaTable.from_setting(parts)
    if not table:
        return None
    store: BucketStore = MemoryBuckets(MemoryStore(), router_id)
    if redis_url:
        from octavo_router.redis_buckets import RedisBuckets

        store = RedisBuckets(redis_url, router_id)
    return Quotas(table, store)
