"""What every bucket store must do: the same suite over memory and real Redis."""

import asyncio
import time
import uuid

import pytest

from octavo_router.buckets import BucketStore, Deal, DealRequest, Need
from tests.contract.routers import Fleet

# So slow that no test sees it refill: one in a minute and a quarter of a million.
QUOTA = 1_000_000


@pytest.fixture
def fleet(backend_url: str) -> Fleet:
    return Fleet(backend_url)


def need(spent: int = 0, told: int = 0, wanted: int = 0, known: float | None = None) -> Need:
    return Need(QUOTA, spent, told, wanted, known)


async def deal(
    store: BucketStore,
    fleet: Fleet,
    requests: Need,
    tokens: Need | None = None,
    *,
    num_routers: int = 1,
    is_leaving: bool = False,
) -> Deal:
    needs = (requests, tokens or Need(0, 0, 0, 0, None))
    (answer,) = await store.deal([DealRequest(fleet.tenant, needs, num_routers, is_leaving)])
    assert answer is not None
    return answer


def near(count: float) -> object:
    """`count`, or a little more: a bucket refills by 17 in a millisecond."""
    return pytest.approx(count, abs=QUOTA / 10)


def test_the_first_router_gets_everything_and_may_spend_it(fleet: Fleet) -> None:
    async def run() -> None:
        store = fleet.store("r1")
        first = await deal(store, fleet, need())
        assert first.num_routers == 1
        assert first.shares[0] == (QUOTA, QUOTA)
        assert first.shares[1] == (0, 0)
        second = await deal(store, fleet, need(spent=700_000))
        assert second.shares[0].granted == near(300_000)
        assert second.shares[0].left == near(300_000)
        await store.close()

    asyncio.run(run())


def test_routers_never_hold_more_than_there_is(fleet: Fleet) -> None:
    async def run() -> None:
        stores = [fleet.store(f"r{index}") for index in range(4)]
        held = [0] * 4
        for _ in range(6):
            for index, store in enumerate(stores):
                share = (await deal(store, fleet, need())).shares[0]
                held[index] = share.granted
                assert sum(held) <= QUOTA
                assert share.left <= QUOTA
        assert min(held) > QUOTA / 10
        for store in stores:
            await store.close()

    asyncio.run(run())


def test_spending_is_counted_once_however_often_it_is_told(fleet: Fleet) -> None:
    async def run() -> None:
        store = fleet.store("r1")
        answer = await deal(store, fleet, need())
        for _ in range(5):
            # `told` stays behind, as it does when answers are lost.
            answer = await deal(store, fleet, need(spent=500_000, told=0))
        assert answer.shares[0].left == near(500_000)
        await store.close()

    asyncio.run(run())


def test_both_buckets_are_kept_apart_and_may_owe(fleet: Fleet) -> None:
    async def run() -> None:
        store = fleet.store("r1")
        answer = await deal(store, fleet, need(spent=100_000), need(spent=1_400_000))
        assert answer.shares[0].left == near(900_000)
        assert answer.shares[1].granted == 0
        assert answer.shares[1].left == near(-400_000)
        # No debt is deeper than a minute's quota.
        answer = await deal(store, fleet, need(spent=100_000), need(spent=9_000_000))
        assert answer.shares[1].left == near(-QUOTA)
        answer = await deal(store, fleet, need(spent=0), need(spent=8_400_000))
        assert answer.shares[0].left == near(QUOTA)
        assert answer.shares[1].left == near(-400_000)
        await store.close()

    asyncio.run(run())


def test_a_bucket_refills_evenly_and_not_beyond_its_quota(fleet: Fleet) -> None:
    async def run() -> None:
        store = fleet.store("r1")
        started = time.monotonic()
        before = (await deal(store, fleet, need(spent=900_000))).shares[0].left
        await asyncio.sleep(0.5)
        after = (await deal(store, fleet, need(spent=900_000))).shares[0].left
        longest_s = time.monotonic() - started
        assert QUOTA * 0.49 / 60 <= after - before <= QUOTA * longest_s / 60
        answer = await deal(store, fleet, need(spent=0))
        assert answer.shares[0].left == QUOTA
        await store.close()

    asyncio.run(run())


def test_who_wants_more_than_its_part_gets_it_from_what_lies_there(fleet: Fleet) -> None:
    async def run() -> None:
        first, second = fleet.store("r1"), fleet.store("r2")
        await deal(first, fleet, need())
        await deal(second, fleet, need())
        # Half goes back.
        assert (await deal(first, fleet, need())).shares[0].granted == QUOTA / 2
        answer = await deal(second, fleet, need(wanted=400_000))
        assert answer.num_routers == 2
        assert answer.shares[0].granted == 400_000
        answer = await deal(second, fleet, need(wanted=900_000))
        assert answer.shares[0].granted == near(500_000)
        await first.close()
        await second.close()

    asyncio.run(run())


def test_leaving_gives_back_what_was_held(fleet: Fleet) -> None:
    async def run() -> None:
        first, second = fleet.store("r1"), fleet.store("r2")
        await deal(first, fleet, need())
        assert (await deal(second, fleet, need())).shares[0].granted == 0
        await deal(first, fleet, need(spent=100_000), is_leaving=True)
        answer = await deal(second, fleet, need())
        assert answer.num_routers == 1
        assert answer.shares[0].granted == near(900_000)
        await first.close()
        await second.close()

    asyncio.run(run())


def test_tenants_are_dealt_to_apart_and_together(fleet: Fleet) -> None:
    async def run() -> None:
        store = fleet.store("r1")
        unlimited = Need(0, 0, 0, 0, None)
        names = [f"{fleet.tenant}-{index} {{odd}} ü" for index in range(3)]
        requests = [
            DealRequest(name, (need(spent=index * 100_000), unlimited), 1, False)
            for index, name in enumerate(names)
        ]
        answers = await store.deal(requests)
        assert [a.shares[0].left for a in answers if a] == [
            near(QUOTA - index * 100_000) for index in range(3)
        ]
        await store.close()

    asyncio.run(run())


def test_what_a_router_knows_outranks_a_store_that_forgot(fleet: Fleet) -> None:
    async def run() -> None:
        stores = [fleet.store("r1"), fleet.store("r2")]
        forgotten = Fleet(fleet.url, tenant=f"tenant-{uuid.uuid4().hex}")
        known = need(spent=5_000_000, told=4_950_000, known=300_000)
        answer = await deal(stores[0], forgotten, known, num_routers=2)
        assert answer.shares[0].left == near(250_000)
        # Half of it is for the other one, which was there before.
        assert answer.shares[0].granted == near(125_000)
        answer = await deal(stores[1], forgotten, need(spent=7_000_000, told=7_000_000, known=3e5))
        assert answer.shares[0].left == near(250_000)
        for store in stores:
            await store.close()

    asyncio.run(run())
