"""Redis absent, killed, emptied, frozen, paused, full, read-only, cut off: nothing raises.

Every fault is caused for real. After it, what the processes know is there again.
"""

import asyncio
import logging
import multiprocessing
import os
import signal
import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from octavo.keys import FleetKeys
from octavo.redis_registry import RedisRegistry
from octavo.registry import Registry
from tests.contract.black_hole import BlackHole
from tests.contract.registries import (
    SHORT_LEASE,
    Backend,
    always,
    eventually,
    scheduler,
    settled,
    usage,
    worker,
)
from tests.redis_servers import RedisServer

FLEET = "faults"


@asynccontextmanager
async def teller_and_reader(url: str) -> AsyncGenerator[tuple[Registry, Registry]]:
    """A process that tells of a worker, a scheduler, usage and a filter, and one that reads."""
    async with Backend(url, FLEET).running(2) as (teller, reader):
        teller.announce_worker(worker())
        teller.announce_scheduler(scheduler())
        teller.publish_usage(usage())
        teller.publish_filter("s1", b"filter")
        yield teller, reader


async def all_is_seen(reader: Registry) -> None:
    await eventually(reader.workers, (worker(),))
    await eventually(reader.schedulers, (scheduler(),))
    await eventually(reader.usages, (usage(),))
    await eventually(lambda: dict(reader.filters()), {"s1": b"filter"})


def test_redis_absent_at_start_and_coming_later(server: RedisServer) -> None:
    server.kill()

    async def run() -> None:
        async with teller_and_reader(server.url) as (teller, reader):
            await always(reader.workers, ())
            assert teller.lag_s() > 0.3
            await asyncio.to_thread(server.start)
            await all_is_seen(reader)
            await settled(teller)

    asyncio.run(run())


def test_redis_killed_and_restarted_empty(server: RedisServer) -> None:
    async def run() -> None:
        async with teller_and_reader(server.url) as (teller, reader):
            await all_is_seen(reader)
            await settled(teller)
            server.kill()
            # What was last seen stays; what changes meanwhile is told later.
            await always(reader.workers, (worker(),))
            assert teller.lag_s() > 0.0
            teller.publish_usage(usage(sequence=2))
            await asyncio.to_thread(server.start)
            await eventually(reader.usages, (usage(sequence=2),))
            teller.publish_usage(usage())
            await all_is_seen(reader)
            await settled(teller)

    asyncio.run(run())


def test_a_flushed_redis_is_filled_again_though_nothing_changes(server: RedisServer) -> None:
    async def run() -> None:
        async with teller_and_reader(server.url) as (teller, reader):
            await all_is_seen(reader)
            await settled(teller)
            await asyncio.to_thread(server.command, "FLUSHALL")
            keys = FleetKeys(FLEET)
            names = {keys.worker("w1"), keys.usage("w1"), keys.scheduler("s1"), keys.filter("s1")}
            async with asyncio.timeout(5):
                while True:
                    found = await asyncio.to_thread(server.command, "KEYS", "*")
                    if names <= {name.decode() for name in found}:
                        break
            await all_is_seen(reader)

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["SIGSTOP", "CLIENT PAUSE", "BUSY SCRIPT"])
def test_redis_frozen_delays_nobody(server: RedisServer, fault: str) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        async with teller_and_reader(server.url) as (teller, reader):
            await all_is_seen(reader)
            await settled(teller)
            busy: asyncio.Task[object] | None = None
            if fault == "SIGSTOP":
                server.freeze()
            elif fault == "CLIENT PAUSE":
                server.command("CLIENT", "PAUSE", 3000)
            else:
                spin = "while redis.call('TIME')[1] - ARGV[1] < 4 do end"
                now = int(server.command("TIME")[0])
                busy = asyncio.create_task(asyncio.to_thread(server.command, "EVAL", spin, 0, now))
            slowest_s = 0.0
            sequence = 1
            frozen_until = loop.time() + 1.0
            while loop.time() < frozen_until:
                sequence += 1
                before = loop.time()
                teller.publish_usage(usage(sequence=sequence))
                assert reader.workers() == (worker(),)
                assert reader.usages() == (usage(),)
                slowest_s = max(slowest_s, loop.time() - before)
                await asyncio.sleep(0.01)
            print(f"slowest call while Redis was frozen: {slowest_s * 1000:.2f} ms")
            assert teller.lag_s() > 0.0
            if fault == "SIGSTOP":
                server.thaw()
            if busy is not None:
                await busy
            await eventually(reader.usages, (usage(sequence=sequence),))
            await settled(teller)

    asyncio.run(run())


def test_a_full_redis_keeps_what_it_has_and_gets_the_rest_later(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        backend = Backend(server.url, FLEET)
        teller, reader = (backend.open(timing=SHORT_LEASE) for _ in range(2))
        await teller.start()
        await reader.start()
        teller.announce_worker(worker())
        await eventually(reader.workers, (worker(),))
        server.command("CONFIG", "SET", "maxmemory", 1)
        teller.announce_scheduler(scheduler())
        teller.publish_filter("s1", b"filter")
        # Longer than the lease: renewals still work.
        await always(reader.workers, (worker(),), during_s=2 * SHORT_LEASE.lease.record_s)
        assert reader.schedulers() == ()
        assert teller.lag_s() > SHORT_LEASE.lease.record_s
        server.command("CONFIG", "SET", "maxmemory", 0)
        await eventually(reader.schedulers, (scheduler(),))
        await eventually(lambda: dict(reader.filters()), {"s1": b"filter"})
        await settled(teller)
        await teller.close()
        await reader.close()

    asyncio.run(run())
    assert len([line for line in caplog.messages if "refuses to write" in line]) == 1


def test_an_evicting_redis_is_warned_about_and_filled_again(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")

    async def run() -> None:
        async with teller_and_reader(server.url) as (teller, reader):
            await all_is_seen(reader)
            server.command("CONFIG", "SET", "maxmemory", 1)
            await asyncio.sleep(0.3)
            server.command("CONFIG", "SET", "maxmemory", 0)
            await all_is_seen(reader)
            await settled(teller)

    asyncio.run(run())
    warnings = [line for line in caplog.messages if "allkeys-lru" in line]
    # Once for each of the two processes.
    assert len(warnings) == 2
    assert "noeviction" in warnings[0]


def test_a_primary_that_became_a_replica_is_left(server: RedisServer) -> None:
    """After a failover the old primary answers READONLY until it is promoted again."""

    async def run() -> None:
        async with teller_and_reader(server.url) as (teller, reader):
            await all_is_seen(reader)
            server.command("REPLICAOF", "127.0.0.1", 1)
            teller.publish_usage(usage(sequence=2))
            await asyncio.sleep(0.5)
            assert teller.lag_s() > 0.3
            connected = server.command("INFO", "stats")["total_connections_received"]
            await asyncio.sleep(1.0)
            # A connection that said READONLY isn't used again: the name may lead elsewhere now.
            again = server.command("INFO", "stats")["total_connections_received"]
            assert again > connected + 1
            server.command("REPLICAOF", "NO", "ONE")
            await eventually(reader.usages, (usage(sequence=2),))
            await settled(teller)

    asyncio.run(run())


def test_a_wrong_password_is_survived_and_never_logged(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    url = f"redis://:s3cret-word@127.0.0.1:{server.port}"

    async def run() -> None:
        server.command("CONFIG", "SET", "requirepass", "another-word")
        async with teller_and_reader(url) as (teller, reader):
            await always(reader.workers, ())
            assert teller.lag_s() > 0.0
            server.command_with("another-word", "CONFIG", "SET", "requirepass", "s3cret-word")
            await all_is_seen(reader)

    asyncio.run(run())
    failures = [line for line in caplog.messages if "going on without it" in line]
    assert failures
    assert all(f"127.0.0.1:{server.port}" in line for line in failures)
    assert not [line for line in caplog.messages if "s3cret-word" in line or "another-word" in line]


def test_a_network_that_swallows_packets(server: RedisServer) -> None:
    async def run() -> None:
        async with (
            BlackHole().running(server.port) as hole,
            teller_and_reader(f"redis://127.0.0.1:{hole.port}") as (teller, reader),
        ):
            await all_is_seen(reader)
            connected = hole.num_connections
            hole.is_open = False
            teller.publish_usage(usage(sequence=2))
            await always(reader.usages, (usage(),), during_s=1.5)
            assert hole.num_connections > connected
            hole.is_open = True
            await eventually(reader.usages, (usage(sequence=2),))
            await settled(teller)

    asyncio.run(run())


def test_a_foreign_key_in_the_way_harms_only_itself(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    keys = FleetKeys(FLEET)
    server.command("SET", keys.worker("w1"), "not a hash")
    server.command("HSET", keys.filter("s1"), "not", "a string")
    server.command("HSET", keys.scheduler("s2"), "scheduler_id", "s2")
    server.command("ZADD", keys.members, 9e15, "scheduler:s2", 9e15, "nonsense", 9e15, b"\xff:x")

    async def run() -> None:
        async with Backend(server.url, FLEET).running(2) as (teller, reader):
            teller.announce_worker(worker("w1"))
            teller.announce_worker(worker("w2"))
            teller.announce_scheduler(scheduler())
            await eventually(reader.workers, (worker("w2"),))
            await eventually(reader.schedulers, (scheduler(),))
            await always(lambda: dict(reader.filters()), {})
            server.command("DEL", keys.worker("w1"))
            await eventually(reader.workers, (worker("w1"), worker("w2")))

    asyncio.run(run())
    assert len([line for line in caplog.messages if "refuses to write" in line]) == 1


def _announce_and_hang(url: str) -> None:
    async def run() -> None:
        registry = RedisRegistry(url, FLEET, SHORT_LEASE)
        registry.announce_worker(worker("killed"))
        registry.announce_scheduler(scheduler("killed"))
        await registry.start()
        await asyncio.Event().wait()

    asyncio.run(run())


def test_a_killed_process_is_forgotten_when_its_lease_ends(server: RedisServer) -> None:
    child = multiprocessing.get_context("spawn").Process(
        target=_announce_and_hang, args=(server.url,), daemon=True
    )
    child.start()

    async def run() -> None:
        backend = Backend(server.url, FLEET)
        stays = backend.open(timing=SHORT_LEASE)
        await stays.start()
        stays.announce_worker(worker("stays"))
        await eventually(lambda: [w.worker_id for w in stays.workers()], ["killed", "stays"])
        await eventually(lambda: [s.scheduler_id for s in stays.schedulers()], ["killed"])
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        await eventually(stays.workers, (worker("stays"),))
        await eventually(stays.schedulers, ())
        # The living sweep the dead out of the members.
        key = FleetKeys(FLEET).members
        await eventually(lambda: server.command("ZRANGE", key, 0, -1), [b"worker:stays"])
        await stays.close()
        assert server.command("KEYS", "*") == []

    try:
        asyncio.run(run())
    finally:
        child.kill()
        child.join()


def test_many_changes_share_one_pipeline_and_idle_states_cost_a_renewal(
    shared_server: RedisServer,
) -> None:
    async def run() -> None:
        backend = Backend(shared_server.url, uuid.uuid4().hex)
        registry = backend.open(timing=SHORT_LEASE)
        await registry.start()
        registry.announce_worker(worker())
        await settled(registry)
        shared_server.command("CONFIG", "RESETSTAT")
        for sequence in range(10_000):
            registry.publish_usage(usage(sequence=sequence))
        await settled(registry)
        counts = shared_server.call_counts()
        assert counts["hset"] == 1
        # Nobody asks, so nobody reads; and a lease costs a PEXPIRE, not its record.
        assert "zrange" not in counts
        assert "hgetall" not in counts
        shared_server.command("CONFIG", "RESETSTAT")
        await asyncio.sleep(0.5)
        counts = shared_server.call_counts()
        assert "hset" not in counts
        assert 2 <= counts["pexpire"] <= 2 * 7
        assert "zrange" not in counts
        # Asking starts the reading, silence ends it.
        await eventually(registry.workers, (worker(),))
        await asyncio.sleep(SHORT_LEASE.asked_s + 0.3)
        shared_server.command("CONFIG", "RESETSTAT")
        await asyncio.sleep(0.3)
        assert "zrange" not in shared_server.call_counts()
        await registry.close()

    asyncio.run(run())


def test_two_living_processes_of_one_name_are_told_apart_and_warned_about(
    shared_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        backend = Backend(shared_server.url, uuid.uuid4().hex)
        async with backend.running(2) as (older, newer):
            newer.announce_worker(worker(address="newer:1"))
            await eventually(older.workers, (worker(address="newer:1"),))
            older.announce_worker(worker(address="older:1"))
            await always(older.workers, (worker(address="newer:1"),), during_s=1.0)
            assert older.lag_s() == 0.0

    asyncio.run(run())
    assert len([line for line in caplog.messages if "held by a newer process" in line]) == 1


def test_closing_takes_a_second_at_most_though_redis_is_frozen(server: RedisServer) -> None:
    async def run() -> None:
        async with teller_and_reader(server.url) as (_, reader):
            await all_is_seen(reader)
            server.freeze()
            async with asyncio.timeout(10):
                await asyncio.gather(reader.close(), reader.close())
        server.thaw()

    asyncio.run(run())


def test_the_embedded_valkeys_socket_works_too() -> None:
    from octavo.embedded_valkey import EmbeddedValkey

    with EmbeddedValkey() as valkey:

        async def run() -> None:
            async with teller_and_reader(valkey.url) as (teller, reader):
                await all_is_seen(reader)
                await settled(teller)

        asyncio.run(run())
