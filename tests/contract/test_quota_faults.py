"""Two routers and one quota: a race, and Redis killed, frozen, emptied, full, absent.

A router only does arithmetic on a request, so nothing here may raise or wait; what is let in stays
near the quota, and what was spent while Redis was away is told when it is back.
"""

import asyncio
import time
from collections.abc import Iterator

import pytest

from octavo.keys import bucket_key
from octavo_router.quotas import Quotas
from tests.contract.registries import eventually
from tests.contract.routers import FAST, Fleet
from tests.redis_servers import RedisServer, redis_binary

PER_MINUTE = 600
QUOTA = f"{PER_MINUTE}r/m"
# What a router may let in that it wasn't dealt: see octavo_router.meter.
SLICE = PER_MINUTE // 10


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """One kind: both take the same script, as test_buckets shows."""
    with RedisServer(redis_binary()) as server:
        yield server


def most(during_s: float, num_routers: int) -> float:
    """What a bucket gives, and each router's slice."""
    return PER_MINUTE * (1 + during_s / 60) + num_routers * SLICE


async def flood(fleet: Fleet, routers: list[Quotas], during_s: float) -> tuple[int, float]:
    """How many were let in, in how many seconds."""
    started = time.monotonic()
    num_admitted = await fleet.flood(routers, during_s)
    return num_admitted, time.monotonic() - started


def test_a_race_for_one_quota(backend_url: str) -> None:
    num_routers = 3
    fleet = Fleet(backend_url)

    async def run() -> None:
        async with fleet.running(num_routers, QUOTA) as routers:
            num_admitted, during_s = await flood(fleet, routers, 0.6)
            assert num_admitted >= PER_MINUTE / 2
            assert num_admitted <= most(during_s, num_routers)
            # Debts are paid: over the whole time, too, nothing but the slices is too much.
            more, longer_s = await flood(fleet, routers, 0.4)
            assert num_admitted + more <= most(during_s + longer_s, num_routers)

    asyncio.run(run())


def test_an_idle_tenant_costs_nothing_after_a_while(server: RedisServer) -> None:
    fleet = Fleet(server.url)
    timing = type(FAST)(busy_s=0.01, idle_s=0.05, drop_s=0.3)

    async def run() -> None:
        async with fleet.running(1, "6r/m", timing) as (router,):
            assert fleet.admit(router)
            await eventually(lambda: len(router._meters), 0)
            server.command("CONFIG", "RESETSTAT")
            await asyncio.sleep(0.3)
            assert "eval" not in server.call_counts()
            # What it spent is remembered.
            meter = router.meter(fleet.tenant)
            assert meter is not None
            await eventually(lambda: meter.dealt_at > 0, True)
            assert meter.headers()["x-ratelimit-remaining-requests"] == "5"

    asyncio.run(run())


def test_requests_dont_call_redis_deals_do(server: RedisServer) -> None:
    fleet = Fleet(server.url)

    async def run() -> None:
        async with fleet.running(1, "100000000r/m") as (router,):
            fleet.admit(router)
            await eventually(router.lag_s, 0.0)
            server.command("CONFIG", "RESETSTAT")
            for _ in range(2000):
                assert fleet.admit(router)
            assert "eval" not in server.call_counts()
            await eventually(router.lag_s, 0.0)
            assert server.call_counts()["eval"] <= 3

    asyncio.run(run())


def test_redis_absent_killed_and_back(server: RedisServer) -> None:
    fleet = Fleet(server.url)
    server.kill()

    async def run() -> None:
        async with fleet.running(2, QUOTA) as routers:
            # From the start: each has its slice and what comes in.
            num_admitted, _ = await flood(fleet, routers, 0.5)
            assert 2 * SLICE <= num_admitted <= 4 * SLICE
            assert routers[0].lag_s() > 0.1
            await asyncio.to_thread(server.start)
            for router in routers:
                await eventually(router.lag_s, 0.0)
            again, during_s = await flood(fleet, routers, 1.0)
            assert PER_MINUTE / 2 <= num_admitted + again <= most(during_s + 0.5, 2)

    asyncio.run(run())


@pytest.mark.slow
def test_redis_killed_when_the_quota_is_used_up(server: RedisServer) -> None:
    fleet = Fleet(server.url)

    async def run() -> None:
        async with fleet.running(2, QUOTA) as routers:
            await flood(fleet, routers, 0.5)
            server.kill()
            # There is nobody to ask: little by little it goes on.
            slowly, during_s = await flood(fleet, routers, 4.0)
            assert 1 <= slowly <= PER_MINUTE * during_s / 60 + 2 * SLICE
            await asyncio.to_thread(server.start)
            for router in routers:
                await eventually(router.lag_s, 0.0)

    asyncio.run(run())


def test_redis_emptied_forgets_nothing_that_routers_know(server: RedisServer) -> None:
    fleet = Fleet(server.url)

    async def run() -> None:
        async with fleet.running(2, QUOTA) as routers:
            num_admitted, _ = await flood(fleet, routers, 0.5)
            assert num_admitted >= PER_MINUTE / 2
            for router in routers:
                await eventually(router.lag_s, 0.0)
            server.command("FLUSHALL")
            again, during_s = await flood(fleet, routers, 1.0)
            assert num_admitted + again <= most(during_s + 0.5, 2) + SLICE
            assert server.command("EXISTS", bucket_key(fleet.tenant)) == 1

    asyncio.run(run())


def test_redis_frozen_delays_nobody(server: RedisServer) -> None:
    fleet = Fleet(server.url)

    async def run() -> None:
        async with fleet.running(2, QUOTA) as routers:
            assert all(fleet.admit(router) for router in routers)
            for router in routers:
                await eventually(router.lag_s, 0.0)
            server.freeze()
            slowest_s = 0.0
            for _ in range(200):
                before = time.monotonic()
                for router in routers:
                    fleet.admit(router)
                slowest_s = max(slowest_s, time.monotonic() - before)
                await asyncio.sleep(0.002)
            print(f"slowest request while Redis was frozen: {slowest_s * 1000:.2f} ms")
            assert routers[0].lag_s() > 0.1
            server.thaw()
            for router in routers:
                await eventually(router.lag_s, 0.0)

    asyncio.run(run())


def test_a_full_redis_is_as_good_as_none(server: RedisServer) -> None:
    fleet = Fleet(server.url)
    server.command("CONFIG", "SET", "maxmemory", 1)

    async def run() -> None:
        async with fleet.running(1, QUOTA) as (router,):
            num_admitted = await fleet.flood([router], 0.5)
            assert SLICE <= num_admitted <= 2 * SLICE
            assert router.lag_s() > 0.1
            server.command("CONFIG", "SET", "maxmemory", 0)
            await eventually(router.lag_s, 0.0)
            assert await fleet.flood([router], 0.5) >= PER_MINUTE / 2

    asyncio.run(run())


def test_a_killed_routers_share_comes_back(backend_url: str) -> None:
    fleet = Fleet(backend_url)

    async def run() -> None:
        async with fleet.running(2, QUOTA) as (stays, killed):
            for router in (stays, killed):
                fleet.admit(router)
            meter = stays.meter(fleet.tenant)
            assert meter is not None
            await eventually(lambda: meter.num_routers, 2)
            # As if by SIGKILL: it says nothing more, and gives nothing back.
            assert killed._task is not None
            killed._task.cancel()
            killed._meters.clear()
            # It is counted out after a while, and what it held refills.
            await eventually(lambda: meter.num_routers, 1)
            while fleet.admit(stays):
                pass
            await eventually(lambda: fleet.admit(stays), True)

    asyncio.run(run())
