"""Rank 0's hold on the other ranks: it starts them, waits for them, and ends when one does.

A worker with a dead rank is a dead worker: its collectives would never end, so nothing of it can
be saved. Its leader moves its rows. Must not know: plans, models. Entry point: `Fellows`.
"""

import contextlib
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from octavo.cli.parent import DIE_WITH_PARENT
from octavo.errors import ConfigurationError, UnavailableError
from octavo.settings import WorkerSettings, to_environment, to_flags
from octavo_worker.parallel.links import Door, Link, dial, wait_hang_up
from octavo_worker.parallel.places import KEY, Place
from octavo_worker.parallel.ranks import open_store

_logger = logging.getLogger(__name__)
_ADDRESS_KEY = "octavo/links"
_JOIN_TIMEOUT_S = 600.0
_POLL_S = 0.2
# From the first rank's death: for the process to end in order. The leader's streams break first.
_LAST_WORDS_S = 3.0
_END_TIMEOUT_S = 5.0


class Fellows:
    """The ranks 1 .. N - 1, as rank 0 sees them: `links` in their order.

    `on_fatal` is called once, from another thread, when one of them has ended; a few seconds
    later this process ends by itself, whatever it is stuck in.
    """

    def __init__(
        self, settings: WorkerSettings, place: Place, on_fatal: Callable[[str], None]
    ) -> None:
        """Start them (unless torchrun does) and wait until all are there.

        Raises UnavailableError if one ends before.
        """
        self._on_fatal = on_fatal
        self._is_closed = threading.Event()
        self._have_started = threading.Event()
        self._have_joined = threading.Event()
        self._children: list[subprocess.Popen[bytes]] = []
        self._start_error: OSError | None = None
        key = secrets.token_hex() if place.is_alone else key_of(settings)
        door = Door(key.encode(), on_loopback=place.is_alone)
        self.store = open_store(place)
        host = "127.0.0.1" if place.is_alone else os.environ["MASTER_ADDR"]
        self.store.set(_ADDRESS_KEY, f"{host} {door.port}")
        specs = [
            (_command(settings), _environment(settings, place, rank, self.store, key))
            for rank in range(1, place.share.size if place.is_alone else 1)
        ]
        # On Linux a child dies with the thread that started it: this one lives to the end.
        args = (specs,)
        threading.Thread(target=self._hold, args=args, name="ranks", daemon=True).start()
        self._have_started.wait()
        if self._start_error is not None:
            raise UnavailableError(f"a rank can't be started: {self._start_error}")
        try:
            self.links = self._accept(door, place.share.size - 1)
        finally:
            door.close()
        self._have_joined.set()

    def tell(self, message: bytes) -> None:
        """Send `message` to every rank. Raises OSError if one is gone."""
        for link in self.links:
            link.send(message)

    def close(self, last_message: bytes) -> None:
        """Tell them to end; returns when those of this machine have."""
        self._is_closed.set()
        with contextlib.suppress(OSError):
            self.tell(last_message)
        deadline = time.monotonic() + _END_TIMEOUT_S
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
            child.kill()
            child.wait()
        for link in self.links:
            link.close()

    def _accept(self, door: Door, num_links: int) -> list[Link]:
        links: dict[int, Link] = {}
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        while len(links) < num_links:
            link = door.accept(_POLL_S)
            if link is not None:
                links[link.rank] = link
            for rank, child in enumerate(self._children, start=1):
                if child.poll() is not None:
                    raise UnavailableError(f"rank {rank} ended with status {child.returncode}")
            if time.monotonic() > deadline:
                raise UnavailableError(f"only {len(links)} of {num_links} further ranks came")
        return [links[rank] for rank in sorted(links)]

    # The thread that holds them -------------------------------------------------------

    def _hold(self, specs: list[tuple[list[str], dict[str, str]]]) -> None:
        try:
            for command, environment in specs:
                child = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    # Ctrl-C reaches rank 0 alone: the others compute until it has drained.
                    start_new_session=True,
                )
                self._children.append(child)
        except OSError as error:
            self._start_error = error
        self._have_started.set()
        self._have_joined.wait()
        link = wait_hang_up(self.links)
        if self._is_closed.is_set():
            threading.Event().wait()  # the children's lives hang on this thread
        try:
            self._on_fatal(f"rank {link.rank} ended")
        finally:
            time.sleep(_LAST_WORDS_S)
            logging.shutdown()
            os._exit(1)


def reach_leader(settings: WorkerSettings, place: Place, store: Store) -> Link:
    """This rank's link to rank 0."""
    key = os.environ.get(KEY) or key_of(settings)
    host, port = store.get(_ADDRESS_KEY).decode().rsplit(" ", 1)
    return dial(host, int(port), key.encode(), place.share.rank)


def key_of(settings: WorkerSettings) -> str:
    """The secret of ranks on several machines. Raises ConfigurationError if there is none."""
    if not settings.internal_token:
        raise ConfigurationError(
            "OCTAVO_INTERNAL_TOKEN: ranks that torchrun starts need one: they run what rank 0 "
            "tells them, so it has to prove that it is rank 0",
            param="internal_token",
        )
    return settings.internal_token


def _command(settings: WorkerSettings) -> list[str]:
    return [sys.executable, "-m", "octavo", "worker", *to_flags(settings, only_changed=False)]


def _environment(
    settings: WorkerSettings, place: Place, rank: int, store: Store, key: str
) -> dict[str, str]:
    assert isinstance(store, TCPStore)
    environment = {
        **os.environ,
        **to_environment(settings),
        **place.environment_of(rank, store.port, key),
        DIE_WITH_PARENT: str(os.getpid()),
    }
    environment.pop("OCTAVO_READY_FILE", None)
    return environment
