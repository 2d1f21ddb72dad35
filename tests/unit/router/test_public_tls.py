"""The router's two doors over TLS, as a process: certificates that rotate, mistakes at start."""

import asyncio
import os
import shutil
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from octavo.client import AsyncClient
from octavo.errors import UnavailableError
from tests.certificates import Authority, CertificateFiles, replace_file
from tests.fakes.router_process import until
from tests.unit.router.trained_tokenizers import qwen_style

AUTHORITY = Authority()
COMMAND = [sys.executable, "-m", "octavo_router", "--port", "0", "--grpc-port", "0"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = qwen_style(tmp_path_factory.mktemp("model"))
    (folder / "config.json").write_text("{}")
    return folder


def start(model: Path, folder: Path, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, "--model", str(model), *flags],
        env={**os.environ, "OCTAVO_READY_FILE": str(folder / "ready.json")},
        stderr=subprocess.PIPE,
        text=True,
    )


def trusting(files: CertificateFiles) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=files.ca.read_text())


def serial_of(port: int, context: ssl.SSLContext) -> str:
    """Of the certificate that a new connection is shown."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=20) as raw,
        context.wrap_socket(raw, server_hostname="127.0.0.1") as connection,
    ):
        certificate: Any = connection.getpeercert()
        return certificate["serialNumber"]


def test_both_doors_speak_tls_and_take_up_new_certificates(model: Path, tmp_path: Path) -> None:
    files = AUTHORITY.issue(tmp_path / "tls")
    flags = files.flags("public_tls")[:4]
    keys = tmp_path / "keys"
    keys.write_text("old-key\n")
    process = start(model, tmp_path, *flags, "--api-keys-file", str(keys))

    async def check() -> None:
        ready = tmp_path / "ready.json"
        await until(ready.exists)
        ports = httpx.Response(200, content=ready.read_bytes()).json()
        url = f"https://127.0.0.1:{ports['port']}"
        context = trusting(files)
        async with httpx.AsyncClient(base_url=url, verify=context, timeout=20) as client:
            assert (await client.get("/livez")).json() == {"status": "ok"}
            before = await asyncio.to_thread(serial_of, ports["port"], context)
            AUTHORITY.issue(tmp_path / "tls")
            after = await asyncio.to_thread(serial_of, ports["port"], context)
            assert after != before
            # The connection that lives isn't touched.
            assert await status(client, "old-key") == 200
            # Nor are keys fixed for a life.
            replace_file(keys, b"new-key\n")
            async with asyncio.timeout(20):
                while await status(client, "new-key") != 200:  # noqa: ASYNC110 - a file's turn
                    await asyncio.sleep(0.1)
            assert await status(client, "old-key") == 401
        async with httpx.AsyncClient() as plain:
            with pytest.raises(httpx.TransportError):
                await plain.get(f"http://127.0.0.1:{ports['port']}/livez")
        await check_grpc(f"127.0.0.1:{ports['grpc_port']}", files)

    try:
        asyncio.run(check())
        process.terminate()
        _, stderr = process.communicate(timeout=30)
        assert process.returncode == 0
        assert "Traceback" not in stderr
    finally:
        process.kill()
        process.communicate()


async def status(client: httpx.AsyncClient, key: str) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    return (await client.get("/v1/models", headers=headers)).status_code


async def check_grpc(address: str, files: CertificateFiles) -> None:
    """The client library with and without credentials."""
    credentials = grpc.ssl_channel_credentials(files.ca.read_bytes())
    async with AsyncClient(address, "new-key", timeout_s=20, credentials=credentials) as client:
        assert len(await client.models()) == 1
    async with AsyncClient(address, "new-key", timeout_s=20) as client:
        with pytest.raises(UnavailableError):
            await client.models()


def test_a_wrong_certificate_ends_the_start_with_its_name(model: Path, tmp_path: Path) -> None:
    files = AUTHORITY.issue(tmp_path / "tls")
    shutil.copy(AUTHORITY.issue(tmp_path / "other").key, files.key)
    process = start(model, tmp_path, *files.flags("public_tls"))
    try:
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 2
    assert f"OCTAVO_PUBLIC_TLS_KEY: {files.key} is no key of the certificate" in stderr
    assert "Traceback" not in stderr
