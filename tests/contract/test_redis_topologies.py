"""A cluster and sentinels: the same contract, and a failover that nobody notices."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from octavo.keys import FleetKeys
from octavo_router.buckets import DealRequest, Need
from octavo_router.redis_buckets import RedisBuckets
from tests.contract.registries import (
    Backend,
    eventually,
    scheduler,
    settled,
    usage,
    worker,
)
from tests.contract.routers import LINK
from tests.redis_servers import BINARIES, RedisServer, free_port

FLEET = "topologies"


@pytest.fixture(params=[*BINARIES])
def binary(request: pytest.FixtureRequest) -> str:
    return BINARIES[request.param]()


@pytest.fixture
def cluster(binary: str) -> Iterator[list[RedisServer]]:
    """Two primaries that share the slots."""
    with ExitStack() as stack:
        nodes = []
        for first, last in ((0, 8191), (8192, 16383)):
            options = {"cluster-enabled": "yes", "cluster-port": str(free_port())}
            nodes.append(node := stack.enter_context(RedisServer(binary, options)))
            node.command("CLUSTER", "ADDSLOTSRANGE", first, last)
        nodes[1].command(
            "CLUSTER", "MEET", "127.0.0.1", nodes[0].port, nodes[0].options["cluster-port"]
        )
        yield nodes


def test_a_cluster(cluster: list[RedisServer]) -> None:
    async def run() -> None:
        for node in cluster:
            await eventually(lambda node=node: b"state:ok" in node.command("CLUSTER", "INFO"), True)
        url = f"redis+cluster://127.0.0.1:{cluster[0].port},127.0.0.1:{cluster[1].port}"
        # Fleets of either node: a fleet's keys lie together.
        for fleet in ("a", "b", "c", "d"):
            async with Backend(url, fleet).running(2) as (teller, reader):
                teller.announce_worker(worker())
                teller.announce_scheduler(scheduler())
                teller.publish_usage(usage())
                teller.publish_filter("s1", b"filter")
                await eventually(reader.workers, (worker(),))
                await eventually(reader.schedulers, (scheduler(),))
                await eventually(reader.usages, (usage(),))
                await eventually(lambda reader=reader: dict(reader.filters()), {"s1": b"filter"})
                await settled(teller)
                slot = cluster[0].command("CLUSTER", "KEYSLOT", FleetKeys(fleet).members)
                homes = [node.command("CLUSTER", "COUNTKEYSINSLOT", slot) for node in cluster]
                assert sorted(homes) == [0, 5]

    asyncio.run(run())


def test_tenants_buckets_lie_all_over_a_cluster(cluster: list[RedisServer]) -> None:
    async def run() -> None:
        for node in cluster:
            await eventually(lambda node=node: b"state:ok" in node.command("CLUSTER", "INFO"), True)
        store = RedisBuckets(f"redis+cluster://127.0.0.1:{cluster[0].port}", "r1", LINK)
        unlimited = Need(0, 0, 0, 0, None)
        requests = [
            DealRequest(f"tenant-{index}", (Need(100, index, 0, 0, None), unlimited), 1, False)
            for index in range(20)
        ]
        deals = await store.deal(requests)
        await store.close()
        assert [deal and int(deal.shares[0].left) for deal in deals] == [
            100 - index for index in range(20)
        ]
        assert all(node.command("DBSIZE") > 0 for node in cluster)

    asyncio.run(run())


@pytest.fixture
def replicated(binary: str) -> Iterator[tuple[RedisServer, RedisServer, RedisServer]]:
    """A primary, its replica, and a sentinel that watches them as `fleet-memory`."""
    with ExitStack() as stack:
        primary = stack.enter_context(RedisServer(binary))
        replica = stack.enter_context(RedisServer(binary))
        replica.command("REPLICAOF", "127.0.0.1", primary.port)
        config = (
            f"sentinel monitor fleet-memory 127.0.0.1 {primary.port} 1\n"
            "sentinel down-after-milliseconds fleet-memory 500\n"
            "sentinel failover-timeout fleet-memory 5000\n"
        )
        sentinel = RedisServer(binary, config=config, arguments=("--sentinel",))
        yield primary, replica, stack.enter_context(sentinel)


def test_a_failover_by_sentinels(
    replicated: tuple[RedisServer, RedisServer, RedisServer],
) -> None:
    primary, replica, sentinel = replicated

    async def run() -> None:
        await eventually(lambda: replica.command("INFO", "replication")["master_link_status"], "up")
        await eventually(lambda: len(sentinel.command("SENTINEL", "REPLICAS", "fleet-memory")), 1)
        url = f"redis+sentinel://127.0.0.1:{sentinel.port}/fleet-memory"
        async with Backend(url, FLEET).running(2) as (teller, reader):
            teller.announce_worker(worker())
            await eventually(reader.workers, (worker(),))
            await settled(teller)
            primary.kill()
            teller.publish_usage(usage())
            assert reader.workers() == (worker(),)
            await eventually(lambda: replica.command("ROLE")[0], b"master")
            await eventually(reader.usages, (usage(),))
            await eventually(reader.workers, (worker(),))
            await settled(teller)

    asyncio.run(run())
