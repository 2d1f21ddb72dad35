"""Where routers share tenants' buckets, and the store of a router that has no Redis.

All stores deal by the same rules, which lua/deal.lua explains. Must not know: requests, errors,
Redis. Entry points: `BucketStore`, `MemoryBuckets`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

# A router that deals every second at least is gone after this.
FORGET_S = 5.0
_MINUTE_S = 60.0


class Need(NamedTuple):
    """One bucket as a router sees it. `spent` since the router began; `told`: the part of it
    that was in the last answered deal; `known`: what was left in all, None = it doesn't know."""

    quota: int
    spent: int
    told: int
    wanted: int
    known: float | None


class DealRequest(NamedTuple):
    """`needs`: requests, tokens. `num_routers`: last seen, for a store that forgot everything.
    `is_leaving`: give everything back."""

    tenant: str
    needs: tuple[Need, Need]
    num_routers: int
    is_leaving: bool


class Share(NamedTuple):
    """`granted` may be spent from now on; `left` is what all routers have and the bucket."""

    granted: int
    left: float


class Deal(NamedTuple):
    """The answer to a DealRequest."""

    num_routers: int
    shares: tuple[Share, Share]


class BucketStore(Protocol):
    """What routers share."""

    async def deal(self, requests: Sequence[DealRequest]) -> list[Deal | None]:
        """A deal for each; None where the store failed, after a pause that grows."""
        ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class _Router:
    seen_at: float
    spent: list[int] = field(default_factory=lambda: [0, 0])
    held: list[int] = field(default_factory=lambda: [0, 0])


@dataclass(slots=True)
class _Bucket:
    at: float
    levels: list[float | None] = field(default_factory=lambda: [None, None])
    routers: dict[str, _Router] = field(default_factory=dict[str, _Router])


class MemoryStore:
    """What MemoryBuckets of several routers share; stands for Redis."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, forget_s: float = FORGET_S
    ) -> None:
        self.clock = clock
        self.forget_s = forget_s
        self.buckets: dict[str, _Bucket] = {}


class MemoryBuckets:
    """Buckets of the routers in this process: without a Redis, of one."""

    def __init__(self, store: MemoryStore, router_id: str) -> None:
        self._store = store
        self._router_id = router_id

    async def deal(self, requests: Sequence[DealRequest]) -> list[Deal | None]:
        return [self._deal(request) for request in requests]

    async def close(self) -> None:
        """Nothing is open."""

    def _deal(self, request: DealRequest) -> Deal:
        now = self._store.clock()
        bucket = self._store.buckets.get(request.tenant)
        least_routers = request.num_routers if bucket is None else 1
        if bucket is None:
            bucket = self._store.buckets[request.tenant] = _Bucket(now)
        routers = bucket.routers
        for name, router in list(routers.items()):
            if name != self._router_id and now - router.seen_at > self._store.forget_s:
                del routers[name]
        others = [router for name, router in routers.items() if name != self._router_id]
        mine = routers.get(self._router_id)
        num_routers = max(len(others) + 1, least_routers)
        entry = _Router(now)
        shares: list[Share] = []
        for index, need in enumerate(request.needs):
            share = Share(0, 0.0)
            if need.quota:
                held_by_others = sum(router.held[index] for router in others)
                level = bucket.levels[index]
                if level is None:
                    level = need.quota if need.known is None else need.known
                news = need.spent - (need.told if mine is None else mine.spent[index])
                held = 0 if mine is None else mine.held[index]
                pool = level + need.quota * (now - bucket.at) / _MINUTE_S + held - news
                pool = max(-need.quota, min(need.quota - held_by_others, pool))
                granted = 0
                if pool > 0 and not request.is_leaving:
                    granted = min(int(pool), max(int(pool / num_routers), need.wanted))
                bucket.levels[index] = pool - granted
                share = Share(granted, pool + held_by_others)
            entry.spent[index], entry.held[index] = need.spent, share.granted
            shares.append(share)
        bucket.at = now
        if request.is_leaving:
            routers.pop(self._router_id, None)
        else:
            routers[self._router_id] = entry
        return Deal(num_routers, (shares[0], shares[1]))
