"""What may happen to a fleet. Each fault is caused for real; `Fleet.heal` undoes them all.

Entry points: `Fault`, `FAULTS`, by name.
"""

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from tests.chaos.fleet import Fleet


class Struck(Enum):
    """What a fault takes away. A fleet survives one of each at once, and Redis beside any."""

    WORKER = "worker"
    SCHEDULER = "scheduler"
    ROUTER = "router"
    REDIS = "redis"
    LINK = "link"


class Fault(NamedTuple):
    """`strike` causes it; it lasts until the fleet is healed."""

    name: str
    struck: Struck
    strike: Callable[[Fleet], object]


def _latency(fleet: Fleet) -> None:
    fleet.patient.network.delay_s = 0.2


def _restart_redis(fleet: Fleet) -> None:
    fleet.redis.kill()
    fleet.redis.start()


def _fill_redis(fleet: Fleet) -> None:
    # Less than any record: every write is refused.
    fleet.redis.command("CONFIG", "SET", "maxmemory", 1)


def _of_links(source: str, target: str) -> list[Fault]:
    return [
        Fault(
            f"{source}-{target} link cut",
            Struck.LINK,
            lambda fleet: fleet.network.cut(fleet.busiest_link(source, target)),
        ),
        Fault(
            f"{source}-{target} link silent",
            Struck.LINK,
            lambda fleet: fleet.network.silence(fleet.busiest_link(source, target)),
        ),
    ]


def _of_processes(struck: Struck) -> list[Fault]:
    kind = struck.value
    faults = [
        Fault(f"{kind} killed", struck, lambda fleet: fleet.kill(fleet.busiest(kind))),
        Fault(f"{kind} frozen", struck, lambda fleet: fleet.freeze(fleet.busiest(kind))),
        Fault(f"{kind} told to go", struck, lambda fleet: fleet.terminate(fleet.busiest(kind))),
    ]
    # A frozen router's clients wait for it: nobody else holds their connections.
    return [f for f in faults if f.name != "router frozen"]


_ALL = [
    *_of_processes(Struck.WORKER),
    *_of_processes(Struck.SCHEDULER),
    *_of_processes(Struck.ROUTER),
    *_of_links("router", "scheduler"),
    *_of_links("scheduler", "worker"),
    Fault("redis killed", Struck.REDIS, lambda fleet: fleet.redis.kill()),
    Fault("redis frozen", Struck.REDIS, lambda fleet: fleet.redis.freeze()),
    Fault("redis back empty", Struck.REDIS, _restart_redis),
    Fault("redis 200 ms late", Struck.REDIS, _latency),
    Fault("redis full", Struck.REDIS, _fill_redis),
]
FAULTS = {fault.name: fault for fault in _ALL}
