"""TLS and a password, with Debian's Redis: the embedded Valkey has no TLS."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.certificates import Authority, CertificateFiles
from tests.contract.registries import (
    Backend,
    always,
    eventually,
    scheduler,
    settled,
    usage,
    worker,
)
from tests.contract.routers import Fleet
from tests.redis_servers import RedisServer, free_port, redis_binary

PASSWORD = "s3cret-word"
AUTHORITY, STRANGER = Authority(), Authority("another authority")


@pytest.fixture
def files(tmp_path: Path) -> CertificateFiles:
    return AUTHORITY.issue(tmp_path / "ours")


@pytest.fixture
def server(files: CertificateFiles) -> Iterator[RedisServer]:
    with RedisServer(redis_binary(), {"requirepass": PASSWORD}, tls=files) as server:
        yield server


def query(files: CertificateFiles) -> str:
    return f"ssl_ca_certs={files.ca}&ssl_certfile={files.cert}&ssl_keyfile={files.key}"


def url_of(server: RedisServer, files: CertificateFiles, password: str = PASSWORD) -> str:
    return f"rediss://:{password}@127.0.0.1:{server.port}?{query(files)}"


async def tell_and_see(url: str) -> None:
    async with Backend(url, "tls").running(2) as (teller, reader):
        teller.announce_worker(worker())
        teller.announce_scheduler(scheduler())
        teller.publish_usage(usage())
        teller.publish_filter("s1", b"filter")
        await eventually(reader.workers, (worker(),))
        await eventually(reader.schedulers, (scheduler(),))
        await eventually(reader.usages, (usage(),))
        await eventually(lambda: dict(reader.filters()), {"s1": b"filter"})
        await settled(teller)


def test_registry_and_quotas_over_tls_with_a_password(
    server: RedisServer, files: CertificateFiles
) -> None:
    url = url_of(server, files)
    fleet = Fleet(url)

    async def run() -> None:
        await tell_and_see(url)
        async with fleet.running(1, "600r/m") as (router,):
            assert fleet.admit(router)
            await eventually(router.lag_s, 0.0)

    asyncio.run(run())


def test_who_doesnt_fit_is_left_out_and_goes_on(
    server: RedisServer,
    files: CertificateFiles,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    theirs = STRANGER.issue(tmp_path / "theirs")
    urls = [
        f"redis://:{PASSWORD}@127.0.0.1:{server.port}",
        url_of(server, theirs),
        url_of(server, theirs._replace(ca=files.ca)),
        url_of(server, files, "wr0ng-word"),
    ]

    async def run(url: str) -> None:
        async with Backend(url, "tls").running(1) as (teller,):
            teller.announce_worker(worker())
            await always(teller.workers, (), during_s=0.15)
            assert teller.lag_s() > 0.1

    for url in urls:
        caplog.clear()
        asyncio.run(run(url))
        assert [line for line in caplog.messages if "going on without it" in line]
        assert PASSWORD not in caplog.text
        assert "wr0ng" not in caplog.text


def test_certificates_may_be_renewed(server: RedisServer, files: CertificateFiles) -> None:
    url = url_of(server, files)

    async def run() -> None:
        async with Backend(url, "tls").running(2) as (teller, reader):
            teller.announce_worker(worker())
            await eventually(reader.workers, (worker(),))
            AUTHORITY.issue(files.cert.parent)
            # Loses all connections, and reads its own files anew.
            server.kill()
            await asyncio.to_thread(server.start)
            teller.announce_worker(worker(epoch=9))
            await eventually(reader.workers, (worker(epoch=9),))

    asyncio.run(run())


@pytest.mark.slow
def test_a_cluster_over_tls_with_a_password(files: CertificateFiles) -> None:
    options = {"cluster-enabled": "yes", "cluster-port": str(free_port()), "requirepass": PASSWORD}
    with RedisServer(redis_binary(), options, tls=files) as node:
        node.command_with(PASSWORD, "CLUSTER", "ADDSLOTSRANGE", 0, 16383)

        async def run() -> None:
            await eventually(
                lambda: b"state:ok" in node.command_with(PASSWORD, "CLUSTER", "INFO"), True
            )
            await tell_and_see(f"rediss+cluster://:{PASSWORD}@127.0.0.1:{node.port}?{query(files)}")

        asyncio.run(run())


def test_sentinels_over_tls_with_passwords(files: CertificateFiles) -> None:
    with RedisServer(redis_binary(), {"requirepass": PASSWORD}, tls=files) as primary:
        config = (
            f"requirepass sentinel-word\n"
            f"sentinel monitor fleet-memory 127.0.0.1 {primary.port} 1\n"
            f"sentinel auth-pass fleet-memory {PASSWORD}\n"
        )
        server = RedisServer(redis_binary(), config=config, arguments=("--sentinel",), tls=files)
        with server as sentinel:
            url = (
                f"rediss+sentinel://:{PASSWORD}@127.0.0.1:{sentinel.port}/fleet-memory"
                f"?sentinel_password=sentinel-word&{query(files)}"
            )
            asyncio.run(tell_and_see(url))
