"""Routers' quotas on one store, and how to send them requests; for the contract and the faults."""

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from octavo.errors import RateLimitError
from octavo.redis_link import LinkTiming
from octavo_router.buckets import BucketStore, MemoryBuckets, MemoryStore
from octavo_router.quota import QuotaTable
from octavo_router.quotas import Quotas, QuotaTiming
from octavo_router.redis_buckets import RedisBuckets

# Ten times faster than in service.
FAST = QuotaTiming(busy_s=0.01, idle_s=0.1, drop_s=60.0)
FORGET_S = 1.0
LINK = LinkTiming(socket_s=0.5, call_s=1.0, min_pause_s=0.01, max_pause_s=0.2)


@dataclass
class Fleet:
    """Routers that share tenants' buckets. `url` "" = in memory."""

    url: str
    memory: MemoryStore = field(default_factory=lambda: MemoryStore(forget_s=FORGET_S))
    names: "itertools.count[int]" = field(default_factory=itertools.count)
    # Of this test alone: tenants are keys of a server that others use too.
    tenant: str = field(default_factory=lambda: f"tenant-{uuid.uuid4().hex}")

    def store(self, name: str) -> BucketStore:
        if not self.url:
            return MemoryBuckets(self.memory, name)
        return RedisBuckets(self.url, name, LINK, FORGET_S)

    @asynccontextmanager
    async def running(
        self, count: int, quota: str, timing: QuotaTiming = FAST
    ) -> AsyncGenerator[list[Quotas]]:
        """`count` routers that know the tenant's quota."""
        table = QuotaTable.from_setting([f"{self.tenant}={quota}"])
        async with AsyncExitStack() as stack:
            routers = [
                Quotas(table, self.store(f"r{next(self.names)}"), timing) for _ in range(count)
            ]
            for router in routers:
                await router.start()
                stack.push_async_callback(router.close)
            yield routers

    def admit(self, router: Quotas, num_tokens: int = 0) -> bool:
        """One request; whether it was let in."""
        meter = router.meter(self.tenant)
        assert meter is not None
        try:
            charge = meter.begin()
        except RateLimitError:
            return False
        charge.take_tokens(num_tokens)
        charge.settle(num_tokens)
        return True

    async def flood(self, routers: Sequence[Quotas], during_s: float) -> int:
        """As many requests as are let in, from all sides; how many."""
        num_admitted = 0
        end = time.monotonic() + during_s
        while time.monotonic() < end:
            for router in routers:
                num_admitted += sum(self.admit(router) for _ in range(5))
            await asyncio.sleep(0.002)
        return num_admitted
