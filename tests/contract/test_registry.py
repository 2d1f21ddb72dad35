"""One contract for every registry. Two registries in one test stand for two processes."""

import asyncio

from tests.contract.registries import (
    Backend,
    always,
    eventually,
    scheduler,
    settled,
    usage,
    worker,
)


def test_one_process_reads_what_another_announced(backend: Backend) -> None:
    async def run() -> None:
        async with backend.running(2) as (teller, reader):
            teller.announce_worker(worker())
            teller.announce_scheduler(scheduler())
            for registry in (reader, teller):
                await eventually(registry.workers, (worker(),))
                await eventually(registry.schedulers, (scheduler(),))

    asyncio.run(run())


def test_records_survive_the_way_unchanged(backend: Backend) -> None:
    odd_worker = worker(
        "w:1 {x} \n ü 名",
        address="[::1]:8200",
        revision="",
        leader_id="",
        epoch=2**40,
        num_blocks=0,
    )
    odd_scheduler = scheduler("s:1", backlog_tokens=2**62, prefill_tokens_per_s=0, draining=True)
    odd_usage = usage("w:1 {x} \n ü 名", epoch=2**40, num_used=0, used_bitmap=b"\x00\r\n\xff\x00")

    async def run() -> None:
        async with backend.running(2) as (teller, reader):
            teller.announce_worker(odd_worker)
            teller.announce_scheduler(odd_scheduler)
            teller.publish_usage(odd_usage)
            await eventually(reader.workers, (odd_worker,))
            await eventually(reader.schedulers, (odd_scheduler,))
            await eventually(reader.usages, (odd_usage,))

    asyncio.run(run())


def test_the_latest_state_is_the_one_seen(backend: Backend) -> None:
    async def run() -> None:
        async with backend.running(2) as (teller, reader):
            for backlog_tokens in range(100):
                teller.announce_scheduler(scheduler(backlog_tokens=backlog_tokens))
            await eventually(reader.schedulers, (scheduler(backlog_tokens=99),))
            teller.announce_scheduler(scheduler(draining=True))
            await eventually(reader.schedulers, (scheduler(draining=True),))
            # Back to an earlier value: it must be written although it was written before.
            teller.announce_scheduler(scheduler(backlog_tokens=99))
            await eventually(reader.schedulers, (scheduler(backlog_tokens=99),))

    asyncio.run(run())


def test_records_come_ordered_by_id(backend: Backend) -> None:
    names = ["w10", "w2", "a", "z"]

    async def run() -> None:
        async with backend.running(3) as (first, second, reader):
            for index, name in enumerate(names):
                (first, second)[index % 2].announce_worker(worker(name))
            await eventually(lambda: [r.worker_id for r in reader.workers()], sorted(names))

    asyncio.run(run())


def test_what_was_told_before_the_start_is_written_after_it(backend: Backend) -> None:
    async def run() -> None:
        early = backend.open()
        early.announce_worker(worker())
        await early.start()
        async with backend.running(1) as (reader,):
            await eventually(reader.workers, (worker(),))
        await early.close()

    asyncio.run(run())


def test_closing_withdraws_ones_own_and_nothing_else(backend: Backend) -> None:
    async def run() -> None:
        async with backend.running(2) as (stays, reader):
            leaves = backend.open()
            await leaves.start()
            stays.announce_worker(worker("stays"))
            stays.announce_scheduler(scheduler("stays"))
            leaves.announce_worker(worker("leaves"))
            leaves.announce_scheduler(scheduler("leaves"))
            leaves.publish_usage(usage("leaves"))
            leaves.publish_filter("leaves", b"filter")
            await eventually(lambda: len(reader.workers()), 2)
            await eventually(lambda: len(reader.schedulers()), 2)
            await eventually(lambda: dict(reader.filters()), {"leaves": b"filter"})
            await leaves.close()
            await eventually(reader.workers, (worker("stays"),))
            await eventually(reader.schedulers, (scheduler("stays"),))
            await eventually(reader.usages, ())
            await eventually(lambda: dict(reader.filters()), {})

    asyncio.run(run())


def test_fleets_dont_see_each_other(backend: Backend) -> None:
    async def run() -> None:
        async with backend.running(2) as (ours, reader):
            theirs = backend.open(f"{backend.fleet}-2")
            await theirs.start()
            theirs.announce_worker(worker("theirs"))
            ours.announce_worker(worker("ours"))
            await settled(ours, theirs)
            await eventually(reader.workers, (worker("ours"),))
            await eventually(theirs.workers, (worker("theirs"),))
            await theirs.close()

    asyncio.run(run())


def test_a_newer_process_of_the_same_name_wins_until_it_leaves(backend: Backend) -> None:
    async def run() -> None:
        async with backend.running(2) as (stale, reader):
            stale.announce_worker(worker(boot_id="old"))
            await eventually(reader.workers, (worker(boot_id="old"),))
            newer = backend.open()
            await newer.start()
            newer.announce_worker(worker(boot_id="new"))
            await eventually(reader.workers, (worker(boot_id="new"),))
            # The stale one wakes up and goes on as if nothing had happened.
            for epoch in range(10, 20):
                stale.announce_worker(worker(boot_id="old", epoch=epoch))
                await always(reader.workers, (worker(boot_id="new"),), during_s=0.05)
            await eventually(stale.lag_s, 0.0)
            await newer.close()
            await eventually(reader.workers, (worker(boot_id="old", epoch=19),))

    asyncio.run(run())


def test_usage_is_shown_updated_and_withdrawn(backend: Backend) -> None:
    async def run() -> None:
        async with backend.running(2) as (leader, reader):
            leader.publish_usage(usage())
            leader.publish_usage(usage("w2"))
            await eventually(reader.usages, (usage(), usage("w2")))
            leader.publish_usage(usage(sequence=2, num_used=0, used_bitmap=bytes(512)))
            await eventually(lambda: [r.num_used for r in reader.usages()], [0, 16])
            leader.withdraw_usage("w1")
            await eventually(reader.usages, (usage("w2"),))
            leader.withdraw_usage("never published")
            leader.publish_usage(usage(sequence=3))
            await eventually(reader.usages, (usage(sequence=3), usage("w2")))

    asyncio.run(run())


def test_a_former_leader_cant_overwrite_its_successors_usage(backend: Backend) -> None:
    async def run() -> None:
        async with backend.running(3) as (first, second, reader):
            # The later process led first: the epoch decides, not the age of the process.
            second.publish_usage(usage(leader_id="s2", epoch=1))
            await eventually(reader.usages, (usage(leader_id="s2", epoch=1),))
            first.publish_usage(usage(leader_id="s1", epoch=2))
            await eventually(reader.usages, (usage(leader_id="s1", epoch=2),))
            for sequence in range(2, 6):
                second.publish_usage(usage(leader_id="s2", epoch=1, sequence=sequence))
                await always(reader.usages, (usage(leader_id="s1", epoch=2),), during_s=0.05)
            second.publish_usage(usage(leader_id="s2", epoch=3))
            await eventually(reader.usages, (usage(leader_id="s2", epoch=3),))

    asyncio.run(run())


def test_usage_of_a_workers_former_boot_is_refused(backend: Backend) -> None:
    async def run() -> None:
        async with backend.running(4) as (w1, stale, leader, reader):
            w1.announce_worker(worker(boot_id="a", epoch=7))
            stale.publish_usage(usage(boot_id="a", epoch=7))
            await eventually(reader.usages, (usage(boot_id="a", epoch=7),))
            w1.announce_worker(worker(boot_id="b", epoch=1))
            await eventually(reader.workers, (worker(boot_id="b", epoch=1),))
            leader.publish_usage(usage(boot_id="b", epoch=1))
            await eventually(reader.usages, (usage(boot_id="b", epoch=1),))
            for sequence in range(2, 6):
                stale.publish_usage(usage(boot_id="a", epoch=7, sequence=sequence))
                await always(reader.usages, (usage(boot_id="b", epoch=1),), during_s=0.05)

    asyncio.run(run())


def test_filters_are_shown_beside_their_schedulers(backend: Backend) -> None:
    large = bytes(range(256)) * 4096

    async def run() -> None:
        async with backend.running(3) as (first, second, reader):
            first.publish_filter("s1", large)
            await settled(first)
            await always(lambda: dict(reader.filters()), {})
            first.announce_scheduler(scheduler("s1"))
            second.announce_scheduler(scheduler("s2"))
            await eventually(lambda: dict(reader.filters()), {"s1": large})
            second.publish_filter("s2", b"")
            await eventually(lambda: dict(reader.filters()), {"s1": large, "s2": b""})
            before = reader.filters()["s1"]
            second.publish_filter("s2", b"changed")
            await eventually(lambda: reader.filters()["s2"], b"changed")
            # What didn't change isn't fetched, nor parsed, again.
            assert reader.filters()["s1"] is before

    asyncio.run(run())


def test_lag_is_zero_when_all_is_written(backend: Backend) -> None:
    async def run() -> None:
        async with backend.running(1) as (registry,):
            assert registry.lag_s() == 0.0
            registry.announce_worker(worker())
            registry.publish_usage(usage())
            await settled(registry)

    asyncio.run(run())


def test_a_closed_registry_closes_again(backend: Backend) -> None:
    async def run() -> None:
        registry = backend.open()
        await registry.start()
        registry.announce_worker(worker())
        await registry.close()
        await registry.close()
        await backend.open().close()

    asyncio.run(run())
