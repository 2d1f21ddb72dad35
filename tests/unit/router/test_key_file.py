"""API keys in a file are taken over when it changes, and kept when it is wrong."""

import asyncio
from pathlib import Path

import pytest

from octavo.errors import AuthenticationError
from octavo.setting import FileSecret
from octavo_router.auth import KeyRing, follow_file
from tests.certificates import replace_file
from tests.fakes.router_process import byte_scheduler, running_router, until

EVERY_S = 0.01


def test_keys_one_a_line_or_in_a_list() -> None:
    ring = KeyRing.from_setting("k1:acme\r\nk2\n\nk3:other,k4\n")
    assert ring.tenants == ((b"k1", "acme"), (b"k2", ""), (b"k3", "other"), (b"k4", ""))


def test_a_new_file_changes_the_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys"
    path.write_text("old-key:acme\n")
    secret = FileSecret("api_keys", str(path))
    keys = KeyRing.from_setting(secret)

    async def main() -> None:
        following = asyncio.create_task(follow_file(keys, secret, EVERY_S))
        replace_file(path, b"old-key:acme\nnew-key:acme\n")
        await until(lambda: len(keys.tenants) == 2)
        replace_file(path, b"new-key:acme\n")
        await until(lambda: len(keys.tenants) == 1)
        assert keys.authenticate([b"Bearer new-key"]) == "acme"
        with pytest.raises(AuthenticationError):
            keys.authenticate([b"Bearer old-key"])
        # The service must not become an open one, whatever happens to the file.
        for number, wrong in enumerate((b"", b"bad key\n", b"\xff\n", None), start=1):
            path.unlink() if wrong is None else replace_file(path, wrong)
            await until(lambda number=number: len(complaints(caplog)) == number)
            assert keys.authenticate([b"Bearer new-key"]) == "acme"
        replace_file(path, b"last-key\n")
        await until(lambda: keys.tenants == ((b"last-key", ""),))
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(main())
    assert not [line for line in caplog.messages if "-key" in line or "bad key" in line]


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if "the keys that were there stay" in line]


def test_a_change_while_the_router_was_starting_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("old-key")
    secret = FileSecret("api_keys", str(path))
    replace_file(path, b"new-key")

    async def main() -> None:
        keys = KeyRing.from_setting(secret)
        following = asyncio.create_task(follow_file(keys, secret, EVERY_S))
        await until(lambda: keys.tenants == ((b"new-key", ""),))
        following.cancel()

    asyncio.run(main())


def test_both_doors_use_the_keys_as_they_are_now() -> None:
    async def main() -> None:
        async with running_router(byte_scheduler(), api_keys="old-key:acme") as router:
            router.service.keys.tenants = KeyRing.from_setting("new-key:acme").tenants
            for key, status in (("old-key", 401), ("new-key", 200)):
                headers = {"Authorization": f"Bearer {key}"}
                answer = await router.http.get("/v1/models", headers=headers)
                assert answer.status_code == status

    asyncio.run(main())
