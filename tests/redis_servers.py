"""Real Redis and Valkey servers for tests: started on free ports, broken on purpose, reaped."""

import atexit
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import redis

from octavo.embedded_valkey import find_binary
from tests.certificates import CertificateFiles
from tests.programs import find_program

_START_TIMEOUT_S = 20.0


def valkey_binary() -> str:
    """The embedded Valkey."""
    return str(find_binary())


def redis_binary() -> str:
    """Debian's redis-server; skips where it isn't installed, but never in CI."""
    return find_program("redis-server", "redis-server")


BINARIES = {"valkey": valkey_binary, "redis": redis_binary}


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _tls_options(tls: CertificateFiles) -> dict[str, str]:
    """As the server's command line has them; its links to other servers are TLS too."""
    files = {"tls-cert-file": tls.cert, "tls-key-file": tls.key, "tls-ca-cert-file": tls.ca}
    always = {"tls-cluster": "yes", "tls-replication": "yes"}
    return always | {name: str(path) for name, path in files.items()}


def _tls_arguments(tls: CertificateFiles) -> dict[str, Any]:
    """As redis.Redis has them."""
    return {
        "ssl": True,
        "ssl_certfile": str(tls.cert),
        "ssl_keyfile": str(tls.key),
        "ssl_ca_certs": str(tls.ca),
    }


class RedisServer:
    """One server on a port of its own, which it keeps over restarts. It persists nothing."""

    def __init__(
        self,
        binary: str,
        options: Mapping[str, str] | None = None,
        *,
        config: str | None = None,
        arguments: tuple[str, ...] = (),
        tls: CertificateFiles | None = None,
    ) -> None:
        self._binary = binary
        self.options = dict(options or {})
        self._config = config
        self._arguments = arguments
        # Then nothing but TLS is spoken, and clients need certificates too.
        self._tls = tls
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="octavo-test-redis-"))
        self.port = free_port()
        atexit.register(self.remove)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Frozen or not."""
        return self._process is not None

    def start(self) -> Self:
        """Start empty and wait until it answers."""
        options = {"bind": "127.0.0.1", "port": str(self.port), "dir": str(self._folder)}
        if self._tls is not None:
            options |= {"port": "0", "tls-port": str(self.port)} | _tls_options(self._tls)
        if self._config is None:
            options |= {"save": "", "appendonly": "no"}
        else:
            (self._folder / "server.conf").write_text(self._config)
        options |= self.options
        command = [self._binary]
        if self._config is not None:
            command.append(str(self._folder / "server.conf"))
        command += [part for name, value in options.items() for part in (f"--{name}", value)]
        command += self._arguments
        log_path = self._folder / "server.log"
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._folder
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{command} doesn't start: {log_path.read_text()[-2000:]}")
            time.sleep(0.02)
        return self

    def kill(self) -> None:
        """SIGKILL; what it held is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """SIGSTOP: it accepts connections and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def remove(self) -> None:
        """Kill it and delete its files."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
        atexit.unregister(self.remove)

    def command(self, *words: str | int | float | bytes) -> Any:
        """Run one command on a fresh connection, as the operator would."""
        return self.command_with(None, *words)

    def command_with(self, password: str | None, *words: str | int | float | bytes) -> Any:
        """`command` for a server that wants a password."""
        tls: dict[str, Any] = {} if self._tls is None else _tls_arguments(self._tls)
        with redis.Redis(port=self.port, password=password, protocol=2, **tls) as client:
            return client.execute_command(*words)

    def call_counts(self) -> dict[str, int]:
        """Calls per command since `CONFIG RESETSTAT`, those inside scripts included."""
        with redis.Redis(port=self.port, protocol=2) as client:
            stats: dict[str, Any] = client.info("commandstats")
        return {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in stats.items()}

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                if self._tls is not None:
                    return True
                connection.sendall(b"PING\r\n")
                # An error is an answer too: a server with a password wants it first.
                return connection.recv(16)[:1] in (b"+", b"-")
        except OSError:
            return False

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.remove()
