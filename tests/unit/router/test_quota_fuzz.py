"""Routers that spend, deal, lose answers, die and are born anew never let in what isn't there."""

import asyncio
import itertools
import random

import pytest

from octavo.errors import RateLimitError
from octavo_router.buckets import DealRequest, MemoryBuckets, MemoryStore
from octavo_router.meter import STALE_S, Meter
from octavo_router.quota import Quota

QUOTA = 60
SLICE = QUOTA // 10
NUM_EVENTS = 400
WAITS_S = (0.02, 0.1, 0.5)


class _Router:
    """A router of the fleet. `age_s` since it last heard of a deal."""

    def __init__(self, name: str, store: MemoryStore) -> None:
        self.buckets = MemoryBuckets(store, name)
        self.meter = Meter("acme", Quota(requests=QUOTA), store.clock, lambda: None)
        self.age_s = 0.0

    async def deal(self, *, is_answer_lost: bool = False, is_leaving: bool = False) -> None:
        needs = self.meter.needs(self.meter.used_at)
        request = DealRequest("acme", needs, self.meter.num_routers, is_leaving)
        (deal,) = await self.buckets.deal([request])
        assert deal is not None
        if not is_answer_lost:
            self.meter.apply(needs, deal)
            self.age_s = 0.0


class Fleet:
    """Three routers, each with a deal every few seconds at least: else another rule holds."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.num_admitted = 0
        self.num_born = 0
        self.names = itertools.count()
        self.store = MemoryStore(lambda: self.now)
        self.routers = [self.born() for _ in range(3)]

    def born(self) -> _Router:
        self.num_born += 1
        return _Router(f"r{next(self.names)}", self.store)

    def spend(self) -> None:
        """A few, or all that is let in."""
        router = self.rng.choice(self.routers)
        for _ in range(self.rng.choice((1, 5, 1000))):
            try:
                router.meter.begin()
            except RateLimitError:
                return
            self.num_admitted += 1

    async def wait(self) -> None:
        """Time passes; all deal but one, whose answer may be lost too."""
        seconds = self.rng.choice(WAITS_S)
        self.now += seconds
        deaf = self.rng.randrange(len(self.routers))
        for index, router in enumerate(self.routers):
            router.age_s += seconds
            is_due = router.age_s + max(WAITS_S) >= STALE_S
            if index != deaf or is_due:
                await router.deal()
            elif self.rng.random() < 0.5:
                await router.deal(is_answer_lost=True)

    async def die(self) -> None:
        which = self.rng.randrange(len(self.routers))
        if self.rng.random() < 0.5:
            await self.routers[which].deal(is_leaving=True)
        self.routers[which] = self.born()

    def check(self) -> None:
        # A slice before its first deal, and one that a router borrows.
        limit = QUOTA * (1 + self.now / 60) + 2 * SLICE * self.num_born
        assert self.num_admitted <= limit
        bucket = self.store.buckets.get("acme")
        if bucket is not None:
            held = sum(router.held[0] for router in bucket.routers.values())
            assert (bucket.levels[0] or 0.0) + held <= QUOTA + 1e-6


@pytest.mark.parametrize("seed", range(30))
def test_random_lives(seed: int) -> None:
    fleet = Fleet(seed)

    async def run() -> None:
        for _ in range(NUM_EVENTS):
            chance = fleet.rng.random()
            if chance < 0.5:
                fleet.spend()
            elif chance < 0.99:
                await fleet.wait()
            else:
                await fleet.die()
            fleet.check()
        # And most of what is there is let in; the dead take some of it with them.
        assert fleet.num_admitted >= QUOTA * fleet.now / 60 / 2

    asyncio.run(run())
