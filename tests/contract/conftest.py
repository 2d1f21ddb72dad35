"""Servers live for the session; every test has a fleet of its own on them."""

import uuid
from collections.abc import Iterator

import pytest

from tests.contract.registries import Backend
from tests.redis_servers import BINARIES, RedisServer


@pytest.fixture(scope="session", params=[*BINARIES])
def shared_server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A server that no test breaks."""
    with RedisServer(BINARIES[request.param]()) as server:
        yield server


@pytest.fixture(params=[*BINARIES])
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A server to break; started, and reaped whatever became of it."""
    with RedisServer(BINARIES[request.param]()) as server:
        yield server


@pytest.fixture(scope="session", params=["memory", *BINARIES])
def backend_url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "memory":
        yield ""
        return
    with RedisServer(BINARIES[request.param]()) as server:
        yield server.url


@pytest.fixture
def backend(backend_url: str) -> Backend:
    return Backend(backend_url, f"test-{uuid.uuid4().hex}")
