"""octavo health: ready, not ready, not there, unknown; over gRPC, TLS and HTTP."""

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from octavo.cli import main as octavo
from octavo.security import Security
from octavo.serving import GrpcServer
from octavo.settings import CommonSettings, load
from octavo.v1 import worker_pb2
from tests.certificates import Authority


def _health(port: int, *flags: str) -> int:
    return octavo(["health", f"127.0.0.1:{port}", *flags])


@contextmanager
def _server(security: Security | None = None) -> Generator[tuple[int, Callable[[bool], None]]]:
    """A server on a loop of its own, as `octavo health` runs one too; its port, its switch."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def make() -> tuple[GrpcServer, int]:
        server = GrpcServer(security=security) if security else GrpcServer()
        return server, await server.start("127.0.0.1", 0, worker_pb2.DESCRIPTOR)

    server, port = asyncio.run_coroutine_threadsafe(make(), loop).result(30)

    def switch(is_serving: bool) -> None:
        asyncio.run_coroutine_threadsafe(server.set_serving(is_serving), loop).result(30)

    try:
        yield port, switch
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


def test_the_status_follows_the_server(capfd: pytest.CaptureFixture[str]) -> None:
    with _server() as (port, switch):
        assert _health(port) == 1
        assert f"octavo health: 127.0.0.1:{port}: NOT_SERVING" in capfd.readouterr().err
        switch(True)
        assert _health(port) == 0
        assert _health(port, "--service", "octavo.v1.Worker") == 0
        assert capfd.readouterr().err == ""
        assert _health(port, "--service", "octavo.v1.Wrong") == 1
        assert "NOT_FOUND" in capfd.readouterr().err
    assert _health(port, "--timeout-s", "0.5") == 1
    assert f"127.0.0.1:{port}: " in capfd.readouterr().err


def test_certificates_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    files = Authority().issue(tmp_path)
    for part, path in zip(("CERT", "KEY", "CA"), files, strict=True):
        monkeypatch.setenv(f"OCTAVO_TLS_{part}", str(path))
    # The token is for others: health is asked without it.
    guarded = {"internal_token": "secret"}
    with _server(Security.of(load(CommonSettings, guarded))) as (port, switch):
        switch(True)
        assert _health(port) == 0
        monkeypatch.delenv("OCTAVO_TLS_CERT")
        assert _health(port) == 2
        assert "OCTAVO_TLS_CERT" in capfd.readouterr().err


class _Door(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/readyz" else 503)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


def test_a_url_is_asked_over_http(capfd: pytest.CaptureFixture[str]) -> None:
    server = HTTPServer(("127.0.0.1", 0), _Door)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    assert octavo(["health", f"{url}/readyz"]) == 0
    assert octavo(["health", f"{url}/wrong"]) == 1
    assert "HTTP 503" in capfd.readouterr().err
    server.shutdown()
    server.server_close()
    assert octavo(["health", f"{url}/readyz", "--timeout-s", "2"]) == 1
    assert "Connection refused" in capfd.readouterr().err
