"""What may happen to a Redis, caused for real and undone. Entry point: `FAULTS`."""

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NamedTuple

from tests.contract.black_hole import BlackHole
from tests.redis_servers import RedisServer


class Patient(NamedTuple):
    """The server, and the network that leads to it."""

    server: RedisServer
    network: BlackHole


class Fault(NamedTuple):
    """`heal` undoes `cause`. `is_slow`: not among the few that every test run tries.

    `is_felt`: writes fail meanwhile, so the lag grows.
    """

    cause: Callable[[Patient], object]
    heal: Callable[[Patient], object]
    is_felt: bool = True
    is_slow: bool = True


def _freeze(patient: Patient) -> None:
    patient.server.freeze()


def _thaw(patient: Patient) -> None:
    patient.server.thaw()


def _configure(name: str, value: str | int) -> Callable[[Patient], object]:
    return lambda patient: patient.server.command("CONFIG", "SET", name, value)


def _all(*steps: Callable[[Patient], object]) -> Callable[[Patient], object]:
    def run(patient: Patient) -> None:
        for step in steps:
            step(patient)

    return run


def _command(*words: str | int) -> Callable[[Patient], object]:
    return lambda patient: patient.server.command(*words)


def _set_network(*, is_open: bool = True, delay_s: float = 0.0) -> Callable[[Patient], object]:
    def run(patient: Patient) -> None:
        patient.network.is_open, patient.network.delay_s = is_open, delay_s

    return run


def _drop_clients(patient: Patient) -> None:
    patient.server.command_with("other", "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


def _unlock(patient: Patient) -> None:
    patient.server.command_with("other", "CONFIG", "SET", "requirepass", "")


_RESET_MEMORY = _all(_configure("maxmemory", 0), _configure("maxmemory-policy", "noeviction"))
# Records are larger than this, so that every write is refused or evicts something.
_TIGHT = 1

FAULTS = {
    "killed, back empty": Fault(
        lambda patient: patient.server.kill(), lambda patient: patient.server.start(), is_slow=False
    ),
    "emptied": Fault(_command("FLUSHALL"), _all(), is_felt=False, is_slow=False),
    "frozen": Fault(_freeze, _thaw, is_slow=False),
    "200 ms late": Fault(_set_network(delay_s=0.2), _set_network(), is_felt=False),
    "full": Fault(_all(_command("FLUSHALL"), _configure("maxmemory", _TIGHT)), _RESET_MEMORY),
    "evicting": Fault(
        _all(_configure("maxmemory-policy", "allkeys-lru"), _configure("maxmemory", _TIGHT)),
        _RESET_MEMORY,
        is_felt=False,
    ),
    "read-only": Fault(_command("REPLICAOF", "127.0.0.1", 1), _command("REPLICAOF", "NO", "ONE")),
    "paused": Fault(_command("CLIENT", "PAUSE", 5000), _command("CLIENT", "UNPAUSE")),
    "another password": Fault(_all(_configure("requirepass", "other"), _drop_clients), _unlock),
    "cut off without a word": Fault(_set_network(is_open=False), _set_network()),
}


@contextmanager
def network_to(port: int) -> Generator[BlackHole]:
    """A BlackHole that runs in a thread of its own."""
    hole = BlackHole()
    is_ready, loop = threading.Event(), asyncio.new_event_loop()
    is_over = asyncio.Event()

    async def run() -> None:
        async with hole.running(port):
            is_ready.set()
            await is_over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), daemon=True)
    thread.start()
    try:
        assert is_ready.wait(20)
        yield hole
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join(20)
        loop.close()
