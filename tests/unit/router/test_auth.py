"""API keys: on every route but the probes, in constant time, with CORS that browsers can use."""

import asyncio
from typing import Any

import pytest
from starlette.routing import BaseRoute

from octavo.errors import AuthenticationError, ConfigurationError
from octavo_router.app import create_app
from octavo_router.auth import KeyRing
from octavo_router.edge import OPEN_PATHS, Edge
from octavo_router.status_page import OPEN_PATHS as STATUS_PATHS
from tests.fakes.router_process import RunningRouter, byte_scheduler, running_router

RING = KeyRing.from_setting("k1:acme, k2, k3:")


@pytest.mark.parametrize(
    ("header", "tenant"),
    [
        (b"Bearer k1", "acme"),
        (b"bearer k1", "acme"),
        (b"BEARER  k1 ", "acme"),
        (b"Bearer k2", ""),
        (b"Bearer k3", ""),
    ],
)
def test_right_keys(header: bytes, tenant: str) -> None:
    assert RING.authenticate([header]) == tenant


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [b""],
        [b"k1"],
        [b"Bearer"],
        [b"Bearer "],
        [b"Bearer k"],
        [b"Bearer k1x"],
        [b"Bearer k1:acme"],
        [b"Bearer \xe9"],
        [b"Basic k1"],
        [b"Bearerk1"],
        [b"Bearer k1", b"Bearer k1"],
        [b"Bearer k1", b"Bearer x"],
        [b"Bearer k1, Bearer k1"],
    ],
)
def test_wrong_keys(headers: list[bytes]) -> None:
    with pytest.raises(AuthenticationError):
        RING.authenticate(headers)


def test_without_keys_the_service_is_open() -> None:
    ring = KeyRing.from_setting("")
    assert ring.is_open
    assert ring.authenticate([]) == ""
    assert ring.authenticate([b"Bearer whatever"]) == ""


@pytest.mark.parametrize("setting", [":acme", "k1,k1:b", "a b", "ké", "k1,:x"])
def test_bad_settings(setting: str) -> None:
    with pytest.raises(ConfigurationError, match="OCTAVO_API_KEYS") as caught:
        KeyRing.from_setting(setting)
    assert "k1" not in str(caught.value)


def run(check: Any) -> None:
    async def main() -> None:
        async with running_router(byte_scheduler(), api_keys="k1:acme,k2:other") as router:
            await check(router)

    asyncio.run(main())


def routes_of(edge: Any) -> list[BaseRoute]:
    assert isinstance(edge, Edge)
    return list(edge.app.router.routes)  # type: ignore[attr-defined]


def test_every_route_but_the_probes_needs_a_key() -> None:
    async def check(router: RunningRouter) -> None:
        paths = {getattr(route, "path", "") for route in routes_of(create_app(router.service))}
        assert {"/v1/chat/completions", "/v1/models", "/docs", "/openapi.json"} <= paths
        for path in sorted({*paths, "/nope", "/"}):
            for method in ("GET", "POST"):
                answer = await router.http.request(method, path.replace("{model:path}", "m"))
                if path in OPEN_PATHS | STATUS_PATHS:
                    assert answer.status_code in (200, 307, 405), path
                    continue
                assert answer.status_code == 401, (method, path)
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.headers["access-control-allow-origin"] == "*"
                assert answer.json()["error"]["code"] == "invalid_api_key"

    run(check)


def test_keys_over_http() -> None:
    async def check(router: RunningRouter) -> None:
        async def status(*values: bytes) -> int:
            headers = [(b"authorization", value) for value in values]
            body = {"prompt": "x", "max_tokens": 1}
            return (
                await router.http.post("/v1/completions", json=body, headers=headers)
            ).status_code

        assert await status(b"Bearer k1") == 200
        assert await status(b"bearer  k1") == 200
        for wrong in (b"k1", b"Bearer", b"Bearer k1x", b"Bearer \xff", b"Bearer k1, Bearer k1"):
            assert await status(wrong) == 401
        assert await status(b"Bearer k1", b"Bearer k1") == 401

    run(check)


def test_preflight_needs_no_key() -> None:
    async def check(router: RunningRouter) -> None:
        for extra in ({}, {"access-control-request-method": "POST"}):
            answer = await router.http.options(
                "/v1/chat/completions",
                headers={
                    "origin": "https://app.example",
                    "access-control-request-headers": "authorization, x-stainless-os",
                    **extra,
                },
            )
            assert answer.status_code == 204
            assert answer.headers["access-control-allow-origin"] == "*"
            assert answer.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
            assert "POST" in answer.headers["access-control-allow-methods"]

    run(check)


def test_tenants_share_no_prefix_unless_told() -> None:
    async def main(share: bool) -> set[bytes]:
        fake = byte_scheduler()
        async with running_router(fake, api_keys="a:x,b:y", share_prefixes=share) as router:
            for key in ("a", "b"):
                await router.http.post(
                    "/v1/completions",
                    json={"prompt": "p" * 40},
                    headers={"authorization": f"Bearer {key}"},
                )
            assert [submit.tenant for submit in fake.submits] == ["x", "y"]
            return {submit.block_hashes for submit in fake.submits}

    assert len(asyncio.run(main(share=False))) == 2
    assert len(asyncio.run(main(share=True))) == 1
