"""Redis URLs: which client each form makes, what is refused, and what is never shown."""

import asyncio

import pytest
import redis.asyncio
from redis.asyncio.sentinel import SentinelConnectionPool

from octavo.errors import ConfigurationError
from octavo.redis_url import RedisUrl, close_client, open_client
from octavo.registry import MemoryRegistry, open_registry


def connection_options(url: str) -> dict:
    """What the client of `url` would give its connections."""

    async def run() -> dict:
        client = open_client(RedisUrl.parse(url), 0.5)
        options = client.connection_pool.connection_kwargs
        await close_client(client)
        return options

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://", {"host": "localhost", "port": 6379, "db": 0, "password": None}),
        ("redis://h", {"host": "h", "port": 6379}),
        ("redis://h:1/7", {"host": "h", "port": 1, "db": 7}),
        ("redis://h:1/?db=7", {"db": 7}),
        ("redis://:p%40ss@h:1", {"username": None, "password": "p@ss"}),
        ("redis://me:word@h:1", {"username": "me", "password": "word"}),
        ("redis://[::1]:1", {"host": "::1", "port": 1}),
        ("unix:///tmp/a%20b.sock", {"path": "/tmp/a b.sock", "db": 0}),
        ("unix://:word@/tmp/s?db=3", {"path": "/tmp/s", "password": "word", "db": 3}),
        ("redis://h", {"socket_timeout": 0.5, "socket_connect_timeout": 0.5}),
    ],
)
def test_single_servers(url: str, expected: dict) -> None:
    options = connection_options(url)
    assert {name: options.get(name) for name in expected} == expected


def test_tls_takes_the_callers_files() -> None:
    async def run() -> None:
        url = RedisUrl.parse("rediss://h:1?ssl_ca_certs=/ca.pem&ssl_cert_reqs=required")
        client = open_client(url, 0.5)
        assert client.connection_pool.connection_class is redis.asyncio.SSLConnection
        assert client.connection_pool.connection_kwargs["ssl_ca_certs"] == "/ca.pem"
        await close_client(client)

    asyncio.run(run())


def test_sentinels_lead_to_the_primary() -> None:
    async def run() -> None:
        url = "redis+sentinel://me:word@a,b:2/primary?db=4&sentinel_password=other"
        client = open_client(RedisUrl.parse(url), 0.5)
        pool = client.connection_pool
        assert isinstance(pool, SentinelConnectionPool)
        assert (pool.service_name, pool.is_master) == ("primary", True)
        assert pool.connection_kwargs["db"] == 4
        assert pool.connection_kwargs["password"] == "word"
        sentinels = [
            sentinel.connection_pool.connection_kwargs
            for sentinel in pool.sentinel_manager.sentinels
        ]
        assert [(each["host"], each["port"]) for each in sentinels] == [("a", 26379), ("b", 2)]
        assert [each["password"] for each in sentinels] == ["other", "other"]
        await close_client(client)

    asyncio.run(run())


def test_a_cluster_may_be_entered_anywhere() -> None:
    async def run() -> None:
        client = open_client(RedisUrl.parse("redis+cluster://me:word@a:1,b"), 0.5)
        assert isinstance(client, redis.asyncio.RedisCluster)
        assert [(node.host, node.port) for node in client.startup_nodes] == [("a", 1), ("b", 6379)]
        assert client.connection_kwargs["password"] == "word"
        await close_client(client)

    asyncio.run(run())


WRONG = [
    "localhost:6379",
    "http://:s3cret@h",
    "redis+sentinels://:s3cret@h/x",
    "unix+cluster://:s3cret@h",
    "redis://:s3cret@h:port",
    "redis://:s3cret@h:70000",
    "redis://:s3cret@[::1",
    "redis://:s3cret@h/one",
    "redis://:s3cret@a,b",
    "redis://:s3cret@h?db=x",
    "redis://:s3cret@h?unknown=1",
    "redis://:s3cret@h?ssl_ca_certs=/ca.pem",
    "redis+cluster://:s3cret@h?sentinel_password=s3cret",
    "redis+sentinel://:s3cret@h",
    "redis+sentinel://:s3cret@h/",
    "unix://:s3cret@",
]


@pytest.mark.parametrize("url", WRONG)
def test_mistakes_name_the_variable_and_hide_the_password(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_registry(url, "fleet")
    assert "OCTAVO_REDIS_URL" in str(caught.value)
    assert "s3cret" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://me:s3cret@h:1/2", "redis://h:1"),
        ("unix://me:s3cret@/run/r.sock", "unix:///run/r.sock"),
        (
            "rediss+sentinel://me:s3cret@a,b:2/name?sentinel_password=s3cret",
            "rediss+sentinel://a:26379,b:2/name",
        ),
    ],
)
def test_a_url_shows_no_secret(url: str, shown: str) -> None:
    parsed = RedisUrl.parse(url)
    assert str(parsed) == repr(parsed) == f"{parsed}" == shown


def test_no_url_means_memory() -> None:
    assert isinstance(open_registry("", "fleet"), MemoryRegistry)
